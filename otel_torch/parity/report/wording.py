"""The sentences about a comparison that all reports share.

Names come from recordings and can hold anything: each passes through `escape`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from otel_torch.parity.before_the_run import SetupDifference
from otel_torch.parity.environment import EnvironmentDifference
from otel_torch.parity.finding import (
    Before,
    Finding,
    Kind,
    LogProbabilities,
    Report,
    Side,
    State,
    UncomparedTensor,
)
from otel_torch.parity.rankings import GoldenComparison, LowerPrecision
from otel_torch.parity.report.pairs import StepKey, error_over_floor, excess, worst_pair
from otel_torch.rendering.table import escape
from otel_torch.rendering.words import plural

STATE_MARKS: dict[State, str] = {
    "right": "✓",
    "layout": "↔",
    "dtype": "≈",
    "healed": "~",
    "inherited": "↓",
    "introduced": "✗",
}
WEAKER_VERDICT = (
    "This verdict is weaker: without sketches only statistics were compared, and those miss "
    "reordered values. Record both sides with OTEL_TORCH_CAPTURE=parity."
)
PARTIAL_VERDICT = "Nothing that was compared differs, but not everything was compared"

_PLACES: dict[Side, str] = {
    "input": "input of {module}",
    "output": "output of {module}",
    "parameter": "weights of {module}",
}
_HEADLINES: dict[Side, str] = {
    "input": "the input `{tensor}` of {module} {defect}",
    "output": "the output `{tensor}` of {module} {defect}",
    "parameter": "the weight `{tensor}` of {module} differs",
}
# What the comparison shows of the tensors before.
_CONTEXTS: dict[tuple[Side, Before], str] = {
    ("input", "right"): "Everything recorded before it matches.",
    ("input", "wrong"): "Some of what was recorded before it differs, too.",
    ("input", "unknown"): "Nothing before it in this forward was compared.",
    ("output", "right"): "Everything that enters the module matches.",
    ("output", "partly"): "What was compared of its inputs matches.",
    ("output", "wrong"): "What enters the module differs, too.",
    (
        "output",
        "unknown",
    ): "Its input was not compared: the fault is in it or in the code before it.",
}
_WEIGHTS_CONTEXT = "No forward pass is involved."
GAIN_UNKNOWN = (
    "What the output would gain from one module in full precision is not measurable from two "
    "recordings: run the port with that module in full precision."
)
_RIGHT_TOKENS = "The tokens that enter the module match."
# Likewise for what a training step does after its forwards, by phase.
_TRAINING_HEADLINES: dict[str, tuple[str, str]] = {
    "loss": ("the loss of {model} differs", "Its outputs match."),
    "backward": (
        "the gradient `{tensor}` of {module} {defect}",
        "Everything before it in the backward pass matches.",
    ),
    "recompute": (
        "the backward pass recomputes `{tensor}` of {module} with different values",
        "",
    ),
    "update": (
        "the update of `{tensor}` of {module} differs",
        "The gradients match.",
    ),
}
_ALL_PARAMETERS: dict[str, str] = {
    "param": "the parameters of {model} differ after an update",
    "param_grad": "the gradients of all parameters of {model} differ",
}
_DEFECTS: dict[Kind, str] = {
    "value": "has different values",
    "layout": "has its values in a different order",
    "nonfinite": "has NaN or Inf values on one side only",
    "shape": "has a different shape",
    "dtype": "has a different dtype",
    "weights": "has different values, because the weights differ",
    "missing": "exists on one side only",
}


def recording_names(report: Report) -> tuple[str, str]:
    """Return what the reference and the port are called.

    >>> recording_names(Report("match", reference="a.jsonl", port="b.jsonl"))
    ('a.jsonl', 'b.jsonl')
    >>> recording_names(Report("match", reference="a.jsonl", port="a.jsonl", models=("N", "N#2")))
    ('N of a.jsonl', 'N#2 of a.jsonl')
    """
    if report.models is None:
        return report.reference, report.port
    reference, port = report.models
    return f"{reference} of {report.reference}", f"{port} of {report.port}"


def further_warnings(report: Report) -> list[str]:
    """Return the warnings that a report does not show with its verdict."""
    shown = report.uncompared if report.verdict == "partial" else ()
    return [warning for warning in report.warnings if warning not in shown]


def environment_sentence(differences: Iterable[EnvironmentDifference]) -> str:
    """Return what differs between the environments, the reference's value first.

    >>> environment_sentence([EnvironmentDifference("torch", "2.12.0", "2.13.0")])
    'The environments differ (reference → port): torch 2.12.0 → 2.13.0.'
    """
    return f"The environments differ (reference → port): {', '.join(map(str, differences))}."


def setup_sentence(differences: Iterable[SetupDifference]) -> str:
    """Return what differs in how the models are set up, the reference's value first."""
    facts = ", ".join(map(str, differences))
    return f"The models are set up otherwise (reference → port): {facts}."


