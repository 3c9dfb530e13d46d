"""The laws of the ranks of one training: they train as one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from otel_torch.laws.facts import FEWEST_STEPS, BrokenLaw, listed
from otel_torch.laws.series import Series, SeriesName, TrainingSeries

# equal gradients have equal norms up to the order of a sum, and equal parameters have equal norms
_SAME_GRADIENTS, _SAME_PARAMETERS = 1e-3, 1e-9

Values = dict[str, float]  # by step


class _Replicas:
    """What each rank has recorded of one model, or of one of its modules, by step."""

    def __init__(self, model: str, ranks: Sequence[TrainingSeries], module: str = "") -> None:
        self._model, self._module, self._ranks = model, module, ranks
        self.parameters, self.gradients = self.of("param_norm"), self.of("grad_norm")
        self.known, self.stepped = _common(self.parameters), _common(self.gradients)
        self.drifted = [
            step for step in self.known if not _are_close(self.parameters, step, _SAME_PARAMETERS)
        ]
        self.apart = [
            step for step in self.stepped if not _are_close(self.gradients, step, _SAME_GRADIENTS)
        ]

    def of(self, label: str) -> list[Values]:
        """Return the values of a quantity, of each rank."""
        name = SeriesName(self._model, self._module, label)
        return [_by_step(training, name) for training in self._ranks]

    @property
    def modules(self) -> dict[str, _Replicas]:
        """The modules of which every rank has parameters."""
        own = (training.modules(self._model, "param_norm") for training in self._ranks)
        common = set.intersection(*map(set, own))
        return {name: _Replicas(self._model, self._ranks, name) for name in sorted(common)}

    @property
    def meet_again(self) -> bool:
        """Whether the parameters are equal once more after they differed: they are averaged."""
        first = self.known.index(self.drifted[0])
        return any(step not in self.drifted for step in self.known[first:])

    @property
    def are_sent_from_one(self) -> bool:
        """Whether the first rank alone goes on with what its steps have left."""
        first, *others = (sum(steps.values()) for steps in self.of("rewritten"))
        return first == 0 and all(count > 1 for count in others)

    @property
    def begin_equal(self) -> bool:
        """Whether the parameters are those of replicas, before the first step."""
        return bool(self.known) and self.known[0] not in self.drifted

    @property
    def drift_apart(self) -> bool:
        """Whether parameters that begin equal differ from then on, and so do the gradients."""
        if not (self.begin_equal and self.apart and self.drifted):
            return False
        return not self.meet_again or self.are_sent_from_one

    @property
    def are_drawn(self) -> bool:
        """Whether the first parameters are no constants, which other parts of a layer have, too."""
        square = self.parameters[0][self.known[0]] ** 2
        return not math.isclose(square, round(square), rel_tol=_SAME_PARAMETERS)


def broken_rank_laws(
    ranks: Sequence[TrainingSeries], off: frozenset[str] = frozenset()
) -> list[BrokenLaw]:
    """Return the laws that the ranks of one training break together.

    Args:
        ranks: The training of each rank, in their order.
        off: The laws that are not checked.
    """
    models = dict.fromkeys(model for training in ranks for model in training.models)
    broken = []
    for model in models if len(ranks) > 1 else ():
        replicas = _Replicas(model, ranks)
        for law in LAWS:
            text = None if law.__name__ in off else law(replicas)
            if text is not None:
                broken.append(BrokenLaw(law.__name__, model, text))
    return broken


def replicas_differ(replicas: _Replicas) -> str | None:
    """Ranks with the same gradients have the same parameters.

    Parts of a split model have other gradients, too, but what all ranks hold of it stays equal.
    """
    if not replicas.begin_equal and (apart := _replicated_parts_that_drift(replicas)):
        name, part = next(iter(apart.items()))
        norms = [f"{gradient[part.apart[0]]:.4g}" for gradient in part.gradients]
        return (
            f"the ranks hold parts of this model, but begin with the same parameters of "
            f"{listed(apart)}, which differ from {part.drifted[0]} on: the gradient norms of "
            f"{name} are {_listed(norms)} at {part.apart[0]}. Sum up, scale and clip the gradients "
            "of what all ranks hold in the same way on each"
        )
    stepped, drifted = replicas.stepped, replicas.drifted
    if len(stepped) < FEWEST_STEPS or replicas.apart or not drifted:
        return None
    norms = [f"{norms[drifted[0]]:.6g}" for norms in replicas.parameters]
    return (
        f"the parameters of the ranks differ from {drifted[0]} on, though their gradients are the "
        f"same: their norms are {_listed(norms)}. They began with other weights, or one of them "
        "changes its own"
    )


def _replicated_parts_that_drift(replicas: _Replicas) -> dict[str, _Replicas]:
    return {
        name: part for name, part in replicas.modules.items() if part.drift_apart and part.are_drawn
    }


def gradients_not_averaged(replicas: _Replicas) -> str | None:
    """Ranks that begin with equal parameters do not drift apart by other gradients, unless these
    are averaged now and then; to send those of one rank to the others is no average.

    Parts of a split model differ from the first step on, and a framework that averages gradients
    inside of its optimizer's step keeps the parameters equal.
    """
    apart, drifted = replicas.apart, replicas.drifted
    if not replicas.drift_apart:
        return None
    norms = [f"{gradient[apart[0]]:.4g}" for gradient in replicas.gradients]
    return (
        "the gradient norms of the ranks differ, though they begin with the same parameters: "
        f"{_listed(norms)} at {apart[0]}. From {drifted[0]} on the parameters differ, too: the "
        "gradients are not averaged over the ranks"
    )


def same_batch_on_ranks(replicas: _Replicas) -> str | None:
    """Replicas do not have the same loss in each step, to the last digit."""
    losses = replicas.of("loss")
    steps = _common(losses)
    is_same = all(_are_close(losses, step, 0.0) for step in steps)
    if replicas.drifted or not replicas.known or len(steps) < FEWEST_STEPS or not is_same:
        return None
    if not any(math.isfinite(losses[0][step]) for step in steps):
        return None
    return (
        f"all {len(losses)} ranks have the same loss in each of {len(steps)} steps, to the last "
        "digit: they see the same batches. Give each its own part of the data"
    )


def _by_step(training: TrainingSeries, name: SeriesName) -> Values:
    series = training.series.get(name, Series())
    return {str(training.steps[step]): value for step, value in series.by_step().items()}


def _common(ranks: Sequence[Values]) -> list[str]:
    return [step for step in ranks[0] if all(step in values for values in ranks)]


def _are_close(ranks: Sequence[Values], step: str, limit: float) -> bool:
    values = [values[step] for values in ranks]
    if not all(map(math.isfinite, values)):
        return True  # another law
    return max(values) - min(values) <= limit * max(map(abs, values))


def _listed(norms: Sequence[str]) -> str:
    shown = ", ".join(norms[:4])
    return shown if len(norms) <= 4 else f"{shown}, …"


LAWS: tuple[Callable[[_Replicas], str | None], ...] = (
    replicas_differ,
    gradients_not_averaged,
    same_batch_on_ranks,
)
