"""What recording a forward would write and send: for the disk that is full after an hour, and the
collector that refuses.

Records are made as a session would make them, with numbers as long as they usually are, and go
through the encoders of the sinks themselves: there is no second idea of how large a record is.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from otel_torch.records import FINGERPRINTS, Place, Record
from otel_torch.scanning.rows import Call, Forward, Module, Value
from otel_torch.settings import PARITY_STATISTICS, Settings


@dataclass(frozen=True, slots=True)
class Cost:
    """What some records cost, in bytes. Lower bounds where sizes depend on the data.

    records: how many. jsonl_bytes: in a recording. span_event_bytes, log_event_bytes, metric_bytes:
    of each signal as OTLP sends it, before compression; …_file_bytes: of the same as lines of JSON
    in `OTEL_TORCH_OTLP_FILE`. tensor_bytes: in the files of `OTEL_TORCH_TENSORS`. read_bytes: of
    tensors that the statistics read.
    """

    records: int = 0
    jsonl_bytes: int = 0
    span_event_bytes: int = 0
    log_event_bytes: int = 0
    metric_bytes: int = 0
    span_event_file_bytes: int = 0
    log_event_file_bytes: int = 0
    metric_file_bytes: int = 0
    tensor_bytes: int = 0
    read_bytes: int = 0


def cost_of_forward(forward: Forward, settings: Settings) -> Cost:
    """Of one forward, with its backward where gradients are recorded."""
    return _add_up(forward.model, list(_planned_in_forward(forward, settings)), settings)


def cost_of_parameters(forward: Forward, settings: Settings) -> Cost:
    """Of what is recorded once, before the first forward."""
    return _add_up(forward.model, list(_planned_once(forward, settings)), settings)


# -- what is recorded
# --------------------------------------------------------------------------------------------------


class _Planned(NamedTuple):
    """A record to be. taken: of a call, whether the tensor enters it."""

    module: str
    class_name: str
    call: int
    order: int
    phase: str
    value: Value
    enters: bool = False


def _planned_in_forward(forward: Forward, settings: Settings) -> Iterator[_Planned]:
    capture = settings.capture
    for call in forward.calls:
        if call.selected:
            if "inputs" in capture:
                yield from (_of_call(call, "forward", value, enters=True) for value in call.inputs)
            if "outputs" in capture:
                yield from (_of_call(call, "forward", value) for value in call.outputs)
            if "gradients" in capture:
                yield from (
                    _of_call(call, "backward", _gradient(value))
                    for value in call.outputs
                    if value.requires_grad
                )
    if "parameters" in capture and "gradients" in capture:
        for module in _selected(forward):
            yield from (
                _of_module(module, "backward", _gradient(one))
                for one in module.parameters
                if one.requires_grad
            )


def _planned_once(forward: Forward, settings: Settings) -> Iterator[_Planned]:
    if "parameters" in settings.capture:
        for module in _selected(forward):
            yield from (_of_module(module, "attach", value) for value in module.parameters)
            if "parity" in settings.capture:
                yield from (_of_module(module, "attach", value) for value in module.buffers)


def _selected(forward: Forward) -> Iterator[Module]:
    return (module for module in forward.modules if module.selected)


def _of_call(call: Call, phase: str, value: Value, enters: bool = False) -> _Planned:
    return _Planned(call.module, call.class_name, call.call, call.order, phase, value, enters)


def _of_module(module: Module, phase: str, value: Value) -> _Planned:
    return _Planned(module.name, module.class_name, 0, 0, phase, value)


def _gradient(value: Value) -> Value:
    kind, rest = re.fullmatch(r"(out|param)(.*)", value.label, re.S).groups()  # type: ignore[union-attr]
    return dataclasses.replace(
        value, label={"out": "grad", "param": "param_grad"}[kind] + rest, number=None
    )


# -- what it takes
# --------------------------------------------------------------------------------------------------


def _add_up(model: str, planned: Sequence[_Planned], settings: Settings) -> Cost:
    if not planned:
        return Cost()
    from otel_torch.recording.rows import encode_rows
    from otel_torch.telemetry import otlp_protobuf

    # where inputs are recorded a session knows a tensor again
    knows = "inputs" in settings.capture
    known: set[int | None] = set()
    records, read = [], 0
    for one in planned:
        first = one.value.number is None or one.value.number not in known
        known.add(one.value.number)
        records.append(_record(model, one, settings, first))
        read += (one.value.bytes or 0) if first or not knows else 0
    # of several calls with the same attributes a gauge keeps the last
    points = list(
        {(record.module, record.tensor, record.phase): record for record in records}.values()
    )
    metrics, _ = otlp_protobuf.encode_gauges(points, with_step=settings.metric_step != "time")
    events, logs = (
        otlp_protobuf.encode_span_events(records),
        otlp_protobuf.encode_log_records(records, _NOW, _TRACE, _SPAN, 1),
    )
    return Cost(
        records=len(records),
        jsonl_bytes=len(encode_rows(records)),
        span_event_bytes=_length(events),
        log_event_bytes=_length(logs),
        metric_bytes=_length(metrics),
        # events are no message of their own: they stand in a span
        span_event_file_bytes=_length_in_file(
            "traces", [otlp_protobuf.encode_field(otlp_protobuf.ITEM_FIELD, b"".join(events))]
        ),
        log_event_file_bytes=_length_in_file("logs", logs),
        metric_file_bytes=_length_in_file("metrics", metrics),
        tensor_bytes=sum((one.value.bytes or 0) + _header(model, one) for one in planned),
        read_bytes=read,
    )


# of one element, so that the statistics have as many digits as those of a real tensor
_TYPICAL = {
    "min": -3.051757812500123,
    "max": 3.141592653589793,
    "sum": -0.577215664901532,
    "squares": 1.047197551196597,
    "magnitudes": 0.797884560802865,
}
_NOW, _TRACE, _SPAN = 1_700_000_000_000_000_000, 2**127, 2**63
_ARGUMENT = "hidden_states"  # what forward calls an input, where its name is not in the label


def _record(model: str, planned: _Planned, settings: Settings, first: bool) -> Record:
    """A record as a session would make it. first: whether no record of this tensor is before it."""
    from otel_torch.statistics.measure import Measurement
    from otel_torch.statistics.row_layout import SCALARS, VECTORS
    from otel_torch.statistics.table import columns_for, derive

    value, parity = planned.value, "parity" in settings.capture
    names = tuple(dict.fromkeys((*settings.stats, *(PARITY_STATISTICS if parity else ()))))
    if parity and not first:
        names = tuple(name for name in names if name not in FINGERPRINTS)
    elif parity and planned.phase == "attach":
        names = (*names, "row_sketch")
    columns = columns_for(names)
    numel = math.prod(map(abs, value.shape))
    measured = Measurement(None, columns, numel, numel, list(value.shape), f"torch.{value.dtype}")
    row = [_TYPICAL.get(name, 0.0) * (1 if name in ("min", "max") else numel) for name in SCALARS]
    row += [_TYPICAL["min"]] * sum(VECTORS.get(name, 0) for name in columns)
    stats = derive(names, row if numel else None, measured)
    place = None
    if parity:
        number, order = value.number or 0, planned.order
        entered = None if planned.phase == "attach" else order
        argument = _ARGUMENT if planned.enters else None
        place = Place(
            planned.class_name, argument, number, number, (entered, entered), entered, None
        )
    return Record(
        planned.module,
        value.label,
        0,
        planned.call,
        0,
        model,
        planned.phase,
        None,
        stats,
        _NOW,
        place=place,
    )


def _length(pieces: Sequence[bytes]) -> int:
    return sum(map(len, pieces))


def _length_in_file(signal: str, pieces: Sequence[bytes]) -> int:
    from otel_torch.telemetry import otlp_protobuf
    from otel_torch.telemetry.otlp_json import write_line

    return len(write_line(signal, otlp_protobuf.request(b"", b"", pieces))) - len(
        write_line(signal, otlp_protobuf.request(b"", b"", []))
    )


def _header(model: str, planned: _Planned) -> int:
    """Bytes of a tensor's entry in the header of a safetensors file."""
    value = planned.value
    key = f"{model}/{planned.module}/{value.label}/call{planned.call}/{planned.phase}"
    entry = {"dtype": "BF16", "shape": value.shape, "data_offsets": [10**8, 10**8]}
    return len(json.dumps({key: entry}, separators=(",", ":")))
