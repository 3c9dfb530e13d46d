"""What a model would do and what recording it would cost, before a costly run: `scan` and the
command `otel-torch scan`.

For the person whose pattern matches nothing, or everything: both show only after an hour of
loading, or in a full disk. Knows the selection and the report; how a model runs without its numbers
is in `fake_run`, what records cost in `cost`, what the command scans in `target`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from otel_torch.console import say, say_once
from otel_torch.rendering.table import Line, escape, format_table, paint, supports_color, write_line
from otel_torch.scanning.cost import Cost, cost_of_forward, cost_of_parameters
from otel_torch.scanning.rows import Call, Forward, Module, Value
from otel_torch.settings import Settings

SCHEMA = "otel_torch.scan/1"


@dataclass
class Scan(Forward):
    """A forward of a model that was not run, and what recording it would cost. `str()` is a table
    of the selected calls, `as_json()` everything; the fields are those of `Forward`. The selection
    is `select`'s to change.
    """

    settings: Settings = field(default_factory=Settings.from_env, repr=False)

    @cached_property
    def cost(self) -> Cost:
        """Of recording one forward, with its backward where gradients are recorded."""
        return cost_of_forward(self, self.settings)

    @cached_property
    def cost_once(self) -> Cost:
        """Of recording the parameters, which is done once."""
        return cost_of_parameters(self, self.settings)

    @property
    def selected(self) -> list[Call]:
        """The calls that a session would record."""
        return [call for call in self.calls if call.selected]

    def select(self, **settings: str) -> Scan:
        """The same forward with another selection: settings as `otel_torch.start` takes them
        (`modules`, `exclude`, `models`, `capture`, `stats`), the environment's where none is given.
        Raises TypeError for an unknown setting and ValueError for a bad value.
        """
        return self._with(_read_settings(settings))

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain JSON values; shapes are lists, the class of a call stands under
        `class`.
        """
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
            "cost_once": dataclasses.asdict(self.cost_once),
            "modules": [_plain(module) for module in self.modules],
            "calls": [_plain(call) for call in self.calls],
        }

    def render(self, *, everything: bool = False, forwards: int = 1, colour: bool = False) -> str:
        """The report as text. everything: also the calls that are not selected, which are then dim.
        forwards: of how many the cost is told; a step is two of them under guidance, and as many as
        are accumulated in training.
        """
        shown = self.calls if everything else self.selected
        lines = [escape(text) for text in (*self._heading(), *self._costs(forwards))]
        if (full := self._disk_bytes(forwards)) > self.settings.max_bytes:
            limit = f"OTEL_TORCH_MAX_BYTES, {_size(self.settings.max_bytes)}"
            lines.append(
                paint(
                    f"! the disk would get {_size(full)}; writing ends at {limit}", "yellow", colour
                )
            )
        if self.ended is not None:
            lines.append(paint(escape(f"! the scan ended {self.ended}"), "yellow", colour))
        if shown:
            marked = any(not call.selected for call in shown)
            columns = [column for column in _COLUMNS if column.wanted(shown)]
            rows = [
                Line(
                    [one.text(call) for one in columns],
                    None if call.selected or not marked else "dim",
                )
                for call in shown
            ]
            lines += [
                "",
                format_table(
                    [one.name for one in columns],
                    rows,
                    left=sum(one.left for one in columns),
                    color=colour,
                ),
            ]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.render()

    # -- selection
    # ----------------------------------------------------------------------------------------------

    def _with(self, settings: Settings) -> Scan:
        from otel_torch.sources.activations import selects

        def chosen(name: str) -> bool:
            return (
                settings.activations
                and (settings.models is None or bool(settings.models.search(self.model)))
                and selects(settings, name)
            )

        return dataclasses.replace(
            self,
            settings=settings,
            modules=[
                dataclasses.replace(module, selected=chosen(module.name)) for module in self.modules
            ],
            calls=[dataclasses.replace(call, selected=chosen(call.module)) for call in self.calls],
        )

    def _heading(self) -> list[str]:
        matching = sum(module.selected for module in self.modules)
        lines = [
            f"{self.model}: {len(self.modules)} modules, {len(self.calls)} calls, parameters {_size(self.parameter_bytes)}, "
            f"buffers {_size(self.buffer_bytes)}, {'at least ' if self.dynamic else ''}{_number(self.flops)}FLOP a forward",
            f"selected: {matching} of {len(self.modules)} modules, {len(self.selected)} calls",
        ]
        never = len(self.modules) - len({call.module for call in self.calls})
        if never and self.ended is None:
            lines.append(f"not called by this forward: {never} of the modules")
        return lines

    def _costs(self, forwards: int) -> list[str]:
        capture = ", ".join(name for name in self.settings.capture if name != "parity") or "nothing"
        often = "a forward" if forwards == 1 else f"{forwards:,} forwards"
        lines = _describe_cost(f"recording {capture}, {often}", self.cost, forwards, self.settings)
        if self.cost_once.records:
            lines += _describe_cost("parameters, once", self.cost_once, 1, self.settings)
        return lines

    def _disk_bytes(self, forwards: int) -> int:
        """What would be written with these settings."""
        settings, total = self.settings, 0
        for cost, times in ((self.cost, forwards), (self.cost_once, 1)):
            files = (
                sum(getattr(cost, f"{field}_file_bytes") for field, _ in _sent(settings))
                if settings.otlp_file
                else 0
            )
            tensors = cost.tensor_bytes if settings.tensors else 0
            total += times * (files + tensors + (cost.jsonl_bytes if settings.jsonl else 0))
        return total