def log_probabilities_sentence(compared: LogProbabilities) -> str:
    """Return what the log-probabilities of the tokens show."""
    text = f"Log-probabilities of {plural(compared.tokens, 'token')}: "
    if compared.reference is None or compared.port is None:
        text = "No log-probability of a token was compared"
    else:
        text += (
            f"the largest difference is {format_error(compared.largest)}, of token "
            f"{compared.position} of request {compared.request} ({compared.reference:.4f} in the "
            f"reference, {compared.port:.4f} in the port)"
        )
        if compared.module is not None and compared.largest:
            text += f"; {compared.module} adds most to its error"
    if compared.unknown:
        text += f". Not compared: {plural(compared.unknown, 'token')} that a program found unlikely"
    return f"{text}."


def golden_sentence(golden: GoldenComparison) -> str:
    """Return which program is nearer to the golden recording, and by how much."""
    end, count = golden.end, plural(len(golden.modules), "output")
    where = f"the output of {module_name(end.module)}"
    errors = (
        f"{format_error(end.error)} in the reference, {format_error(end.port_error)} in the port"
    )
    nearer, other = golden.count("reference"), golden.count("port")
    if end.nearer == "neither":
        verdict = "Neither program is nearer to the golden recording"
    else:
        verdict = f"The {end.nearer} is nearer to the golden recording"
    return (
        f"{verdict}: {where} is off by {errors}. Of {count}, {nearer} are nearer in the reference, "
        f"{other} in the port."
    )


def precision_sentence(precision: LowerPrecision) -> str:
    """Return which program is of lower precision, what it costs, and what is not known."""
    end = "" if precision.end is None else f"; its output is off by {format_error(precision.end)}"
    source = (
        "as measured from right inputs"
        if precision.measured
        else "estimated from its inputs and outputs; an isolated run measures it"
    )
    return (
        f"The {precision.side} is of lower precision ({precision.dtype}){end}. "
        f"Modules by the error that each adds ({source}):"
    )


def headline(finding: Finding, *, by_tokens: bool = False) -> str:
    """Return where the port first diverges and how, in the reference's names if it has any.

    Args:
        by_tokens: Only the rows of tokens were compared, so that nothing is known of other inputs.

    >>> finding = Finding("M", "up", "out", 0, 2, 0, "forward", "P", "to", "out", 0, 2, 0, None,
    ...                   "output", "output", "value", 0.5, 1e-6, "")
    >>> print(headline(finding).replace(". ", ".\\n"))
    First divergence: the output `out` of up has different values (step 2, call 0).
    Everything that enters the module matches.
    """
    return f"First divergence: {_divergence(finding, by_tokens)}"


def finding_text(finding: Finding, *, by_tokens: bool = False) -> str:
    """Return everything that is said of a finding in one paragraph, be it the first or not."""
    divergence = _divergence(finding, by_tokens)
    if not finding.has_line:  # which begins with a path
        divergence = f"{divergence[:1].upper()}{divergence[1:]}"
    why = escape(explanation_sentence(finding))
    return " ".join(filter(None, [divergence, error_sentence(finding), why]))


