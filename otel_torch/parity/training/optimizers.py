"""The optimizers of a run by its metadata: which holds a parameter, and with which settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from otel_torch.parity.sides import Sides

# settings that choose between implementations of the same formula, or that only name something
_WITHOUT_EFFECT = frozenset(
    {"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay", "initial_lr"}
    | {"name", "param_names"}
)
# what a cause calls a setting, and its kind
_KINDS = {
    "lr": ("learning_rate", "learning rate"),
    "weight_decay": ("weight_decay", "weight decay"),
    "betas": ("betas", "betas"),
    "eps": ("eps", "epsilon"),
    "momentum": ("momentum", "momentum"),
    "amsgrad": ("amsgrad", "amsgrad"),
}


class SettingDifference(NamedTuple):
    """A setting that differs. kind, text: Of the cause that it is."""

    kind: str
    name: str
    reference: Any
    port: Any

    @property
    def text(self) -> str:
        """As a clause: `the learning rate is 0.002 in the port and 0.001 in the reference`."""
        return f"the {self.name} is {self.port} in the port and {self.reference} in the reference"


@dataclass(frozen=True, slots=True)
class OptimizerGroup:
    """The group of an optimizer that holds a parameter.

    Attributes:
        optimizer: Its index in the metadata.
        label: What the rows of its learning rate name it: `lr[LABEL]`.
    """

    optimizer: int
    cls: str
    label: str
    settings: dict[str, Any]

    @property
    def is_adaptive(self) -> bool:
        """Whether an update may be as large for a tiny gradient as for a large one."""
        return self.cls not in ("SGD", "ASGD", "LBFGS")

    @property
    def has_state(self) -> bool:
        """Whether an update depends on earlier gradients."""
        return self.is_adaptive or bool(self.settings.get("momentum"))


class OptimizerTable:
    """The optimizers in the metadata of one recording."""

    def __init__(self, meta: dict[str, Any]) -> None:
        self._groups: dict[str, OptimizerGroup] = {}
        entries = meta.get("optimizers")
        number = 0
        for index, entry in enumerate(entries if isinstance(entries, list) else ()):
            for group in entry.get("groups", ()):
                settings = group.get("settings", {})
                label = str(settings.get("name", number))
                held = OptimizerGroup(index, str(entry.get("class", "")), label, settings)
                self._groups.update(dict.fromkeys(group.get("parameters", ()), held))
                number += 1

    def __bool__(self) -> bool:
        return bool(self._groups)

    def group_of(self, name: str) -> OptimizerGroup | None:
        """Return the group that holds a parameter, `model:module.name`; None if there is none."""
        return self._groups.get(name)


def setting_differences(groups: Sides[OptimizerGroup | None]) -> Iterator[SettingDifference]:
    """Yield what differs between the optimizers and settings of a parameter, by the metadata."""
    reference, port = groups
    if reference is None or port is None:
        return
    if reference.cls != port.cls:
        yield SettingDifference("optimizer", "optimizer", reference.cls, port.cls)
    for name, first in reference.settings.items():
        # another class, or version, has other settings
        second = port.settings.get(name, first)
        if first != second and name not in _WITHOUT_EFFECT:
            kind, words = _KINDS.get(name, ("optimizer_setting", name))
            yield SettingDifference(kind, words, first, second)
