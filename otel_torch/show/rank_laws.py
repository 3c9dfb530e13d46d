"""What the ranks of one training obey together, and a line for each law that they break."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from otel_torch.show.training import Series, TrainingSeries

# equal gradients have equal norms up to the order of a sum, and equal parameters have equal norms
_SAME_GRADIENTS, _SAME_PARAMETERS = 1e-3, 1e-9

Values = dict[str, float]  # by step


def broken_rank_laws(ranks: Sequence[TrainingSeries]) -> Iterator[str]:
    """Yield a sentence for each model whose ranks do not train as one.

    Args:
        ranks: The training of each rank, in their order.
    """
    models = dict.fromkeys(model for training in ranks for model in training.models)
    for model in models if len(ranks) > 1 else ():
        yield from _gradients_agree(model, ranks)


def _gradients_agree(model: str, ranks: Sequence[TrainingSeries]) -> Iterator[str]:
    """Yield that the ranks begin with equal parameters, have other gradients, and drift apart.

    Parts of a split model differ from the first step on, and a framework that averages gradients
    inside of its optimizer's step keeps the parameters equal.
    """
    parameters = [_by_step(training, model, "param_norm") for training in ranks]
    gradients = [_by_step(training, model, "grad_norm") for training in ranks]
    known, stepped = _common(parameters), _common(gradients)
    if not known or not _are_close(parameters, known[0], _SAME_PARAMETERS):
        return
    apart = [step for step in stepped if not _are_close(gradients, step, _SAME_GRADIENTS)]
    drifted = [step for step in known if not _are_close(parameters, step, _SAME_PARAMETERS)]
    if apart and drifted:
        norms = [f"{gradient[apart[0]]:.4g}" for gradient in gradients]
        yield (
            f"{model}: the gradient norms of the ranks differ, though they begin with the same "
            f"parameters: {_listed(norms)} at {apart[0]}. From {drifted[0]} on the parameters "
            "differ, too: the gradients are not averaged over the ranks"
        )


def _by_step(training: TrainingSeries, model: str, label: str) -> Values:
    series = training.totals(model).get(label, Series())
    return {
        str(training.steps[step]): value
        for step, value in zip(series.steps, series.values, strict=True)
    }


def _common(ranks: Sequence[Values]) -> list[str]:
    """Return the steps that all ranks have, in order."""
    return [step for step in ranks[0] if all(step in values for values in ranks)]


def _are_close(ranks: Sequence[Values], step: str, limit: float) -> bool:
    values = [values[step] for values in ranks]
    if not all(map(math.isfinite, values)):
        return True  # another law
    return max(values) - min(values) <= limit * max(map(abs, values))


def _listed(norms: Sequence[str]) -> str:
    shown = ", ".join(norms[:4])
    return shown if len(norms) <= 4 else f"{shown}, …"
