"""Name what first went wrong between the forwards and the optimizer: the loss, or a gradient.

    all gradients of parameters right ──▶ nothing is wrong
    all off by one factor             ──▶ the loss, if the gradient that enters the model is off by
                                          it too; else what the loop does to them afterwards
    else                              ──▶ the first wrong gradient in the order of the backward
                                          pass, of an output or of a parameter

As the final outputs of a forward, the gradients of the parameters decide: whatever differs before
them, such as a loss scale or a batch that is split in another way, has done no harm if they match.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from otel_torch.parity.diagnosis.linear import fit
from otel_torch.parity.finding import Cause, Finding
from otel_torch.parity.sides import Sides
from otel_torch.parity.training.gradients import (
    GradientComparison,
    GradientPair,
    grow,
)
from otel_torch.parity.training.places import ForwardUses, has_other_path, output_place
from otel_torch.parity.training.recomputation import recomputed_otherwise
from otel_torch.parity.training.step_context import (
    ONE_FACTOR,
    Deviation,
    Place,
    StepContext,
    times,
    whole_model,
)
from otel_torch.parity.training.steps import GradientKey, RecordedStep, RecordedTensor
from otel_torch.parity.training.tensors import norm_of
from otel_torch.rendering.words import plural

# losses that differ by less are equal, and so are the factors of the terms of a sum
_SAME_LOSS, _ONE_SCALE = 1e-4, 1e-2
# how many factors are tried, and how many right gradients show that there is none
_MOST_FACTORS, _NOT_CLIPPED = 8, 3

_OTHER_LOSS = (
    "The outputs of the model match, and what the loss makes of them does not: it is computed, "
    "divided or summed in another way (batch, tokens, padding, accumulated batches)."
)
_OTHER_START = "The losses match, and the gradient that enters the model does not."
_OTHER_SUM = (
    "The gradients inside of the model match, as far as they are recorded. What happens to the "
    "gradients of parameters afterwards differs: the sum or average over ranks or accumulated "
    "batches, clipping, or a loss scale."
)

_OTHER_CLIP = (
    "The backward passes match; the gradients that the optimizer uses differ by clipping alone."
)


RightStep = tuple[StepContext, GradientComparison]


@dataclass(slots=True)
class GradientVerdict:
    """The judgment of the gradients of a step.

    Attributes:
        pairs: Those of the parameters.
        same_batch: Whether they show that both programs trained on the same data.
        compared: How many pairs were compared.
    """

    pairs: list[GradientPair]
    finding: Finding | None
    same_batch: bool
    compared: int


def judge_gradients(
    context: StepContext,
    parameters: list[GradientPair],
    comparison: GradientComparison,
    right_before: RightStep | None = None,
) -> GradientVerdict:
    """Judge the gradients of one step.

    Args:
        parameters: Those of the parameters, in the order of the backward pass.
        right_before: The latest step whose gradients of parameters were right, if any.
    """
    grow(parameters)
    known = [pair for pair in parameters if not _is_left_to_updates(context, pair)]
    if all(pair.state == "right" for pair in known):
        return GradientVerdict(parameters, _loss_behind_clipping(context), bool(known), len(known))
    outputs = comparison.of_outputs(context.matched)
    grow(outputs)
    factor = _common_factor(known)
    unscaled = known if factor is None else [pair.divided_by(factor) for pair in known]
    if factor is not None and all(pair.state == "right" for pair in unscaled):
        finding = _scaled_finding(context, factor, known, outputs)
    elif factor is not None and any(_is_off_by(factor, pair) for pair in outputs):
        unscaled = known  # the backward pass itself is off by the factor, from some place on
        finding = _first_finding(context, known, outputs)
    else:
        finding = recomputed_otherwise(context) or _first_finding(
            context, unscaled, _without_loss_scale(outputs, unscaled, right_before)
        )
    same_batch = any(pair.state == "right" and pair.is_telling for pair in unscaled)
    return GradientVerdict(parameters, finding, same_batch, len(known) + len(outputs))


def judge_absent_gradients(context: StepContext) -> Finding | None:
    """Return the finding where one side alone has gradients of parameters.

    A framework that keeps them elsewhere steps with copies, or says their norm.
    """
    steps = context.steps
    reference, port = steps.map(lambda step: bool(step.parameter_gradients))
    lacking, side = (steps.reference, "reference") if port else (steps.port, "port")
    table = context.optimizers.reference if port else context.optimizers.port
    is_elsewhere = table.holds_copies(lacking.model) or lacking.scalar("grad_norm") is not None
    if reference == port or is_elsewhere or not _has_stepped(lacking):
        return None
    text = (
        f"no parameter has a gradient in the {side}: its loss does not depend on them, as after "
        "detach() or under no_grad(), or they are cleared before the optimizer steps"
    )
    cause = Cause("no_gradient", True, text)
    has = len((steps.port if port else steps.reference).parameter_gradients)
    explanation = f"In the other program {plural(has, 'parameter')} have one."
    deviation = Deviation(kind="missing")
    return context.finding("backward", whole_model("param_grad"), explanation, cause, deviation)


def _has_stepped(step: RecordedStep) -> bool:
    """Return whether an optimizer was called, so that gradients would have been recorded."""
    has_rates = any(name.startswith("lr[") for name, _ in step.scalars)
    return bool(step.updated or has_rates) and not step.scalar("skipped")


def _is_left_to_updates(context: StepContext, pair: GradientPair) -> bool:
    """Return whether a gradient says nothing, or is missing because no optimizer uses it."""
    if pair.state == "unknown" or pair.trained is None:
        return True
    names = pair.trained.names
    is_frozen = context.no_gradient(names) is not None
    return pair.state == "missing" and not is_frozen and context.is_held_on_one_side(names)


# -- all alike
# --------------------------------------------------------------------------------------------------


def _common_factor(pairs: Sequence[GradientPair]) -> float | None:
    """Return the factor that explains more gradients than 1 does, None if there is none.

    Clipping by the total norm scales all gradients if a single one is wrong. Where several are
    right as they are, it did not, and the others are wrong: experts that nobody divided.
    """
    telling = [pair for pair in pairs if pair.is_telling]

    def explained(factor: float) -> set[int]:
        return {
            index for index, pair in enumerate(telling) if pair.divided_by(factor).state == "right"
        }

    candidates: list[float] = []
    for pair in telling:
        factor = pair.factor if pair.state == "wrong" else None
        if factor and not any(_is_near(factor, other) for other in candidates):
            candidates.append(factor)
    best = max(candidates[:_MOST_FACTORS], key=lambda factor: len(explained(factor)), default=1.0)
    scaled, unscaled = explained(best), explained(1.0)
    if len(unscaled - scaled) >= _NOT_CLIPPED:
        return None
    return best if len(scaled) > max(1, len(unscaled)) else None


def _without_loss_scale(
    outputs: Sequence[GradientPair],
    parameters: Sequence[GradientPair],
    right_before: RightStep | None,
) -> Sequence[GradientPair]:
    """Return the gradients of outputs without a factor that did no harm.

    A loss scale that is divided out after the backward pass is a factor of all of them, where
    most gradients of parameters are right, or all were in an earlier step.
    """
    telling = [pair for pair in parameters if pair.is_telling]
    right = sum(pair.state == "right" for pair in telling)
    factor = None
    if right >= _NOT_CLIPPED and 2 * right > len(telling):
        factor = _common_factor(outputs)
    elif right_before is not None:
        context, comparison = right_before
        factor = _common_factor(comparison.of_outputs(context.matched))
    return outputs if factor is None else [pair.divided_by(factor) for pair in outputs]


def _is_off_by(factor: float, pair: GradientPair) -> bool:
    """Return whether a gradient is the reference's times a number."""
    found = pair.factor if pair.state == "wrong" else None
    return found is not None and _is_near(found, factor)


