"""The laws without which nothing trains at all."""

from __future__ import annotations

from itertools import takewhile

from otel_torch.laws.facts import FEWEST_STEPS, TrainingFacts, are_all
from otel_torch.laws.parts import rounded_away
from otel_torch.laws.series import Series
from otel_torch.records import LoopStep
from otel_torch.training_quantities import split_label


def every_step_skipped(facts: TrainingFacts) -> str | None:
    """The gradient scaler lets steps through."""
    skipped = facts.total("skipped")
    if not are_all(skipped, 1.0):
        return None
    return (
        f"the gradient scaler skips every step, all {len(skipped)}: nothing is trained. The "
        "gradients have NaN or Inf each time, or the loss scale is far too high"
    )


def learning_rate_zero(facts: TrainingFacts) -> str | None:
    """The learning rate is not 0 in each step."""
    rates = _learning_rates(facts)
    if not rates or not all(are_all(list(rate.values), 0.0) for rate in rates):
        return None
    return f"the learning rate is 0 in every step, all {len(rates[0].values)}: nothing is trained"


def no_gradients(facts: TrainingFacts) -> str | None:
    """The loss depends on the parameters."""
    idle = set(facts.without_gradient)
    if not facts.trained or not facts.trained <= idle or any(facts.total("grad_norm")):
        return None
    if any(facts.total("update_ratio")):
        return None
    return (
        "no parameter has a gradient in any step, and none changes: the loss does not depend on "
        "them, as after detach() or under no_grad(), or the gradients are cleared before the step"
    )


def gradients_zero(facts: TrainingFacts) -> str | None:
    """The gradients are not all 0."""
    norms = facts.total("grad_norm")
    if not are_all(norms, 0.0):
        return None
    return f"the gradients of all parameters are 0 in every step, all {len(norms)}"


def optimizer_holds_others(facts: TrainingFacts) -> str | None:
    """The optimizer holds parameters of the model."""
    orphans = [entry for entry in facts.idle if entry.get("steps", 0) >= FEWEST_STEPS]
    if orphans and facts.total("unused_losses"):
        return (
            f"the optimizer ({orphans[0].get('class')}) holds other parameters than the model: it "
            f"makes {orphans[0].get('steps')} steps without a gradient, and none changes the model"
        )
    holders = [entry for entry in facts.optimizers if entry.get("copies")]
    if not holders or len(holders) < len(facts.optimizers) or trains(facts) is not False:
        return None
    return (
        f"the optimizer ({holders[0].get('class')}) holds other parameters than the model, and "
        "none of the model's changes: they were replaced after it was made, or what it computes "
        "is not copied back"
    )


def nothing_changes(facts: TrainingFacts) -> str | None:
    """The parameters change."""
    unstepped = [entry for entry in facts.idle if not entry.get("steps")]
    losses = facts.total("unused_losses")
    if losses and unstepped and facts.has_ended:
        return (
            f"{losses[-1]:.0f} losses give the model gradients, and its optimizer "
            f"({unstepped[0].get('class')}) never steps"
        )
    restored = set(facts.loop.get("restored_parameters") or ())
    if facts.trained and facts.trained <= restored:
        return (
            "each step of the optimizer is undone before the next one: something puts the old "
            "values of all parameters back"
        )
    if facts.held and not facts.trained and facts.updates >= FEWEST_STEPS:
        return (
            "all parameters that the optimizer holds are frozen: requires_grad was switched off "
            "behind it, or it was given the wrong ones"
        )
    if (since := _still_since(facts)) is not None:
        return (
            f"no parameter changes any more after {since}, although gradients reach them and the "
            "learning rate is not 0: what the step does has stopped"
        )
    if trains(facts) is not False or rounded_away(facts):
        return None
    steps = len(facts.total("update_ratio"))
    return (
        f"no parameter changes in any of the {steps} steps looked at: what the optimizer adds is 0 "
        "or below the rounding of the parameters"
    )


def _learning_rates(facts: TrainingFacts) -> list[Series]:
    totals = facts.totals.items()
    return [series for label, series in totals if split_label(label).quantity == "lr"]


def _still_since(facts: TrainingFacts) -> LoopStep | None:
    """Return the last step that changed a parameter, if as many after it should have, too."""
    ratios = facts.totals.get("update_ratio", Series())
    values = list(zip(ratios.steps, ratios.values, strict=True))
    still = [step for step, _ in takewhile(lambda value: not value[1], reversed(values))]
    norms = facts.totals.get("grad_norm", Series()).by_step()
    rates = [rate.by_step() for rate in _learning_rates(facts)]
    idle = [step for step in still if norms.get(step) and any(rate.get(step) for rate in rates)]
    changed = len(values) - len(still)
    if not changed or len(idle) < max(FEWEST_STEPS, changed):
        return None
    return facts.training.steps[values[changed - 1][0]]


def trains(facts: TrainingFacts) -> bool | None:
    """Return whether the parameters change; None if too little is known."""
    ratios = facts.total("update_ratio")
    if are_all(ratios, 0.0):
        return False
    return True if any(ratios) else None
