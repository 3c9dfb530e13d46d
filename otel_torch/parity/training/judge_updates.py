"""Name the first update that is wrong though its gradients are right, and the setting behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from otel_torch.parity.finding import Cause, Finding
from otel_torch.parity.training.optimizers import SettingDifference
from otel_torch.parity.training.step_context import (
    ONE_FACTOR,
    Deviation,
    Place,
    StepContext,
    times,
    whole_model,
)
from otel_torch.parity.training.updates import UpdatePair
from otel_torch.rendering.words import plural

# how far the updates of several parameters may be from one factor, which rounding blurs
_ONE_RATE = 0.01
# the share of an optimizer's parameters that are off if all are off alike
_ALL = 0.9
# a cause, and the wrong updates that it explains
_Explanation = tuple[Cause, list[UpdatePair]] | None


def judge_updates(
    context: StepContext, updates: Sequence[UpdatePair], has_gradients: bool
) -> Finding | None:
    """Return what is wrong with the updates of a step whose gradients are right.

    Args:
        has_gradients: Whether gradients were compared.
    """
    known = [pair for pair in updates if pair.state != "unknown"]
    wrong = [pair for pair in known if pair.state != "right"]
    if not wrong:
        return None
    explanations = (explain(context, wrong) for explain in _EXPLANATIONS)
    explained = next((answer for answer in explanations if answer is not None), None)
    cause, alike = explained or (None, wrong)
    pair = alike[0]
    places = pair.trained.keys.map(
        lambda keys: Place(keys[0].module, f"param.{keys[0].name}", "parameter")
    )
    port_model = pair.trained.models.port
    if _is_all_of_optimizer(context, alike, known):
        places, port_model = whole_model("param"), context.steps.port.model
    before = "The gradients of the step match, and so do the parameters before it"
    if not has_gradients:
        before = "The parameters before the step match, its gradients were not compared"
    text = f"{before}; {len(wrong)} of {len(known)} updates do not."
    deviation = Deviation(pair.error, pair.limit, "weights")
    finding = context.finding("update", places, text, cause, deviation)
    return replace(finding, port_model=port_model)


def describe_hidden_settings(context: StepContext, updates: Sequence[UpdatePair]) -> str | None:
    """Return a warning where settings differ and no update shows it, as in bf16; else None."""
    groups: dict[str, int] = {}
    for pair in updates:
        if pair.state == "right" and (differences := _differences(context, pair)):
            text = ", and ".join(difference.text for difference in differences)
            groups[text] = groups.get(text, 0) + 1
    if not groups:
        return None
    clauses = "; ".join(f"{text} ({plural(count, 'parameter')})" for text, count in groups.items())
    model = context.steps.reference.model
    return f"{model}: {clauses}. Its updates match all the same: this is below rounding so far"


def judge_skipped(context: StepContext) -> Finding | None:
    """Return the finding where one side alone makes a step of the same forwards."""
    reference, port = context.steps.map(lambda step: bool(step.updated))
    if reference == port:
        return None
    side = "reference" if port else "port"
    text = (
        f"the optimizer of the {side} does not step: its GradScaler skips the step, because the "
        "loss scale is too high, or the program never calls it"
    )
    cause = Cause("skipped", False, text)
    explanation = "The other program updates the parameters after the same forwards."
    return context.finding("update", whole_model("param"), explanation, cause, Deviation())


def _is_all_of_optimizer(
    context: StepContext, alike: Sequence[UpdatePair], known: Sequence[UpdatePair]
) -> bool:
    """Return whether all updates of an optimizer are off alike, so that no module is named.

    Those that do not move, or that a setting does not move, such as zeros by decay, do not count.
    """
    group = context.groups_of(alike[0].trained.names).reference
    differences = _differences(context, alike[0])

    def could_be_alike(pair: UpdatePair) -> bool:
        other = context.groups_of(pair.trained.names).reference
        if (group and group.optimizer) != (other and other.optimizer):
            return False
        is_insensitive = differences and _differences(context, pair) == differences
        return pair.state != "right" or (pair.changes and not is_insensitive)

    rivals = [pair for pair in known if could_be_alike(pair)]
    return len(alike) >= max(2, _ALL * len(rivals))


# -- explanations, the surest first
# --------------------------------------------------------------------------------------------------


def _not_held(context: StepContext, wrong: list[UpdatePair]) -> _Explanation:
    alike = [pair for pair in wrong if pair.state == "missing"]
    if not alike:
        return None
    cause = context.no_gradient(alike[0].trained.names)
    return cause or Cause("not_held", True, _not_held_text(context, alike[0])), alike


def _not_held_text(context: StepContext, pair: UpdatePair) -> str:
    names = pair.trained.names
    is_port = context.groups_of(names).port is None
    side, name = ("port", names.port) if is_port else ("reference", names.reference)
    text = f"no optimizer of the {side} updates {name.partition(':')[2]}"
    if pair.trained.models.port != context.steps.port.model:
        text += f" of {pair.trained.models.port}, which is no part of {context.steps.port.model}"
    return text


def _other_settings(context: StepContext, wrong: list[UpdatePair]) -> _Explanation:
    for pair in wrong:
        differences = _differences(context, pair)
        if differences:
            text = ", and ".join(difference.text for difference in differences)
            alike = [other for other in wrong if _differences(context, other) == differences]
            return Cause(differences[0].kind, True, text), alike
    return None


def _differences(context: StepContext, pair: UpdatePair) -> list[SettingDifference]:
    return context.setting_differences(pair.trained.names)


def _other_tensors(context: StepContext, wrong: list[UpdatePair]) -> _Explanation:
    """The port's optimizer holds copies, or what was taken for copies, that change nothing."""
    alike = _unchanged_pairs(wrong)
    port = context.groups_of(alike[0].trained.names).port if alike else None
    if port is None or not port.copies:
        return None
    text = (
        f"the port's {port.cls} holds other tensors than the parameters of the model, and these "
        "stay as they are: they were replaced after it was made, or what it computes is not "
        "copied back"
    )
    return Cause("not_held", True, text), alike