def _scaled_finding(
    context: StepContext,
    factor: float,
    parameters: Sequence[GradientPair],
    outputs: Sequence[GradientPair],
) -> Finding:
    """Return the finding where the gradients of all parameters are off by one factor."""
    entering = next(iter(outputs), None)
    first = next(pair for pair in parameters if pair.state == "wrong")
    loss_factor = _loss_factor(context.steps)
    # clipping hides the size of the gradients of parameters
    if entering is not None and entering.state == "wrong":
        first, factor = entering, entering.factor or factor
    deviation = _deviation(first)
    is_loss = (
        loss_factor is not None
        and abs(loss_factor - 1) > _SAME_LOSS
        and _is_near(loss_factor, factor)
    )
    if is_loss or first is entering:
        subject = "the loss and all gradients are" if is_loss else "all gradients are"
        cause = Cause("scaled", True, f"{subject} {times(factor)} the reference's in the port")
        if is_loss or loss_factor is None:
            place = whole_model("loss", "output")
            return context.finding("loss", place, _OTHER_LOSS, cause, deviation)
        return context.finding(
            "backward", whole_model("grad", "output"), _OTHER_START, cause, deviation
        )
    clipping = _clipping(context.steps)
    if clipping is not None:
        return context.finding(
            "update", whole_model("param_grad"), _OTHER_CLIP, clipping, deviation
        )
    text = f"the gradients of all parameters are {times(factor)} the reference's in the port"
    cause = Cause("scaled", True, text)
    return context.finding("backward", whole_model("param_grad"), _OTHER_SUM, cause, deviation)


