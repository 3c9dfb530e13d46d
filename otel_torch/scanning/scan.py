"""Show what a forward would do and what recording it would cost, before an expensive run.

A pattern that matches nothing, or everything, otherwise shows only after an hour of loading or in a
full disk.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from otel_torch.process.console import say_once
from otel_torch.rendering.notebook import notebook_html
from otel_torch.rendering.table import escape
from otel_torch.scanning.cost import Cost, cost_of_forward, cost_of_parameters
from otel_torch.scanning.scan_report import (
    CostEstimate,
    call_cells,
    format_report,
    summary_lines,
)
from otel_torch.scanning.scanned_forward import ScannedCall, ScannedForward, ScannedModule
from otel_torch.settings import Settings

SCHEMA = "otel_torch.scan/1"


@dataclass
class Scan(ScannedForward):
    """The result of `scan`: a forward that was not run, and what recording it would cost.

    The fields are those of `ScannedForward`. `str()` is a report of the selected calls, `as_json()`
    has everything, and `select` makes another selection.
    """

    settings: Settings = field(default_factory=Settings.from_env, repr=False)

    @cached_property
    def cost(self) -> Cost:
        """The cost of recording one forward, and its backward pass if gradients are recorded."""
        return cost_of_forward(self, self.settings)

    @cached_property
    def cost_once(self) -> Cost:
        """The cost of recording the parameters, which happens once."""
        return cost_of_parameters(self, self.settings)

    @property
    def selected(self) -> list[ScannedCall]:
        """The calls that a session would record."""
        return [call for call in self.calls if call.selected]

    def select(self, **settings: str) -> Scan:
        """Return the same forward with another selection.

        Args:
            settings: As for `otel_torch.start` (`modules`, `exclude`, `models`, `capture`,
                `stats`); the environment sets the others.

        Raises:
            TypeError: An unknown setting.
            ValueError: A bad value.
        """
        return self.with_settings(read_settings(settings))

    def with_settings(self, settings: Settings) -> Scan:
        """Return the same forward with the selection of other settings."""
        from otel_torch.sources.models.selection import ModuleSelection

        selection = ModuleSelection(settings)
        records_model = settings.activations and selection.has_model(self.model)

        def is_selected(name: str) -> bool:
            return records_model and selection.has_module(name)

        modules = [
            dataclasses.replace(module, selected=is_selected(module.name))
            for module in self.modules
        ]
        calls = [
            dataclasses.replace(call, selected=is_selected(call.module)) for call in self.calls
        ]
        return dataclasses.replace(self, settings=settings, modules=modules, calls=calls)

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain JSON values; the key of a call's class is `class`."""
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
            "modules": [_as_json(module) for module in self.modules],
            "calls": [_as_json(call) for call in self.calls],
        }

    def render(
        self,
        *,
        everything: bool = False,
        forwards: int = 1,
        colour: bool = False,
        width: int | None = None,
    ) -> str:
        """Return the report as text.

        Args:
            everything: List calls that are not selected too, dimmed.
            forwards: The number of forwards whose cost to show. A denoise step with guidance has
                two; a training step has one per accumulated batch.
            colour: Use terminal colors.
            width: Columns of the terminal, to which names are shortened; None for full names.
        """
        estimate = CostEstimate(self.cost, self.cost_once, forwards)
        return format_report(
            self, estimate, self.settings, everything=everything, color=colour, width=width
        )

    def __str__(self) -> str:
        return self.render()

    def __repr__(self) -> str:
        return "\n".join(self._summary())

    def _repr_html_(self) -> str:
        return notebook_html(self._summary(), *call_cells(self.selected))

    def _summary(self) -> list[str]:
        lines = summary_lines(self, CostEstimate(self.cost, self.cost_once, 1), self.settings)
        return lines if self.ended is None else [*lines, f"! the scan ended {escape(self.ended)}"]


def scan(model: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Scan:
    """Show what a forward of `model` with these arguments would do, without running it.

    No weight is read and nothing is changed. The selection is that of the running session, else of
    the environment; `Scan.select` makes another. Grad mode and autocast are the caller's. Hooks of
    the program do not run, because they may write anywhere. An exception inside the forward is not
    raised: the calls up to it are returned, and `Scan.ended` has the position and the reason.

    Args:
        model: A module on any device, also on `meta`, or a bound method of one (`vae.decode`).
        *args: The model's arguments. Only shape and dtype of a tensor count, so it may be on
            `meta`; a tensor with one element counts with its value.
        **kwargs: The model's keyword arguments, likewise.

    Raises:
        TypeError: `model` is something else.
        ValueError: The model has lazy modules without shapes.

    Examples:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
        >>> result = scan(model, torch.empty(2, 4, device="meta"))
        >>> [(call.module, call.outputs[0].shape, call.flops) for call in result.calls]
        [('', (2, 8), 128), ('0', (2, 8), 128), ('1', (2, 8), 0)]
    """
    from otel_torch import session
    from otel_torch.scanning.fake_run import run_fake

    running = session.current()
    settings = running.settings if running is not None else read_settings({})
    scanned = run_fake(model, args, kwargs)
    fields = {item.name: getattr(scanned, item.name) for item in dataclasses.fields(scanned)}
    return Scan(**fields).with_settings(settings)


def read_settings(overrides: dict[str, str]) -> Settings:
    """Return the settings of the environment with some replaced. Raises TypeError for a name that
    is not a setting, and ValueError for a bad value.
    """
    fields = Settings.__dataclass_fields__
    environ = dict(os.environ)
    for name, value in overrides.items():
        if name not in fields:
            raise TypeError(f"select() has no setting {name!r}; use {', '.join(fields)}")
        environ[fields[name].metadata["name"]] = value
    return Settings.from_env(environ, say_once)


def _as_json(row: ScannedCall | ScannedModule) -> dict[str, Any]:
    fields = dataclasses.asdict(row)
    return {("class" if name == "class_name" else name): value for name, value in fields.items()}
