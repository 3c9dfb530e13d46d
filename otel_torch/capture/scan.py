"""What a model would do and what recording it would cost, before a costly run: `scan` and the command `otel-torch scan`.

For the person whose pattern matches nothing, or everything: both show only after an hour of loading, or in a full disk.
Knows the rows and the report; how a model runs without its numbers is in `fake_run`, what the command scans in `target`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from otel_torch.console import say, say_once
from otel_torch.records import Record
from otel_torch.settings import Settings
from otel_torch.table import Line, colourful, escape, paint, render, write

SCHEMA = "otel_torch.scan/1"


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor. shape: a size that depends on the data is -1, and then `bytes` is None. dtype: without `torch.`.
    requires_grad: whether it has a gradient in a backward pass."""

    label: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int | None
    requires_grad: bool = False


@dataclass(slots=True)
class Call:
    """One call of one module, with everything that happened inside it.

    call: how often the module had run before in this forward. order: place among all calls, by entering, from 0.
    depth: how many other calls it lies in.
    parameter_bytes, buffer_bytes: of the module and all in it. flops: floating-point operations of matrix products,
    convolutions and attention, a multiply-add counted as two; a lower bound where `dynamic` (sizes depend on the data).
    finished: False where the scan ended in here. selected: whether a session would record the call.
    """

    module: str
    class_name: str
    call: int
    order: int
    depth: int
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    parameter_bytes: int
    buffer_bytes: int
    flops: int = 0
    dynamic: bool = False
    finished: bool = False
    selected: bool = True


@dataclass(slots=True)
class Module:
    """One module of the model, called or not. parameters: its own, without those of the modules in it; a shared module
    has them under the first of its names."""

    name: str
    class_name: str
    parameter_bytes: int
    buffer_bytes: int
    parameters: tuple[Value, ...]
    selected: bool = True


@dataclass(frozen=True, slots=True)
class Cost:
    """What recording the selection costs. records, jsonl_bytes, read_bytes: of one forward (with its backward, where
    gradients are recorded): records, bytes that they add to the recording, bytes of tensors that the statistics read.
    records_once, jsonl_bytes_once, read_bytes_once: likewise, of the parameters, before the first forward."""

    records: int = 0
    jsonl_bytes: int = 0
    read_bytes: int = 0
    records_once: int = 0
    jsonl_bytes_once: int = 0
    read_bytes_once: int = 0


