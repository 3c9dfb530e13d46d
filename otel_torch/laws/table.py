"""The table of laws by name, and which of them a training breaks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from otel_torch.laws import loop, parts, ranks, whole_model
from otel_torch.laws.facts import FEWEST_STEPS, BrokenLaw, TrainingFacts
from otel_torch.laws.series import TrainingSeries

Law = Callable[[TrainingFacts], str | None]

# the surest first
WHOLE_MODEL: tuple[Law, ...] = (
    whole_model.every_step_skipped,
    whole_model.learning_rate_zero,
    whole_model.no_gradients,
    whole_model.gradients_zero,
    whole_model.optimizer_holds_others,
    whole_model.nothing_changes,
)
PARTS: tuple[Law, ...] = (
    parts.no_gradient,
    parts.not_held,
    parts.never_changes,
    parts.weights_parted,
    parts.batch_norm_still,
    parts.rounded_away,
    loop.optimizer_remade,
    loop.gradients_not_cleared,
    loop.clipped_after_step,
    loop.clipped_early,
    loop.eval_while_training,
    loop.train_while_evaluating,
    loop.scheduler_never_stepped,
    loop.scheduler_before_optimizer,
    loop.same_batch,
    loop.state_not_continued,
    loop.loss_ignores_inputs,
)
# the event of the training loop whose line breaks a law
_EVENTS = {
    "every_step_skipped": "step",
    "learning_rate_zero": "step",
    "nothing_changes": "step",
    "rounded_away": "step",
    "optimizer_remade": "step",
    "gradients_not_cleared": "step",
    "clipped_after_step": "clip",
    "clipped_early": "clip",
    "eval_while_training": "forward",
    "train_while_evaluating": "evaluation",
    "scheduler_never_stepped": "schedule",
    "scheduler_before_optimizer": "schedule",
    "same_batch": "forward",
    "loss_ignores_inputs": "forward",
}
NAMES = tuple(law.__name__ for law in (*WHOLE_MODEL, *PARTS, *ranks.LAWS))
# that switches laws off; a recording's metadata name those that its run did not check
SETTING = "OTEL_TORCH_LAWS_OFF"


class TrainingVerdict(NamedTuple):
    """Whether a model trains: `trains`, `does not train` or `cannot tell`, and why."""

    word: Literal["trains", "does not train", "cannot tell"]
    why: str

    def __str__(self) -> str:
        return f"{self.word}: {self.why}"


def broken_laws(
    training: TrainingSeries,
    metadata: Mapping[str, Any] = MappingProxyType({}),
    called: Iterable[str] = (),
) -> list[BrokenLaw]:
    """Return the laws that the models of a recording break, those of a model together.

    Args:
        metadata: Of the recording.
        called: The modules with activations in the recording.
    """
    off = switched_off(metadata)
    laws = []
    for model in training.models:
        facts = facts_of(training, metadata, called, model)
        for name, text in _broken(facts, off):
            line = facts.line_of(_EVENTS.get(name, ""))
            laws.append(BrokenLaw(name, model, f"{text} ({line})" if line else text, line))
    return laws


def _broken(facts: TrainingFacts, off: frozenset[str]) -> list[tuple[str, str]]:
    """Return the name and sentence of each broken law; of what trains nothing, only the cause."""
    for laws in (WHOLE_MODEL, PARTS):
        checked = [law for law in laws if law.__name__ not in off]
        broken = [(law.__name__, text) for law in checked if (text := law(facts)) is not None]
        if broken:
            return broken[:1] if laws is WHOLE_MODEL else broken
    return []


def verdict_on(
    training: TrainingSeries, metadata: Mapping[str, Any], broken: Iterable[BrokenLaw], model: str
) -> TrainingVerdict:
    """Return whether a model trains, by its series and the laws that it breaks."""
    own = [law for law in broken if law.model == model]
    whole = {law.__name__ for law in WHOLE_MODEL}
    facts = facts_of(training, metadata, (), model)
    if own and (own[0].law in whole or whole_model.trains(facts) is False):
        return TrainingVerdict("does not train", own[0].text)
    ratios = facts.total("update_ratio")
    if len(ratios) < FEWEST_STEPS:
        looked_at = f"{len(ratios)} steps" if ratios else "no step"
        return TrainingVerdict(
            "cannot tell", f"the change of the parameters is known of {looked_at}"
        )
    losses = facts.total("loss")
    if losses and not math.isfinite(losses[-1]):
        return TrainingVerdict("does not train", "its loss ends as NaN or Inf")
    loss = f", the loss goes from {losses[0]:.4g} to {losses[-1]:.4g}" if losses else ""
    laws = f", and breaks {len(own)} law{'s' * (len(own) > 1)} of training" if own else ""
    return TrainingVerdict("trains", f"the parameters change{loss}{laws}")


def facts_of(
    training: TrainingSeries, metadata: Mapping[str, Any], called: Iterable[str], model: str
) -> TrainingFacts:
    """Return what a recording has of the training of one of its models."""
    optimizers, loops = metadata.get("optimizers"), metadata.get("training_loops")
    entries = [entry for entry in optimizers or () if isinstance(entry, dict)]
    own = loops.get(model) if isinstance(loops, dict) else None
    idle = metadata.get("idle_optimizers")
    return TrainingFacts(
        training,
        model,
        [entry for entry in entries if model in entry.get("models", ())],
        frozenset(called) or None,
        own if isinstance(own, dict) else {},
        [entry for entry in idle or () if isinstance(entry, dict)],
        metadata.get("ended_cleanly") is True,
    )


def switched_off(metadata: Mapping[str, Any]) -> frozenset[str]:
    """Return the laws that a run was told not to check."""
    settings = metadata.get("settings")
    names = settings.get(SETTING, "") if isinstance(settings, dict) else ""
    return frozenset(name.strip() for name in str(names).split(","))