def _unchanged_pairs(wrong: list[UpdatePair]) -> list[UpdatePair]:
    return [pair for pair in wrong if pair.factor is not None and abs(pair.factor) < ONE_FACTOR]


def _unchanged(context: StepContext, wrong: list[UpdatePair]) -> _Explanation:
    alike = _unchanged_pairs(wrong)
    if not alike:
        return None
    name = alike[0].trained.names.port.partition(":")[2]
    return Cause("frozen", True, f"the port's optimizer leaves {name} as it is"), alike


def _scaled(context: StepContext, wrong: list[UpdatePair]) -> _Explanation:
    """All wrong updates are off by one factor."""
    factors = [pair.factor for pair in wrong if pair.factor is not None]
    if len(factors) < len(wrong) or max(factors) - min(factors) > _ONE_RATE * abs(factors[0]):
        return None
    text = (
        f"the port's updates are {times(factors[0])} the reference's, as by another learning rate"
    )
    return Cause("learning_rate", False, text), wrong


def _other_state(context: StepContext, wrong: list[UpdatePair]) -> _Explanation:
    """Gradients and settings match, so that only the optimizer's state is left."""
    groups = context.groups_of(wrong[0].trained.names)
    if groups.reference is None or groups.port is None or not groups.reference.has_state:
        return None
    if groups.reference.is_loaded and not groups.port.is_loaded:
        text = f"the port's {groups.port.cls} does not load its state, and the reference's does"
        return Cause("optimizer_state", True, text), wrong
    text = f"the state of {groups.port.cls} differs, as after a resume that does not load all of it"
    if groups.reference.first_step != groups.port.first_step:
        text += f": the port's optimizer begins at step {groups.port.first_step}"
    return Cause("optimizer_state", False, text), wrong


_EXPLANATIONS: tuple[Callable[[StepContext, list[UpdatePair]], _Explanation], ...] = (
    _not_held,
    _other_tensors,
    _other_settings,
    _unchanged,
    _scaled,
    _other_state,
)