def _loss_behind_clipping(context: StepContext) -> Finding | None:
    """Return the finding where the loss and the norm of the gradients are off by one factor.

    Gradients that are clipped to the same norm are equal all the same.
    """
    norms = context.steps.map(lambda step: step.scalar("grad_norm"))
    loss_factor = _loss_factor(context.steps)
    if not norms.reference or not norms.port or loss_factor is None:
        return None
    factor = norms.port / norms.reference
    if _is_near(factor, 1.0) or not _is_near(loss_factor, factor):
        return None
    text = f"the loss is {times(loss_factor)} the reference's in the port"
    cause = Cause("scaled", True, f"{text}, and so are the gradients before clipping")
    deviation = Deviation(abs(loss_factor - 1), _SAME_LOSS)
    return context.finding("loss", whole_model("loss", "output"), _OTHER_LOSS, cause, deviation)


def _clipping(steps: Sides[RecordedStep]) -> Cause | None:
    """Return the cause where norms match before clipping and differ after it."""
    norms = steps.map(lambda step: step.scalar("grad_norm"))
    clipped = steps.map(lambda step: step.scalar("grad_norm_clipped"))
    if norms.reference is None or norms.port is None or clipped == (None, None):
        return None
    if not math.isclose(norms.reference, norms.port, rel_tol=ONE_FACTOR):
        return None
    done = clipped.map(
        lambda norm: "does not clip it" if norm is None else f"clips it to {norm:.4g}"
    )
    text = (
        f"the norm of the gradients is {norms.reference:.4g}; the reference {done.reference}, and "
        f"the port {done.port}"
    )
    return Cause("clip", True, text)


def _early_clipping(steps: Sides[RecordedStep]) -> Cause | None:
    """Return the cause where one side clips gradients before all batches are added up."""
    counts = steps.map(lambda step: int(step.scalar("early_clips") or 0))
    if counts.reference == counts.port:
        return None
    more, side = (counts.port, "port") if counts.port else (counts.reference, "reference")
    text = (
        f"the {side} clips the gradients after each batch, {plural(more, 'time')} before all "
        "batches of the step are added up; the other program clips their sum"
    )
    return Cause("clip", True, text)


def _accumulation(steps: Sides[RecordedStep], outputs: Sequence[GradientPair]) -> Cause | None:
    """Return the cause where one side steps after fewer batches, which are the same otherwise."""
    counts = steps.map(lambda step: len(step.losses))
    first = [pair for pair in outputs if pair.keys and pair.keys.reference.call == 0]
    if not all(counts) or counts.reference == counts.port or not first:
        return None
    if any(pair.state != "right" for pair in first):
        return None
    batches = counts.map(lambda count: "1 batch" if count == 1 else f"{count:,} batches")
    text = (
        f"the port's optimizer steps after {batches.port} (backward passes), the reference's "
        f"after {batches.reference}"
    )
    return Cause("accumulation", True, text)


