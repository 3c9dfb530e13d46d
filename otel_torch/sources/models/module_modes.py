"""Whether the modules of a model are in training mode, where their forward asks for it.

A dropout or a batch norm in the wrong mode computes something else from the same inputs. Modes are
noted for the metadata of a recording when they change, so that a record costs no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn

from otel_torch.process.console import say_once
from otel_torch.sources.events import RunEvents
from otel_torch.sources.models.model import Model
from otel_torch.sources.steps.forwards import ForwardContext, Inputs

# changes of a model that are kept: two in a step of evaluation would be most
_MOST_CHANGES = 1000


class _ModesOfModel:
    """The modules of one model that ask for their mode, and what they were in."""

    def __init__(self) -> None:
        self.size = -1  # of the model when its modules were looked at
        self.modules: list[tuple[str, ref[nn.Module]]] = []
        self.latest: dict[str, list[bool]] = {}  # by phase
        self.changes: list[dict[str, Any]] = []
        self.position: tuple[str, int, int] | None = None
        self.call = 0


class ModeChanges:
    """Notes the modes at the begin of every outermost forward."""

    def __init__(self, events: RunEvents) -> None:
        self._models: WeakKeyDictionary[Model, _ModesOfModel] = WeakKeyDictionary()
        events.forward_began.append(self._on_forward)

    def describe(self, model: Model) -> dict[str, Any]:
        """Return the model's part of the metadata: `modes`, if any of its modules asks for one."""
        modes = self._models.get(model)
        return {"modes": list(modes.changes)} if modes is not None and modes.changes else {}

    def _on_forward(self, model: Model, context: ForwardContext, _: Inputs) -> None:
        modes = self._models.setdefault(model, _ModesOfModel())
        if modes.size != len(model.sites):
            modes.size, modes.modules = len(model.sites), list(_asking_modules(model))
            modes.latest.clear()
        position = context.phase, context.loop, context.step
        modes.call = modes.call + 1 if modes.position == position else 0
        modes.position = position
        if not modes.modules:
            return
        current = [bool(getattr(module(), "training", True)) for _, module in modes.modules]
        if current == modes.latest.get(context.phase):
            return
        modes.latest[context.phase] = current
        if len(modes.changes) >= _MOST_CHANGES:
            say_once(f"{model.name}: further changes of the mode of modules are not recorded")
            return
        names = [name for name, _ in modes.modules]
        modes.changes.append(
            {
                "phase": context.phase,
                "loop": context.loop,
                "step": context.step,
                "call": modes.call,
                "training": [name for name, on in zip(names, current, strict=True) if on],
                "eval": [name for name, on in zip(names, current, strict=True) if not on],
            }
        )


def _asking_modules(model: Model) -> Iterator[tuple[str, ref[nn.Module]]]:
    """Yield the modules whose own code reads `training`, by their canonical names."""
    for site in list(model.sites.values()):
        module = site.module()
        if module is not None and _asks(type(module)):
            yield from ((name, site.module) for name, _ in site.names)


def _asks(kind: type) -> bool:
    """Return whether a method of a class of modules reads `training`.

    >>> _asks(nn.Dropout), _asks(nn.Linear)
    (True, False)
    """
    own = kind.__mro__[: kind.__mro__.index(nn.Module)]
    methods = (value for base in own for name, value in vars(base).items() if name != "train")
    codes = (getattr(method, "__code__", None) for method in methods)
    return any("training" in code.co_names for code in codes if code is not None)
