"""What the judgment of a training step needs besides its tensors, and the findings it makes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from otel_torch.parity.finding import Cause, Finding, Kind, Side
from otel_torch.parity.modules import ModulePath
from otel_torch.parity.sides import Sides
from otel_torch.parity.training.optimizers import (
    OptimizerGroup,
    OptimizerTable,
    SettingDifference,
    setting_differences,
    with_schedule,
)
from otel_torch.parity.training.steps import ParameterKey, RecordedStep

# how far factors of several tensors may differ and still be one, and a factor from a whole number
ONE_FACTOR = 1e-3


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of a module in one program."""

    module: str
    tensor: str
    side: Side
    call: int = 0


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far a tensor is off: as `error`, `floor` and `kind` of a finding."""

    error: float = math.nan
    floor: float = math.nan
    kind: Kind = "value"


@dataclass(slots=True)
class StepContext:
    """One step of a model on both sides.

    Attributes:
        matched: Module of the reference -> module of the port.
    """

    steps: Sides[RecordedStep]
    matched: dict[ModulePath, ModulePath]
    optimizers: Sides[OptimizerTable]

    def groups_of(self, names: Sides[str]) -> Sides[OptimizerGroup | None]:
        """Return the groups of the optimizers that hold a parameter."""
        return Sides(
            self.optimizers.reference.group_of(names.reference, self.steps.reference.step),
            self.optimizers.port.group_of(names.port, self.steps.port.step),
        )

    def setting_differences(self, names: Sides[str]) -> list[SettingDifference]:
        """Return what differs between the settings that a parameter is updated with in this step.

        The metadata has the settings of an optimizer's first step; those that a schedule changes
        are in the rows of the step, if the run recorded them.
        """
        groups = self.groups_of(names)
        if groups.reference is None or groups.port is None:
            return []
        current = Sides(
            with_schedule(groups.reference, self.steps.reference.scalar),
            with_schedule(groups.port, self.steps.port.scalar),
        )
        dtypes = Sides(*map(_dtype_of, self.steps, names))
        return list(setting_differences(current, dtypes))

    def is_held_on_one_side(self, names: Sides[str]) -> bool:
        """Return whether, by the metadata, optimizers hold a parameter on one side only."""
        reference, port = self.groups_of(names)
        return (reference is None) != (port is None)

    def no_gradient(self, names: Sides[str]) -> Cause | None:
        """Return the cause where a parameter requires no gradient on one side, by the metadata."""
        frozen = Sides(
            names.reference in self.optimizers.reference.frozen,
            names.port in self.optimizers.port.frozen,
        )
        if frozen.reference == frozen.port:
            return None
        side, name = ("port", names.port) if frozen.port else ("reference", names.reference)
        text = f"the {side} freezes {name.partition(':')[2]}: it requires no gradient there"
        return Cause("frozen", True, text)

    def finding(
        self,
        phase: str,
        places: Sides[Place],
        explanation: str,
        cause: Cause | None,
        deviation: Deviation,
    ) -> Finding:
        """Return a finding of this step."""
        steps, (reference, port) = self.steps, places
        is_known = not math.isnan(deviation.error)
        return Finding(
            model=steps.reference.model,
            module=reference.module,
            tensor=reference.tensor,
            loop=steps.reference.loop,
            step=steps.reference.step,
            call=reference.call,
            phase=phase,
            port_model=steps.port.model,
            port_module=port.module,
            port_tensor=port.tensor,
            port_loop=steps.port.loop,
            port_step=steps.port.step,
            port_call=port.call,
            rank=None,
            side=reference.side,
            port_side=port.side,
            kind=deviation.kind,
            error=deviation.error if is_known else None,
            floor=deviation.floor if is_known else None,
            explanation=" ".join(
                filter(None, ("" if cause is None else cause.sentence, explanation))
            ),
            cause=cause,
        )


def _dtype_of(step: RecordedStep, name: str) -> str:
    """Return the dtype of a parameter, `model:module.name`, after a step; "" if unknown."""
    module, _, key = name.partition(":")[2].rpartition(".")
    tensor = step.updated.get(ParameterKey(module, key))
    return "" if tensor is None else tensor.record.dtype


def whole_model(tensor: str, side: Side = "parameter") -> Sides[Place]:
    """Return the place of a fault that no module of a model made."""
    return Sides(Place("", tensor, side), Place("", tensor, side))


def times(factor: float) -> str:
    """Return a factor in words.

    >>> times(2.0), times(0.25), times(-1.0), times(1.00021)
    ('2 times', '1/4 of', 'minus', '1.00021 times')
    """
    if abs(factor + 1) < ONE_FACTOR:
        return "minus"
    if abs(factor - 1) < ONE_FACTOR:
        return f"{factor:.7g} times"
    if 0 < abs(factor) < 1:
        inverse = round(1 / factor)
        if abs(1 / factor - inverse) < ONE_FACTOR * abs(inverse):
            return f"1/{inverse} of"
    return f"{factor:.4g} times"