def _clipping_of_values(wrong: Sequence[GradientPair]) -> Cause | None:
    """Return the cause where the wrong gradients of one side all end at the same number."""
    for side in ("port", "reference"):
        tensors = [tensor for pair in wrong for tensor in getattr(pair, side)]
        ends = {max(map(abs, tensor.extremes)) for tensor in tensors}
        if (
            len(ends) == 1
            and max(ends) > 0
            and len({tensor.record.value for tensor in tensors}) > 1
        ):
            text = f"the {side} clips each number of a gradient to {max(ends):.4g}"
            return Cause("clip", True, text)
    return None


def _loss_factor(steps: Sides[RecordedStep]) -> float | None:
    """Return the port's loss over the reference's, None where they cannot be compared."""
    reference, port = steps.map(lambda step: step.losses)
    if not reference or not port:
        return None
    total = sum(reference)
    return sum(port) / total if total and math.isfinite(total) else None


def _is_near(factor: float, expected: float) -> bool:
    return abs(factor - expected) <= ONE_FACTOR * abs(expected)


# -- the first
# --------------------------------------------------------------------------------------------------


def _first_finding(
    context: StepContext, parameters: Sequence[GradientPair], outputs: Sequence[GradientPair]
) -> Finding:
    """Return the finding for the first wrong gradient of the backward pass."""
    wrong = [pair for pair in parameters if pair.state != "right"]
    early = _early_clipping(context.steps)
    cause = early or _accumulation(context.steps, outputs)
    if cause is not None:
        phase, text = ("update", _OTHER_CLIP) if early else ("backward", _OTHER_SUM)
        deviation = _deviation(min(wrong, key=lambda pair: pair.time))
        return context.finding(phase, whole_model("param_grad"), text, cause, deviation)
    unexplained = _unexplained(wrong, outputs)
    first = min(unexplained or wrong, key=lambda pair: pair.time)
    clipping = _clipping_of_values(wrong)
    if clipping is not None:
        place = whole_model("param_grad")
        return context.finding("update", place, _OTHER_CLIP, clipping, _deviation(first))
    wrong_outputs = (pair for pair in outputs if pair.state != "right")
    first_output = min(wrong_outputs, key=lambda pair: pair.time, default=None)
    if first_output is not None and (not unexplained or first_output.time < first.time):
        return _output_finding(context, first_output, outputs)
    telling = [pair for pair in parameters if pair.is_telling]
    if outputs and first_output is None and len(wrong) == len(telling) > 1:
        deviation = _deviation(first)
        return context.finding("backward", whole_model("param_grad"), _OTHER_SUM, None, deviation)
    return _parameter_finding(context, first, bool(outputs))


def _unexplained(
    wrong: Sequence[GradientPair], outputs: Sequence[GradientPair]
) -> Sequence[GradientPair]:
    """Return the wrong gradients of parameters whose modules have right gradients of outputs.

    If there are none, the outputs explain all of them: those of a later microbatch come after the
    gradients of the parameters in the first one.
    """
    modules = {
        pair.keys.reference.module for pair in outputs if pair.keys and pair.state != "right"
    }
    return [
        pair
        for pair in wrong
        if pair.trained and pair.trained.keys.reference[0].module not in modules
    ]


def _output_finding(
    context: StepContext, pair: GradientPair, outputs: Sequence[GradientPair]
) -> Finding:
    assert pair.keys is not None
    deviation, cause = _deviation(pair), _cause(pair, "the gradient")
    uses = context.steps.map(ForwardUses)
    if uses.reference.is_final(pair.keys.reference):
        loss_factor = _loss_factor(context.steps)
        if loss_factor is None or abs(loss_factor - 1) > _SAME_LOSS:
            place = whole_model("loss", "output")
            return context.finding("loss", place, _OTHER_LOSS, cause, deviation)
        places = pair.keys.map(lambda key: output_place(key._replace(module="")))
        return context.finding("backward", places, _OTHER_START, cause, deviation)
    right = [other for other in outputs if other.state == "right" and other.time < pair.time]
    keys = pair.keys
    users = {use.module for use in uses.reference.of(keys.reference)}
    is_beside = has_other_path(pair, right, users)
    if pair.state == "missing":
        keys = _where_it_ends(pair, outputs, uses.reference)
        places = keys.map(output_place)
    else:
        places = Sides(
            uses.reference.maker(keys.reference, is_beside), uses.port.maker(keys.port, is_beside)
        )
    if places.reference.side != places.port.side:  # code that only one program has is suspected
        places = keys.map(output_place)
    module = places.port.module or context.steps.port.model
    if places.port.side == "input":
        text = (
            f"The gradient of the output of {module} is right, and so is every gradient before "
            f"it; that of its input is not: the backward pass of {module} differs."
        )
    else:
        text = (
            f"The gradient that reaches the output of {module} is the first that is wrong: the "
            "code that uses this output sends another gradient back."
        )
    return context.finding("backward", places, text, cause, deviation)


