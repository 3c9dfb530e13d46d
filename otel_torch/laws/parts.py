"""The laws of the parts of a model: each trains, unless it is frozen on purpose.

What follows by a moving average or is copied back by its framework does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from otel_torch.laws.facts import FEWEST_STEPS, TrainingFacts, are_all, listed, owner_of, owners
from otel_torch.rendering.words import plural

# of the elements of parameters in half precision that have a gradient
_MOST_ROUNDED = 0.5


def no_gradient(facts: TrainingFacts) -> str | None:
    """Gradients reach every part that runs."""
    idle = [
        name
        for name in facts.without_gradient
        if name in facts.trained and facts.is_called(name) and not facts.may_change(name)
    ]
    return f"no gradient reaches {owners(idle)}, in any step: no change there" if idle else None


def not_held(facts: TrainingFacts) -> str | None:
    """An optimizer holds every part that gets gradients."""
    unheld = [name for name in facts.named("unused_gradients") if not facts.may_change(name)]
    outside = facts.loop.get("unheld_parts") or ()
    if outside:
        return (
            f"no optimizer holds {listed(outside)}, which run with the model in training mode and "
            "get gradients: they are no part of it, as in a plain list or a loss with weights"
        )
    if not unheld:
        return None
    return f"no optimizer holds {owners(unheld)}, although gradients reach it: no change there"


def never_changes(facts: TrainingFacts) -> str | None:
    """A module with gradients that an optimizer holds changes."""
    if rounded_away(facts):
        return None
    restored = facts.loop.get("restored_parameters")
    if restored:
        return (
            f"each change of {owners(restored)} is undone before the next step: something puts the "
            "old values back"
        )
    held = {owner_of(name) for name in facts.trained}
    still = [
        module
        for module in facts.modules("update_ratio")
        if module in held
        and are_all(facts.of_module("update_ratio", module), 0.0)
        and any(facts.of_module("grad_norm", module))
    ]
    still += [
        name
        for name in facts.loop.get("unmoved_parameters") or ()
        if name in facts.trained and owner_of(name) not in still
    ]
    if not still:
        return None
    return (
        f"no change in {listed(still)} in any step looked at, although gradients reach it and an "
        "optimizer holds it: its learning rate is 0, what the optimizer writes to is a copy, or "
        "something puts the old values back"
    )


def weights_parted(facts: TrainingFacts) -> str | None:
    """Weights that were tied stay tied."""
    pairs: Iterable[Mapping[str, Any]] = facts.loop.get("parted_weights") or ()
    shown = [f"`{pair.get('first')}` and `{pair.get('second')}`" for pair in pairs]
    if not shown:
        return None
    return (
        f"{shown[0]} began as one weight and have parted: two parameters are trained where the "
        "model ties them"
    )


def batch_norm_still(facts: TrainingFacts) -> str | None:
    """The statistics of a batch norm that trains move."""
    still = facts.loop.get("still_statistics") or ()
    if not still:
        return None
    return (
        f"the running statistics of {listed(still)} do not move, though the model trains: an "
        "evaluation will use those of the beginning"
    )


def rounded_away(facts: TrainingFacts) -> str | None:
    """Updates are not lost to the rounding of the parameters."""
    shares = facts.total("rounded_away")
    if len(shares) < FEWEST_STEPS or min(shares) < _MOST_ROUNDED:
        return None
    return (
        f"{100 * sum(shares) / len(shares):.0f} % of the parameters' elements do not change in a "
        f"step although they have a gradient, in each of the {plural(len(shares), 'step')} looked "
        "at: the updates are below the rounding of half precision. Keep fp32 masters"
    )
