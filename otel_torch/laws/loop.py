"""The laws of the training loop: what its lines do, and in which order."""

from __future__ import annotations

from otel_torch.laws.facts import FEWEST_STEPS, TrainingFacts, in_steps
from otel_torch.rendering.words import plural

# so many optimizers of one class in a row, each for one step, are made in the loop
_REMADE = 4
# a batch that comes back that often has no other behind it
_REPEATED = 4


def optimizer_remade(facts: TrainingFacts) -> str | None:
    """An optimizer lives longer than a step, or has nothing to keep."""
    brief = [
        entry
        for entry in facts.optimizers
        if entry.get("first_step") == entry.get("last_step") and _has_memory(entry)
    ]
    if len(brief) < _REMADE or 2 * len(brief) < len(facts.optimizers):
        return None
    return (
        f"{len(brief)} optimizers ({brief[0].get('class')}) made one step each: a new one is made "
        "in the loop, so momentum and averages are lost"
    )


def _has_memory(entry: dict[str, object]) -> bool:
    """Return whether an optimizer keeps anything from step to step: plain SGD does not."""
    groups = entry.get("groups")
    first = groups[0] if isinstance(groups, list) and groups else {}
    settings = first.get("settings", {}) if isinstance(first, dict) else {}
    return bool(settings.get("momentum", True))


def gradients_not_cleared(facts: TrainingFacts) -> str | None:
    """Gradients are cleared between two steps."""
    steps = facts.steps_with("uncleared")
    if len(steps) < 2:
        return None
    return (
        f"gradients of the step before are not cleared {in_steps(steps)}: each step adds to all "
        "gradients before it. zero_grad() is missing"
    )


def clipped_after_step(facts: TrainingFacts) -> str | None:
    """Gradients are clipped before the step that uses them."""
    steps = facts.steps_with("late_clips")
    if not steps:
        return None
    return (
        f"gradients are clipped after the step that used them, {in_steps(steps)}: what the "
        "optimizer gets is not clipped"
    )


def clipped_early(facts: TrainingFacts) -> str | None:
    """Gradients are clipped once all of a step are added up."""
    steps = facts.steps_with("early_clips")
    if len(steps) < 2:
        return None
    return (
        f"gradients are clipped before all of the step are added up, {in_steps(steps)}: their sum "
        "may be as many times the limit as there are batches"
    )


def eval_while_training(facts: TrainingFacts) -> str | None:
    """A model with dropout or batch norm trains in training mode."""
    steps = facts.steps_with("eval_forwards")
    if not steps:
        return None
    return (
        f"the model trains in eval mode {in_steps(steps)}: dropout is off, and batch norms keep "
        "their statistics. Call train() before"
    )


def train_while_evaluating(facts: TrainingFacts) -> str | None:
    """A model with dropout or batch norm is evaluated in eval mode.

    A forward without gradients in most steps is part of the training, such as a generator's.
    """
    steps = facts.steps_with("train_evaluations")
    if not steps or facts.updates < FEWEST_STEPS or 2 * len(steps) > facts.updates:
        return None
    return (
        f"the model is evaluated in training mode {in_steps(steps)}: its dropout is on, "
        "and its batch norms learn from what is evaluated. Call eval() before"
    )


def scheduler_never_stepped(facts: TrainingFacts) -> str | None:
    """A schedule of learning rates runs."""
    if not facts.has_ended or facts.updates < FEWEST_STEPS:
        return None
    for entry in facts.optimizers:
        schedulers = entry.get("schedulers") or ()
        unstepped = [scheduler for scheduler in schedulers if not scheduler.get("steps")]
        # one of several may wait for its turn, unless it has changed the rate already
        changed = [scheduler for scheduler in unstepped if scheduler.get("changes_rate")]
        if changed or (unstepped and len(unstepped) == len(schedulers)):
            return (
                f"{(changed or unstepped)[0].get('class')} was made and never stepped: "
                f"the learning rate is not what it should be in all {plural(facts.updates, 'step')}"
            )
    return None


def scheduler_before_optimizer(facts: TrainingFacts) -> str | None:
    """The optimizer makes a step before its schedule does."""
    for entry in facts.optimizers:
        for scheduler in entry.get("schedulers") or ():
            before, was_loaded = scheduler.get("steps_before"), scheduler.get("resumed_at")
            if before and was_loaded is None and not any(facts.total("skipped")):
                return (
                    f"{scheduler.get('class')} steps before the optimizer "
                    f"({entry.get('class')}): the first learning rate is never used"
                )
    return None


def same_batch(facts: TrainingFacts) -> str | None:
    """Steps have different batches."""
    repeated = len(facts.steps_with("repeated_batch"))
    if repeated < max(_REPEATED, facts.updates // 2):
        return None
    if repeated < facts.updates - 1:
        return (
            f"{repeated} of {facts.updates} steps have the batch of the step before, though it is "
            "made anew each time: the workers of the loader draw the same numbers"
        )
    return (
        f"each of the {facts.updates} steps has the same batch, though it is made anew each time: "
        "the loader begins anew, its seed is set again, or the slice does not move"
    )


def state_not_continued(facts: TrainingFacts) -> str | None:
    """What was loaded from a checkpoint is what trains on."""
    if facts.loop.get("overwritten"):
        return (
            "the weights that were loaded were overwritten before the first step: they are "
            "initialised again behind load_state_dict()"
        )
    if facts.loop.get("nothing_loaded"):
        return (
            "no name of the state that was loaded is one of the model's, so that nothing was "
            "loaded: strict=False hides it"
        )
    if facts.loop.get("loaded_elsewhere"):
        return (
            "the checkpoint was loaded into another instance of the model, which never runs: this "
            "one trains on from its own weights"
        )
    for entry in facts.optimizers:
        if entry.get("lost_load") and not entry.get("loaded"):
            return (
                f"a state was loaded into another {entry.get('class')}, which never steps: this "
                "one begins anew"
            )
        for scheduler in entry.get("schedulers") or ():
            if scheduler.get("resumed_at") is not None and not entry.get("loaded"):
                return (
                    f"{scheduler.get('class')} goes on at step {scheduler.get('resumed_at')}, "
                    f"and its optimizer ({entry.get('class')}) begins anew: its state was not "
                    "loaded"
                )
    return None


def loss_ignores_inputs(facts: TrainingFacts) -> str | None:
    """What the model returns depends on its inputs."""
    steps = facts.steps_with("equal_outputs")
    if len(steps) < max(FEWEST_STEPS, len(facts.total("update_ratio"))):
        return None
    return (
        f"the model returns the same for every sample of a batch in all {len(steps)} steps, though "
        "the samples differ, or its input is one number alone: the loss does not depend on the data"
    )