def _divergence(finding: Finding, by_tokens: bool) -> str:
    if finding.has_line:
        return _line_divergence(finding)
    in_reference = finding.module is not None
    module = finding.module if in_reference else finding.port_module
    tensor = finding.tensor if in_reference else finding.port_tensor
    side = finding.side if in_reference else finding.port_side
    if finding.phase in _TRAINING_HEADLINES:
        template, context = _TRAINING_HEADLINES[finding.phase]
        if tensor in _ALL_PARAMETERS:
            template, context = _ALL_PARAMETERS[tensor], ""
    elif finding.kind == "missing":
        owner, lacking = ("reference", "port") if in_reference else ("port", "reference")
        template, context = f"only the {owner} has {{module}}, the {lacking} does not", ""
    else:
        template = _HEADLINES[side or "output"]
        context = _CONTEXTS.get((side or "output", finding.before), _WEIGHTS_CONTEXT)
        if side == "output" and finding.before == "right" and by_tokens:
            context = _RIGHT_TOKENS
    fields = {
        "model": escape(finding.model or "the model"),
        "module": module_name(module),
        "tensor": escape(tensor or "the tensor"),
        "defect": _DEFECTS[finding.kind],
    }
    is_loaded = side == "parameter" and finding.phase not in _TRAINING_HEADLINES
    when = "" if is_loaded else moment_of(finding)
    suffix = f" ({when})" if when else ""
    return f"{_fill(template, fields)}{suffix}. {context}".rstrip()


def _line_divergence(finding: Finding) -> str:
    """Return which line of the port is at fault, or of the reference if the port has none."""
    line = finding.port_line or finding.line
    assert line is not None
    owner = "port" if finding.port_line is not None else "reference"
    defect = "computes something else" if finding.kind != "weights" else "reads another weight"
    if finding.port_line is None:
        defect = "has no counterpart in the port"
    return f"{escape(line.place)} of the {owner} {defect}."


def error_sentence(finding: Finding) -> str:
    """Return how large the error of a finding is; empty if it has none."""
    if finding.error is None:
        return ""
    if not math.isfinite(finding.error):
        return "The error is NaN or Inf."
    if finding.floor is None:
        return f"The relative L2 error is {format_error(finding.error)}."
    return (
        f"The relative L2 error is {format_error(finding.error)}, "
        f"{times_floor(finding.error, finding.floor)} its floor of {format_error(finding.floor)}."
    )


def short_place(finding: Finding) -> str:
    """Return the file and line of a finding, else its module and tensor; the port's if known."""
    line = finding.port_line or finding.line
    if line is not None:
        return f"{escape(line.file.rpartition('/')[2])}:{line.line}"
    module = finding.module if finding.port_module is None else finding.port_module
    return f"{module_name(module)} {escape(finding.port_tensor or finding.tensor or '')}".strip()


def explanation_sentence(finding: Finding) -> str:
    """Return the explanation after "Why:", which lets it begin with a name in lower case."""
    return f"Why: {finding.explanation}" if finding.explanation else ""


def closest_to_floor(report: Report) -> str:
    """Return which pair of a match came closest to its floor; empty if no pair was kept."""
    right = [pair for pair in report.compared if pair.state == "right"]
    # a value is right by another one, too: that of the same rows, or in the other layout
    within = [pair for pair in right if excess(pair) <= 1]
    closest = worst_pair(within)
    if closest is None:
        return ""
    if not excess(closest):
        return "All pairs are identical." if len(within) == len(right) else ""
    return (
        f"Closest to its floor: {module_name(closest.module)} `{escape(closest.tensor)}` at "
        f"{step_name((closest.loop, closest.step))}, error {format_error(closest.error)}, "
        f"floor {format_error(closest.floor)}."
    )