@dataclass(slots=True)
class Scan:
    """A forward of a model that was not run. `str()` is a table of the selected calls, `as_json()` everything.

    model: the class of the root. modules: each of its names once; calls: in order of entering. flops: of all of it, a
    lower bound where `dynamic`, as in `Call`.
    ended: None, or where and why the forward could not go on; failed: it ended with an error that a real run has too,
    not because a value was asked for. cost: of recording the selection, which `select` changes.
    """

    model: str
    modules: list[Module]
    calls: list[Call]
    parameter_bytes: int
    buffer_bytes: int
    flops: int
    dynamic: bool
    ended: str | None
    failed: bool
    cost: Cost = field(default_factory=Cost)
    settings: Settings = field(default_factory=Settings.from_env, repr=False)

    @property
    def selected(self) -> list[Call]:
        """The calls that a session would record."""
        return [call for call in self.calls if call.selected]

    def select(self, **settings: str) -> Scan:
        """The same forward with another selection: settings as `otel_torch.start` takes them (`modules`, `exclude`,
        `models`, `capture`, `stats`), the environment's where none is given. Raises TypeError for an unknown setting
        and ValueError for a bad value."""
        return self._with(_read_settings(settings))

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain JSON values; shapes are lists, the class of a call stands under `class`."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "parameter_bytes": self.parameter_bytes,
            "buffer_bytes": self.buffer_bytes,
            "flops": self.flops,
            "dynamic": self.dynamic,
            "ended": self.ended,
            "failed": self.failed,
            "cost": dataclasses.asdict(self.cost),
            "modules": [_plain(module) for module in self.modules],
            "calls": [_plain(call) for call in self.calls],
        }

    def render(self, *, everything: bool = False, colour: bool = False) -> str:
        """The report as text. everything: also the calls that are not selected, which are then dim."""
        shown = self.calls if everything else self.selected
        lines = [escape(text) for text in self._heading()]
        if self.ended is not None:
            lines.append(paint(escape(f"! the scan ended {self.ended}"), "yellow", colour))
        if shown:
            marked = any(not call.selected for call in shown)
            columns = [column for column in _COLUMNS if column.wanted(shown)]
            rows = [Line([one.text(call) for one in columns], None if call.selected or not marked else "dim") for call in shown]
            lines += ["", render([one.name for one in columns], rows, left=sum(one.left for one in columns), colour=colour)]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.render()

    # -- selection -----------------------------------------------------------------------------------------------------

    def _with(self, settings: Settings) -> Scan:
        from otel_torch.sources.activations import selects

        def chosen(name: str) -> bool:
            return (
                settings.activations
                and (settings.models is None or bool(settings.models.search(self.model)))
                and selects(settings, name)
            )

        scan = dataclasses.replace(
            self,
            settings=settings,
            modules=[dataclasses.replace(module, selected=chosen(module.name)) for module in self.modules],
            calls=[dataclasses.replace(call, selected=chosen(call.module)) for call in self.calls],
        )
        scan.cost = _find_cost(scan)
        return scan

    def _heading(self) -> list[str]:
        cost, capture = self.cost, ", ".join(self.settings.capture) or "nothing"
        matching = sum(module.selected for module in self.modules)
        lines = [
            f"{self.model}: {len(self.modules)} modules, {len(self.calls)} calls, parameters {_size(self.parameter_bytes)}, "
            f"buffers {_size(self.buffer_bytes)}, {'at least ' if self.dynamic else ''}{_number(self.flops)}FLOP a forward",
            f"selected: {matching} of {len(self.modules)} modules, {len(self.selected)} calls; recording {capture}: "
            f"{cost.records} records and {_size(cost.jsonl_bytes)} of JSONL a forward, {_size(cost.read_bytes)} of tensors read",
        ]
        if cost.records_once:
            lines.append(
                f"parameters, once: {cost.records_once} records and {_size(cost.jsonl_bytes_once)} of JSONL, "
                f"{_size(cost.read_bytes_once)} of tensors read"
            )
        never = len(self.modules) - len({call.module for call in self.calls})
        if never and self.ended is None:
            lines.append(f"not called by this forward: {never} of the modules")
        return lines


