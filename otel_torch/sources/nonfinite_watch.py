"""Sees what is not finite in steps that are not recorded: one measurement an outermost forward, of
what comes out.

Without it a value that goes bad between two recorded steps would be seen when every later step is
bad too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from otel_torch import torch_private
from otel_torch.console import say_once
from otel_torch.sources import compiled
from otel_torch.sources.hooks import ForwardHook, ModuleHookManager, remove_hooks
from otel_torch.sources.modules import Model, Site
from otel_torch.sources.values import walk
from otel_torch.statistics.measure import Measured, measure, prepare
from otel_torch.statistics.read import Rows
from otel_torch.statistics.row_layout import NONFINITE

_HOOK = "otel_torch.watch"
_PRIMITIVES = ("nonfinite",)


class _RootHook(ForwardHook):
    """Sees the outputs of a model's root."""

    def __init__(self, watch: Watch, site: Site) -> None:
        self._watch, self._site = watch, site
        self._number = compiled.number(site, watch)

    @classmethod
    def name(cls) -> str:
        return _HOOK

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if torch.compiler.is_compiling():
            if not torch_private.is_exporting():
                compiled.outputs(self._number, output)
        else:
            self._watch.left(self._site.model, output)
        return output


class Watch:
    """Measures the outputs of outermost forwards that are not recorded, and tells of each later
    whether it was finite.

    saw(place, finite): told in `collect`. Nothing in here waits for a device or raises into a
    forward.
    """

    def __init__(self, saw: Callable[[Hashable, bool], None]) -> None:
        self._saw = saw
        self._pending: list[tuple[Hashable, Measured]] = []
        self._on_the_way: deque[tuple[list[Hashable], Rows]] = deque()
        self._attached: list[Callable[[], nn.Module | None]] = []

    def attach(self, model: Model, sites: list[Site]) -> None:
        """Put a hook on the model's root, if it is among its new `sites`."""
        for site in sites:
            root = site.module()
            if root is None or root is not model.root():
                continue
            try:
                ModuleHookManager.get_from_or_default(root).append_forward_hook(
                    _RootHook(self, site)
                )
                self._attached.append(site.module)
                prepare(root.parameters(), _PRIMITIVES)
            except Exception as error:
                say_once(
                    f"{model.name} is not watched between recorded steps: {type(error).__name__}: {error}"
                )

    def detach(self) -> None:
        """Remove every hook."""
        remove_hooks(
            [module for attached in self._attached if (module := attached()) is not None], _HOOK
        )
        self._attached.clear()

    def left(self, model: Model, output: Any) -> None:
        """An outermost forward of `model` has returned this."""
        try:
            if model.moment is not None and not model.moment.recording:
                for label, tensor in walk(output, "out"):
                    self._measure(model, label, tensor)
        except Exception as error:
            say_once(f"{model.name}: an output was not watched: {type(error).__name__}: {error}")

    def seen(
        self,
        site: Site,
        tensors: list[tuple[str, torch.Tensor]],
        *,
        entering: bool,
        differentiable: bool,
    ) -> None:
        """A compiled program hands over what the root returns."""
        try:
            if site.model.moment is not None and not site.model.moment.recording:
                for label, tensor in tensors:
                    self._measure(site.model, label, tensor)
        except Exception as error:
            say_once(
                f"{site.model.name}: an output was not watched: {type(error).__name__}: {error}"
            )

    def _measure(self, model: Model, label: str, tensor: torch.Tensor) -> None:
        moment = model.moment
        assert moment is not None
        measured = measure(tensor, _PRIMITIVES)
        if measured.row is not None:
            self._pending.append(((model.name, "", label, moment.phase), measured))

    def collect(self) -> None:
        """Between steps: tell of what has come to the host by now, and leave the rest for the next
        time.
        """
        try:
            pending, self._pending = self._pending, []
            if pending:
                self._on_the_way.append(
                    ([place for place, _ in pending], Rows([measured for _, measured in pending]))
                )
            while self._on_the_way and self._on_the_way[0][1].ready():
                places, rows = self._on_the_way.popleft()
                for place, row in zip(places, rows.fetch(), strict=True):
                    self._saw(place, row is None or not row[NONFINITE])
        except Exception as error:
            say_once(f"the outputs of a step were not watched: {type(error).__name__}: {error}")
