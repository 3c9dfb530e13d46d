"""Format a scan for people: a summary, the cost of recording, and a table of calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from otel_torch.rendering.table import Line, escape, format_table, paint
from otel_torch.scanning.cost import Cost
from otel_torch.scanning.scanned_forward import ScannedCall, ScannedForward, ScannedTensor
from otel_torch.settings import INCLUDED_CAPTURES, Settings


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """What recording costs: each of `forwards` forwards, and the parameters once."""

    forward: Cost
    parameters: Cost
    forwards: int


def format_report(
    scanned: ScannedForward,
    estimate: CostEstimate,
    settings: Settings,
    *,
    everything: bool,
    color: bool,
    width: int | None = None,
) -> str:
    """Return the report as text.

    Args:
        everything: Whether to list calls that are not selected too, dimmed.
    """
    lines = summary_lines(scanned, estimate, settings)
    disk_bytes = _disk_bytes(estimate, settings)
    if disk_bytes > settings.max_bytes:
        warning = (
            f"! this run would write {format_bytes(disk_bytes)}; "
            f"writing stops at OTEL_TORCH_MAX_BYTES, {format_bytes(settings.max_bytes)}"
        )
        lines.append(paint(warning, "yellow", color))
    if scanned.ended is not None:
        lines.append(paint(escape(f"! the scan ended {scanned.ended}"), "yellow", color))
    calls = [call for call in scanned.calls if everything or call.selected]
    if calls:
        lines += ["", _format_calls(calls, color, width)]
    return "\n".join(lines)


def summary_lines(scanned: ScannedForward, estimate: CostEstimate, settings: Settings) -> list[str]:
    """Return what the forward does and what recording it costs, a line each."""
    return [escape(line) for line in (*_summarize(scanned), *_describe_costs(estimate, settings))]


def call_cells(calls: list[ScannedCall]) -> tuple[list[str], list[list[str]]]:
    """Return the header of the table of calls, and the cells of each call."""
    columns = [column for column in _COLUMNS if column.is_shown(calls)]
    return [column.name for column in columns], [
        [column.text(call) for column in columns] for call in calls
    ]


def _summarize(scanned: ScannedForward) -> list[str]:
    modules, calls = len(scanned.modules), len(scanned.calls)
    bound = "at least " if scanned.dynamic else ""
    selected_modules = sum(module.selected for module in scanned.modules)
    selected_calls = sum(call.selected for call in scanned.calls)
    lines = [
        f"{scanned.model}: {modules} modules, {calls} calls, "
        f"parameters {format_bytes(scanned.parameter_bytes)}, "
        f"buffers {format_bytes(scanned.buffer_bytes)}, "
        f"{bound}{format_number(scanned.flops)}FLOP per forward",
        f"selected: {selected_modules} of {modules} modules, {selected_calls} calls",
    ]
    not_called = modules - len({call.module for call in scanned.calls})
    if not_called and scanned.ended is None:
        lines.append(f"not called by this forward: {not_called} modules")
    return lines


# -- costs

# signal, prefix of its fields in `Cost`, label
_SIGNALS = (
    ("span_events", "span_event", "span events"),
    ("log_events", "log_event", "log events"),
    ("metrics", "metric", "metrics"),
)


def _enabled_signals(settings: Settings) -> list[tuple[str, str]]:
    """Return the prefix and label of each enabled signal."""
    return [(prefix, label) for signal, prefix, label in _SIGNALS if signal in settings.signals]


def _describe_costs(estimate: CostEstimate, settings: Settings) -> list[str]:
    captured = (name for name in settings.capture if name not in INCLUDED_CAPTURES)
    capture = ", ".join(captured) or "nothing"
    forwards = "per forward" if estimate.forwards == 1 else f"{estimate.forwards:,} forwards"
    lines = _describe_cost(
        f"recording {capture}, {forwards}", estimate.forward, estimate.forwards, settings
    )
    if estimate.parameters.records:
        lines += _describe_cost("parameters, once", estimate.parameters, 1, settings)
    return lines


def _describe_cost(label: str, cost: Cost, times: int, settings: Settings) -> list[str]:
    def total(*fields: str) -> str:
        return format_bytes(times * sum(getattr(cost, name) for name in fields))

    sizes = [f"JSONL {total('jsonl_bytes')}"]
    signals = _enabled_signals(settings)
    if signals:
        sent = ", ".join(f"{label} {total(f'{prefix}_bytes')}" for prefix, label in signals)
        in_files = total(*(f"{prefix}_file_bytes" for prefix, _ in signals))
        sizes.append(f"OTLP {sent} (in files {in_files})")
    sizes.append(f"whole tensors {total('tensor_bytes')}")
    return [
        f"{label}: {times * cost.records:,} records, {total('read_bytes')} of tensors read",
        f"  {'; '.join(sizes)}",
    ]


def _disk_bytes(estimate: CostEstimate, settings: Settings) -> int:
    """Return what these settings would write to disk."""
    prefixes = [prefix for prefix, _ in _enabled_signals(settings)] if settings.otlp_file else []
    fields = [f"{prefix}_file_bytes" for prefix in prefixes]
    if settings.tensors:
        fields.append("tensor_bytes")
    if settings.jsonl:
        fields.append("jsonl_bytes")
    return sum(
        estimate.forwards * getattr(estimate.forward, name) + getattr(estimate.parameters, name)
        for name in fields
    )


# -- the table of calls


def _format_calls(calls: list[ScannedCall], color: bool, width: int | None) -> str:
    has_unselected = not all(call.selected for call in calls)
    columns = [column for column in _COLUMNS if column.is_shown(calls)]
    rows = []
    for call in calls:
        style = "dim" if has_unselected and not call.selected else None
        rows.append(Line([column.text(call) for column in columns], style))
    names = [column.name for column in columns]
    left_aligned = sum(column.is_left_aligned for column in columns)
    return format_table(names, rows, left_columns=left_aligned, color=color, width=width)


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    text: Callable[[ScannedCall], str]
    is_left_aligned: bool = False
    is_shown: Callable[[list[ScannedCall]], bool] = bool


def _describe_tensors(tensors: tuple[ScannedTensor, ...]) -> str:
    """Return shape and dtype of the first two tensors, and how many more there are."""
    texts = []
    for tensor in tensors[:2]:
        label = "" if len(tensors) == 1 else re.sub(r"^(in|out)\.?", "", tensor.label) + " "
        shape = "x".join("?" if size < 0 else str(size) for size in tensor.shape) or "scalar"
        texts.append(f"{label}{shape} {tensor.dtype}")
    if len(tensors) > 2:
        texts.append(f"+{len(tensors) - 2}")
    return ", ".join(texts)


def _describe_outputs(call: ScannedCall) -> str:
    return _describe_tensors(call.outputs) if call.finished else "(ended)"


_COLUMNS = (
    _Column("module", lambda call: call.module or "(root)", is_left_aligned=True),
    _Column("class", lambda call: call.class_name, is_left_aligned=True),
    _Column("inputs", lambda call: _describe_tensors(call.inputs), is_left_aligned=True),
    _Column("outputs", _describe_outputs, is_left_aligned=True),
    _Column(
        "call", lambda call: str(call.call), is_shown=lambda calls: any(call.call for call in calls)
    ),
    _Column("parameters", lambda call: format_bytes(call.parameter_bytes)),
    _Column("FLOP", lambda call: format_number(call.flops).strip() + "+" * call.dynamic),
)


def format_bytes(number: int) -> str:
    """Return a size in decimal units, such as `1.23 MB`."""
    return f"{format_number(number)}B"


def format_number(number: int) -> str:
    """Return a number with three digits and a prefix, to be followed by a unit.

    >>> format_number(999), format_number(1_230_000), format_number(10**13)
    ('999 ', '1.23 M', '10 T')
    """
    value, prefix = float(number), ""
    for larger in "kMGTPE":
        if value < 999.5:
            break
        value, prefix = value / 1000, larger
    return f"{value:.3g} {prefix}"