# what is sent for each record: the signal, the beginning of its fields in `Cost`, what it is called
_SIGNALS = (
    ("span_events", "span_event", "span events"),
    ("log_events", "log_event", "log events"),
    ("metrics", "metric", "metrics"),
)


def _sent(settings: Settings) -> list[tuple[str, str]]:
    """The signals that are chosen: their fields and words."""
    return [(field, words) for signal, field, words in _SIGNALS if signal in settings.signals]


def _describe_cost(what: str, cost: Cost, times: int, settings: Settings) -> list[str]:
    def size(*names: str) -> str:
        return _size(times * sum(getattr(cost, name) for name in names))

    sizes = [f"JSONL {size('jsonl_bytes')}"]
    if chosen := _sent(settings):
        signals = ", ".join(f"{words} {size(f'{field}_bytes')}" for field, words in chosen)
        sizes.append(
            f"OTLP {signals} (in files {size(*(f'{field}_file_bytes' for field, _ in chosen))})"
        )
    sizes.append(f"whole tensors {size('tensor_bytes')}")
    return [
        f"{what}: {times * cost.records:,} records, {size('read_bytes')} of tensors read",
        f"  {'; '.join(sizes)}",
    ]


def scan(model: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Scan:
    """What a forward of `model` on these arguments would do, without a real run: no weight is read,
    nothing is changed.

    model: a module, on any device, also on `meta`, or a bound method of one (`vae.decode`). args,
    kwargs: as for the model; of their tensors only shape and dtype count (tensors on `meta` will
    do), of those with one element the value. The selection is that of the running session, else of
    the environment; `Scan.select` tries others. Grad mode and autocast are the caller's. Hooks that
    the program has put on the model do not run: they may write anywhere.

    Raises TypeError for what is no model, ValueError for lazy modules that have no shapes yet. An
    error inside the forward is not raised: `Scan.ended` says where and why, and the calls up to
    there are given.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
    >>> [(call.module, call.outputs[0].shape, call.flops) for call in scan(model, torch.empty(2, 4, device="meta")).calls]
    [('', (2, 8), 128), ('0', (2, 8), 128), ('1', (2, 8), 0)]
    """
    from otel_torch import session
    from otel_torch.scanning.fake_run import run_fake

    running = session.current()
    forward = run_fake(model, args, kwargs)
    found = Scan(**{one.name: getattr(forward, one.name) for one in dataclasses.fields(forward)})
    return found._with(running.settings if running is not None else _read_settings({}))


def _read_settings(chosen: dict[str, str]) -> Settings:
    rows = Settings.__dataclass_fields__
    environ = dict(os.environ)
    for name, value in chosen.items():
        if name not in rows:
            raise TypeError(f"select() knows no setting {name!r}; it takes {', '.join(rows)}")
        environ[rows[name].metadata["name"]] = value
    return Settings.from_env(environ, say_once)


# -- the report
# --------------------------------------------------------------------------------------------------


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
    _Column(
        "call", lambda call: str(call.call), wanted=lambda calls: any(call.call for call in calls)
    ),
    _Column("parameters", lambda call: _size(call.parameter_bytes)),
    _Column("FLOP", lambda call: _number(call.flops).strip() + ("+" if call.dynamic else "")),
)


# -- the command
# --------------------------------------------------------------------------------------------------


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
    parser.add_argument(
        "--method",
        metavar="NAME",
        help="run this method of the model instead of its forward, as decode",
    )
    parser.add_argument(
        "--modules", metavar="REGEX", help="select modules, in place of OTEL_TORCH_MODULES"
    )
    parser.add_argument(
        "--exclude", metavar="REGEX", help="leave modules out, in place of OTEL_TORCH_EXCLUDE"
    )
    parser.add_argument(
        "--forwards", type=_positive, default=1, metavar="N",
        help="tell the cost of so many forwards; 30 denoise steps with guidance are 60",
    )  # fmt: skip
    parser.add_argument(
        "--all", action="store_true", help="list the calls that are not selected too"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Print what would be recorded. Returns 0, or 2 after one line on stderr for bad input or an
    empty selection.
    """
    os.environ["OTEL_TORCH_ENABLED"] = "0"  # nothing that is loaded for the scan is itself recorded
    chosen = {
        name: value
        for name in ("modules", "exclude")
        if (value := getattr(arguments, name)) is not None
    }
    settings = _read_settings(chosen)
    import torch

    from otel_torch.scanning.target import load

    target, args, kwargs = load(
        arguments.target, arguments.component, arguments.method, arguments.input
    )
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
        write_line(sys.stdout, json.dumps(found.as_json(), allow_nan=False))
    else:
        write_line(
            sys.stdout,
            found.render(
                everything=arguments.all,
                forwards=arguments.forwards,
                colour=supports_color(sys.stdout),
            ),
        )
    if found.failed:
        say(f"the forward of {found.model} failed {found.ended}")
        return 2
    return 0


def _why_nothing(scan: Scan) -> str | None:
    """Why a selection would record nothing, None where it would, or where only the end of the scan
    is to blame.
    """
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