def scan(model: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Scan:
    """What a forward of `model` on these arguments would do, without a real run: no weight is read, nothing is changed.

    model: a module, on any device, also on `meta`, or a bound method of one (`vae.decode`). args, kwargs: as for the
    model; of their tensors only shape and dtype count (tensors on `meta` will do), of those with one element the value.
    The selection is that of the running session, else of the environment; `Scan.select` tries others. Grad mode and
    autocast are the caller's. Hooks that the program has put on the model do not run: they may write anywhere.

    Raises TypeError for what is no model, ValueError for lazy modules that have no shapes yet. An error inside the
    forward is not raised: `Scan.ended` says where and why, and the calls up to there are given.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
    >>> [(call.module, call.outputs[0].shape, call.flops) for call in scan(model, torch.empty(2, 4, device="meta")).calls]
    [('', (2, 8), 128), ('0', (2, 8), 128), ('1', (2, 8), 0)]
    """
    from otel_torch import session
    from otel_torch.capture.fake_run import run_fake

    running = session.current()
    found = run_fake(model, args, kwargs)
    return found._with(running.settings if running is not None else _read_settings({}))


def _read_settings(chosen: dict[str, str]) -> Settings:
    rows = Settings.__dataclass_fields__
    environ = dict(os.environ)
    for name, value in chosen.items():
        if name not in rows:
            raise TypeError(f"select() knows no setting {name!r}; it takes {', '.join(rows)}")
        environ[rows[name].metadata["name"]] = value
    return Settings.from_env(environ, say_once)


# -- cost --------------------------------------------------------------------------------------------------------------


def _find_cost(scan: Scan) -> Cost:
    """Count what a session with these settings takes from one forward."""
    capture = scan.settings.capture
    forward: list[_Planned] = []
    once: list[_Planned] = []
    for call in scan.selected:
        if "inputs" in capture:
            forward += [(call.module, call.call, "forward", value) for value in call.inputs]
        if "outputs" in capture:
            forward += [(call.module, call.call, "forward", value) for value in call.outputs]
        if "gradients" in capture:
            forward += [(call.module, call.call, "backward", _gradient(value)) for value in call.outputs if value.requires_grad]
    for module in scan.modules:
        if module.selected and "parameters" in capture:
            once += [(module.name, 0, "attach", value) for value in module.parameters]
            if "gradients" in capture:
                forward += [(module.name, 0, "backward", _gradient(value)) for value in module.parameters if value.requires_grad]
    return Cost(*_sum_up(scan, forward), *_sum_up(scan, once))


# of one element, so that the statistics have as many digits as those of a real tensor
_TYPICAL = {
    "min": -3.051757812500123,
    "max": 3.141592653589793,
    "sum": -0.577215664901532,
    "squares": 1.047197551196597,
    "magnitudes": 0.797884560802865,
}
# a record to be: module, call, phase, tensor
_Planned = tuple[str, int, str, Value]


def _gradient(value: Value) -> Value:
    kind, rest = re.fullmatch(r"(out|param)(.*)", value.label, re.S).groups()  # type: ignore[union-attr]
    return dataclasses.replace(value, label={"out": "grad", "param": "param_grad"}[kind] + rest)


def _sum_up(scan: Scan, planned: list[_Planned]) -> tuple[int, int, int]:
    lines = sum(_measure_line(scan, *record) for record in planned)
    return len(planned), lines, sum(value.bytes or 0 for *_, value in planned)


def _measure_line(scan: Scan, module: str, call: int, phase: str, value: Value) -> int:
    """Bytes of one line of a recording, encoded as it would be, with numbers as long as they usually are."""
    from otel_torch.sinks.jsonl import encode
    from otel_torch.statistics.columns import SUMS, WIDE
    from otel_torch.statistics.measure import Measured
    from otel_torch.statistics.table import derive, primitives_of

    names = scan.settings.stats
    primitives = primitives_of(names)
    numel = math.prod(map(abs, value.shape))
    measured = Measured(None, primitives, numel, numel, list(value.shape), f"torch.{value.dtype}")
    row = [_TYPICAL.get(name, 0.0) * (1 if name in ("min", "max") else numel) for name in SUMS]
    row += [0.0] * sum(WIDE.get(name, 0) for name in primitives)
    stats = derive(names, row if numel else None, measured)
    return len(encode([Record(module, value.label, 0, call, 0, scan.model, phase, None, stats, 0)]))


# -- the report --------------------------------------------------------------------------------------------------------


def _plain(row: Call | Module) -> dict[str, Any]:
    fields = dataclasses.asdict(row)
    return {("class" if name == "class_name" else name): value for name, value in fields.items()}


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    text: Callable[[Call], str]
    left: bool = False
    wanted: Callable[[list[Call]], bool] = bool


def _show(values: tuple[Value, ...]) -> str:
    """The first tensors of a call in short, and how many more there are."""
    texts = []
    for value in values[:2]:
        label = "" if len(values) == 1 else re.sub(r"^(in|out)\.?", "", value.label) + " "
        shape = "x".join("?" if size < 0 else str(size) for size in value.shape) or "scalar"
        texts.append(f"{label}{shape} {value.dtype}")
    return ", ".join(texts) + (f", +{len(values) - 2}" if len(values) > 2 else "")


def _size(number: int) -> str:
    return f"{_number(number)}B"


def _number(number: int) -> str:
    """A number as people read it.

    >>> _number(999), _number(1_230_000), _number(10**13)
    ('999 ', '1.23 M', '10 T')
    """
    value, units = float(number), iter("kMGTPE")
    unit = ""
    while value >= 999.5 and (larger := next(units, "")):
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"


_COLUMNS = (
    _Column("module", lambda call: call.module or "(root)", left=True),
    _Column("class", lambda call: call.class_name, left=True),
    _Column("inputs", lambda call: _show(call.inputs), left=True),
    _Column("outputs", lambda call: _show(call.outputs) if call.finished else "(ended)", left=True),
    _Column("call", lambda call: str(call.call), wanted=lambda calls: any(call.call for call in calls)),
    _Column("parameters", lambda call: _size(call.parameter_bytes)),
    _Column("FLOP", lambda call: _number(call.flops).strip() + ("+" if call.dynamic else "")),
)


# -- the command -------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `otel-torch scan`."""
    parser.add_argument(
        "target", metavar="TARGET",
        help="package.module:name or file.py:name, a model, a class of one, or a function that returns model, (model, args) "
        "or (model, args, kwargs); or a local folder with the config.json or model_index.json of transformers or diffusers",
    )  # fmt: skip
    parser.add_argument(
        "--input", action="append", default=[], metavar="NAME=SHAPE[:DTYPE]",
        help="an input by name, as hidden_states=1x16x32x32:bfloat16, ids=2x77:int64 or t=scalar; may be repeated",
    )  # fmt: skip
    parser.add_argument("--component", metavar="NAME", help="which model of a pipeline's folder")
    parser.add_argument("--method", metavar="NAME", help="run this method of the model instead of its forward, as decode")
    parser.add_argument("--modules", metavar="REGEX", help="select modules, in place of OTEL_TORCH_MODULES")
    parser.add_argument("--exclude", metavar="REGEX", help="leave modules out, in place of OTEL_TORCH_EXCLUDE")
    parser.add_argument("--all", action="store_true", help="list the calls that are not selected too")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Print what would be recorded. Returns 0, or 2 after one line on stderr for bad input or an empty selection."""
    os.environ["OTEL_TORCH_ENABLED"] = "0"  # nothing that is loaded for the scan is itself recorded
    chosen = {name: value for name in ("modules", "exclude") if (value := getattr(arguments, name)) is not None}
    settings = _read_settings(chosen)
    import torch

    from otel_torch.capture.target import load

    target, args, kwargs = load(arguments.target, arguments.component, arguments.method, arguments.input)
    with torch.set_grad_enabled("gradients" in settings.capture):
        found = scan(target, *args, **kwargs)._with(settings)
    if found.failed and len(found.calls) <= 1:
        say(f"the forward of {found.model} failed {found.ended}")
        return 2
    problem = _why_nothing(found)
    if problem is not None:
        say(problem)
        return 2
    if arguments.json:
        write(sys.stdout, json.dumps(found.as_json(), allow_nan=False))
    else:
        write(sys.stdout, found.render(everything=arguments.all, colour=colourful(sys.stdout)))
    if found.failed:
        say(f"the forward of {found.model} failed {found.ended}")
        return 2
    return 0


def _why_nothing(scan: Scan) -> str | None:
    """Why a selection would record nothing, None where it would, or where only the end of the scan is to blame."""
    if scan.selected:
        return None
    chosen = [module.name for module in scan.modules if module.selected]
    if chosen and scan.ended is None:
        named = ", ".join(chosen[:3]) + (", ..." if len(chosen) > 3 else "")
        return f"the selected modules of {scan.model} ({named}) are never called by this forward: nothing would be recorded"
    if chosen:
        return None
    names = [module.name for module in scan.modules if module.name]
    example = f", for example {names[-1]!r}" if names else ""
    return (
        f"no module of {scan.model} is selected ({len(scan.modules)} modules{example}); see --modules, --exclude and "
        "OTEL_TORCH_MODULES, OTEL_TORCH_EXCLUDE, OTEL_TORCH_MODELS, OTEL_TORCH_ACTIVATIONS"
    )