def _where_it_ends(
    pair: GradientPair, outputs: Sequence[GradientPair], uses: ForwardUses
) -> Sides[GradientKey]:
    """Return the output at which the missing gradients end: the one that all of them come from.

    An output that is detached has no gradient, and neither has anything computed from it alone.
    """
    assert pair.keys is not None
    missing = {
        other.keys.reference: other.keys
        for other in outputs
        if other.keys and other.state == "missing"
    }
    for source in uses.sources(pair.keys.reference):
        if source in missing and len(uses.of(source)) > 1:
            return missing[source]
    return pair.keys


def _parameter_finding(context: StepContext, pair: GradientPair, has_outputs: bool) -> Finding:
    assert pair.trained is not None
    keys = pair.trained.keys.map(lambda keys: keys[0])
    places = keys.map(lambda key: Place(key.module, f"param_grad.{key.name}", "parameter"))
    name = ".".join(filter(None, keys.port))
    text = f"The gradient of {name} is the first wrong one in the order of the backward pass"
    if has_outputs:
        text += ", while that of the output it comes from is right."
    else:
        text += "; those of the outputs of modules were not compared."
    cause = context.no_gradient(pair.trained.names) if pair.state == "missing" else None
    cause = cause or _cause(pair, f"the gradient of {name}") or _untied(context, pair)
    return context.finding("backward", places, text, cause, _deviation(pair))


def _deviation(pair: GradientPair) -> Deviation:
    if pair.state == "missing":
        return Deviation(kind="missing")
    return Deviation(pair.error, pair.limit, "nonfinite" if math.isinf(pair.error) else "value")


def _untied(context: StepContext, pair: GradientPair) -> Cause | None:
    """Return the cause where one side has a gradient in parts: of weights it does not share."""
    assert pair.trained is not None
    # as recorded: those of the pair may be without the factor of clipping
    reference, port = pair.trained.of(context.steps.map(lambda step: step.parameter_gradients))
    if reference is None or port is None:
        return None
    sides = ("reference", reference, port), ("port", port, reference)
    for step, (side, parts, whole) in zip(context.steps, sides, strict=True):
        for key, other in step.parameter_gradients.items():
            is_part = other.record.value == parts[0].record.value
            if not is_part and _is_sum(whole, [*parts, other], pair.limit):
                name = ".".join(filter(None, key))
                text = (
                    f"the {side} does not share this weight with {name}, and its gradient neither"
                )
                return Cause("untied", True, text)
    return None


def _is_sum(whole: Sequence[RecordedTensor], parts: Sequence[RecordedTensor], limit: float) -> bool:
    """Return whether a gradient is the sum of others, which clipping may have scaled."""
    sketches = [part.sketch for part in parts if part.numel == whole[0].numel]
    known = [sketch for sketch in sketches if sketch is not None]
    if len(whole) != 1 or len(known) != 2 or whole[0].sketch is None:
        return False
    factors, remainder = fit(whole[0].sketch, known)
    are_equal = abs(factors[0] - factors[1]) <= _ONE_SCALE * factors.max()
    return bool(are_equal and remainder <= limit * whole[0].l2)


def _cause(pair: GradientPair, subject: str) -> Cause | None:
    """Return what the numbers of a gradient say of its fault."""
    if pair.state == "missing":
        side = "port" if pair.reference else "reference"
        text = f"{subject} does not exist in the {side}: it is detached there, or frozen"
        return Cause("no_gradient", True, text)
    if not norm_of(pair.port):
        return Cause("zero", True, f"{subject} is all zeros in the port")
    factor = pair.factor
    if factor is None or abs(factor) < ONE_FACTOR:
        return None
    kind = "negated" if _is_near(factor, -1.0) else "scaled"
    return Cause(kind, True, f"{subject} is {times(factor)} the reference's in the port")
