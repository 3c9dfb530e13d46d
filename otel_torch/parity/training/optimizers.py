"""The optimizers of a run by its metadata: which holds a parameter, and with which settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from otel_torch.parity.sides import Sides

# settings that choose between implementations of the same formula, or that only name something
_WITHOUT_EFFECT = frozenset(
    {"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay", "initial_lr"}
    | {"name", "param_names"}
)
# settings that a schedule changes, or a resume, and that have a row in each step
_SCHEDULED = ("lr", "weight_decay", "optimizer_step")
# what a cause calls a setting, and its kind
_KINDS = {
    "lr": ("learning_rate", "learning rate"),
    "weight_decay": ("weight_decay", "weight decay"),
    "betas": ("betas", "betas"),
    "eps": ("eps", "epsilon"),
    "momentum": ("momentum", "momentum"),
    "amsgrad": ("amsgrad", "amsgrad"),
    "optimizer_step": ("optimizer_state", "a count of steps of"),
}


class SettingDifference(NamedTuple):
    """A setting that differs. kind, text: Of the cause that it is."""

    kind: str
    name: str
    reference: Any
    port: Any

    @property
    def text(self) -> str:
        """As a clause: `the port's optimizer has epsilon 1e-06, the reference's 1e-08`."""
        return f"the port's optimizer has {self.name} {self.port}, the reference's {self.reference}"


@dataclass(frozen=True, slots=True)
class OptimizerGroup:
    """The group of an optimizer that holds a parameter.

    Attributes:
        optimizer: Its index in the metadata.
        label: What the rows of its learning rate name it: `lr[LABEL]`.
        first_step: The first step with these settings.
        is_loaded: Whether its state was loaded before that step.
        copies: The dtypes of what it holds, if that is none of the model's parameters.
        knows_rate: Whether the learning rate is that of the step in question.
    """

    optimizer: int
    cls: str
    label: str
    first_step: int
    is_loaded: bool
    settings: dict[str, Any]
    knows_rate: bool = False
    copies: tuple[str, ...] = ()

    @property
    def is_adaptive(self) -> bool:
        """Whether an update may be as large for a tiny gradient as for a large one."""
        return self.cls not in ("SGD", "ASGD", "LBFGS")

    @property
    def has_state(self) -> bool:
        """Whether an update depends on earlier gradients."""
        return self.is_adaptive or bool(self.settings.get("momentum"))


class OptimizerTable:
    """The optimizers in the metadata of one recording.

    An optimizer is listed again when its state was loaded, and a new one when it first steps: the
    latest that has stepped by then holds a parameter.

    Attributes:
        frozen: Parameters, `model:module.name`, that require no gradient.
        scales: Whether a GradScaler steps an optimizer, and may skip steps.
    """

    def __init__(self, meta: dict[str, Any]) -> None:
        self._groups: dict[str, list[OptimizerGroup]] = {}
        self.frozen: set[str] = set()
        self.scales = False
        self._copied: set[str] = set()
        entries = meta.get("optimizers")
        for index, entry in enumerate(entries if isinstance(entries, list) else ()):
            self.frozen.update(entry.get("frozen", ()))
            self._copied.update(entry.get("models", ()) if entry.get("copies") else ())
            self.scales = self.scales or entry.get("grad_scaler") is not None
            for number, group in enumerate(entry.get("groups", ())):
                settings = group.get("settings", {})
                held = OptimizerGroup(
                    optimizer=index,
                    cls=str(entry.get("class", "")),
                    label=str(settings.get("name", number)),
                    first_step=int(entry.get("first_step") or 0),
                    is_loaded=bool(entry.get("loaded")),
                    settings=settings,
                    copies=tuple(entry.get("copies", ())),
                )
                for name in group.get("parameters", ()):
                    self._groups.setdefault(name, []).append(held)

    def __bool__(self) -> bool:
        """Return whether any optimizer is known."""
        return bool(self._groups)

    def holds_copies(self, model: str) -> bool:
        """Return whether an optimizer of a model holds none of its parameters."""
        return model in self._copied

    def group_of(self, name: str, step: int) -> OptimizerGroup | None:
        """Return the group that holds a parameter, `model:module.name`, in a step, or None."""
        groups = self._groups.get(name, ())
        begun = [group for group in groups if group.first_step <= step]
        return next(reversed(begun or groups), None)


def with_schedule(group: OptimizerGroup, scalar: Callable[[str], float | None]) -> OptimizerGroup:
    """Return a group with the scheduled settings of one step, as far as they are recorded.

    Args:
        scalar: Returns the value of a row of the step, such as `lr[0]`, or None.
    """
    values = {name: scalar(f"{name}[{group.label}]") for name in _SCHEDULED}
    known = {name: value for name, value in values.items() if value is not None}
    if "optimizer_step" in known:
        known["optimizer_step"] = int(known["optimizer_step"])
    known_rate = group.knows_rate or "lr" in known
    return replace(group, settings=group.settings | known, knows_rate=known_rate)


def setting_differences(
    groups: Sides[OptimizerGroup], dtypes: Sides[str]
) -> Iterator[SettingDifference]:
    """Yield what differs between the optimizers and settings of a parameter.

    Args:
        dtypes: The parameter's own.
    """
    reference, port = groups
    held = Sides(
        reference.copies or (dtypes.reference,),
        port.copies or (dtypes.port,),
    )
    if dtypes.reference == dtypes.port and held.reference != held.port:
        named = held.map(lambda names: " and ".join(names).replace("torch.", ""))
        yield SettingDifference("master_weights", "parameters in", named.reference, named.port)
    if reference.cls != port.cls:
        yield SettingDifference("optimizer", "class", reference.cls, port.cls)
    for name, first in reference.settings.items():
        # another class, or version, has other settings
        second = port.settings.get(name, first)
        if name in _WITHOUT_EFFECT or _are_equal(first, second):
            continue
        knows_rates = reference.knows_rate and port.knows_rate
        if name == "lr" and reference.first_step != port.first_step and not knows_rates:
            continue  # a schedule may have changed it by then
        kind, words = _KINDS.get(name, ("optimizer_setting", name))
        yield SettingDifference(kind, words, first, second)


def _are_equal(reference: Any, port: Any) -> bool:
    """Return whether two settings are equal; a row has a rounded number."""
    numbers = isinstance(reference, float) and isinstance(port, float)
    return math.isclose(reference, port, rel_tol=1e-6) if numbers else reference == port