def count_summary(report: Report) -> str:
    """Return how many pairs, findings and gaps a report has, on one line."""
    parts = [f"{plural(report.pairs, 'pair')} compared"]
    if report.introduced:
        parts.append(plural(len(report.introduced), "finding"))
    if report.harmless:
        parts.append(plural(len(report.harmless), "harmless difference"))
    uncompared = sum(map(len, report.unpaired.values())) + len(report.ambiguous)
    if uncompared:
        parts.append(f"{uncompared:,} not compared")
    return ", ".join(parts)


def place_of(finding: Finding) -> str:
    """Return the module of a finding and which side of it, such as "input of blocks.0"."""
    in_reference = finding.module is not None
    module = finding.module if in_reference else finding.port_module
    side = finding.side if in_reference else finding.port_side
    return _fill(_PLACES[side or "output"], {"module": module_name(module)})


def step_key_of(finding: Finding) -> StepKey:
    """Return loop and step of a finding, the reference's if it has the place."""
    if finding.module is not None:
        return finding.loop, finding.step
    return finding.port_loop, finding.port_step


def moment_of(finding: Finding) -> str:
    """Return loop, step and call of a finding as words; loop 0 is left out."""
    loop, step = step_key_of(finding)
    call = finding.call if finding.module is not None else finding.port_call
    parts = [f"loop {loop}"] if loop else []
    parts += [
        f"{word} {value}" for word, value in (("step", step), ("call", call)) if value is not None
    ]
    return ", ".join(parts)


def harmless_kind(finding: Finding) -> str:
    """Return the reason why a difference is harmless: `dtype`, `layout`, or `healed`."""
    return finding.kind if finding.kind in ("dtype", "layout") else "healed"


def module_names(tensors: Iterable[UncomparedTensor]) -> list[str]:
    """Return the name of each module once."""
    return list(dict.fromkeys(module_name(tensor.module) for tensor in tensors))


def module_name(module: str | None) -> str:
    """Return the name of a module for display.

    >>> module_name(""), module_name(None), module_name("a.b")
    ('(root)', '–', 'a.b')
    """
    return "–" if module is None else escape(module) or "(root)"


def step_name(key: StepKey) -> str:
    """Return loop and step as words.

    >>> step_name((0, 3)), step_name((1, 3)), step_name((0, None))
    ('step 3', 'step 3 of loop 1', 'no step')
    """
    loop, step = key
    name = "no step" if step is None else f"step {step}"
    return f"{name} of loop {loop}" if loop else name


def format_error(value: float | None) -> str:
    """Return an error or a floor with two digits.

    >>> format_error(None), format_error(0.0), format_error(1.23e-7), format_error(float("inf"))
    ('–', '0', '1.2e-07', 'NaN/Inf')
    """
    if value is None:
        return "–"
    return f"{value:.2g}" if math.isfinite(value) else "NaN/Inf"


def times_floor(error: float, floor: float) -> str:
    """Return how many times the floor an error is.

    >>> times_floor(1.0, 0.5), times_floor(1.0, 1e-5), times_floor(1.0, 1e-9), times_floor(1.0, 0.0)
    ('2.0 times', '100,000 times', '1e+09 times', 'above')
    """
    ratio = error_over_floor(error, floor)
    if not math.isfinite(ratio):
        return "above"
    if ratio < 10:
        return f"{ratio:.1f} times"
    if ratio < 1e7:
        return f"{float(f'{ratio:.2g}'):,.0f} times"
    return f"{ratio:.0e} times"


def tally(words: Iterable[str]) -> str:
    """Return how often each word occurs.

    >>> tally(["healed", "dtype", "healed"])
    '2 healed, 1 dtype'
    """
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    return ", ".join(f"{count:,} {word}" for word, count in counts.items())


def _fill(template: str, fields: dict[str, str]) -> str:
    """Fill a template in one pass, so that braces in a name stay as they are."""
    return re.sub(r"\{(\w+)\}", lambda match: fields.get(match[1], match[0]), template)
