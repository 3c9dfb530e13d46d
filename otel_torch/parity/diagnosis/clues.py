"""The evidence about one fault: two tensors, what was recorded before them, and how they compare.

A parameter and an activation are described alike, so that most hypotheses apply to both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from otel_torch.parity.align import Alignment
from otel_torch.parity.breakdown import axis_names
from otel_torch.parity.call_graph import Parameter, Role, Sketch
from otel_torch.parity.diagnosis.stored_tensors import Array, StoredTensors, as_floats
from otel_torch.parity.parameters import ParameterPair
from otel_torch.parity.sides import Sides
from otel_torch.recording.rows import Row

_NO_PARAMETERS: Sides[Sequence[Parameter]] = Sides((), ())


@dataclass(eq=False)
class Measured:
    """A tensor of one program: its statistics, its sketch, and its elements if they were kept.

    Attributes:
        name: As in a sentence: `the output of blocks.0.q`, `blocks.0.q.weight`.
        row: The statistics as recorded.
        sketch: float64 of shape (64,), or None.
    """

    name: str
    row: Row
    numel: int
    shape: tuple[int, ...]
    sketch: Sketch | None
    load: Callable[[], Array | None] = lambda: None

    @cached_property
    def elements(self) -> Array | None:
        """The elements as float64 or complex128, or None if they were not kept."""
        array = self.load()
        return None if array is None else as_floats(array)

    def statistic(self, name: str) -> float:
        """Return a recorded statistic, NaN if there is none."""
        value = self.row.get(name)
        return float(value) if isinstance(value, int | float) else float("nan")

    @property
    def dtype(self) -> object:
        """The dtype as recorded."""
        return self.row.get("dtype")

    @property
    def extremes(self) -> tuple[float, float]:
        """The recorded minimum and maximum."""
        return self.statistic("min"), self.statistic("max")


@dataclass(eq=False)
class Clues:
    """What is known about one fault.

    Attributes:
        reference, port: The tensors that differ.
        earlier: The reference's right tensors before it, or its other parameters.
        right: All right tensors of the reference in this forward.
        limit: The relative L2 error up to which two tensors are equal.
        weight: The pair of parameters at fault; None for activations.
        roles, port_roles: The rows that differ; empty for parameters.
        alignment: All pairs of this forward.
        tensors, parameters, pairs: As in `Diagnosis`.
    """

    reference: Measured
    port: Measured
    limit: float
    earlier: Sequence[Measured] = ()
    right: Sequence[Measured] = ()
    weight: ParameterPair | None = None
    roles: Sequence[Role] = ()
    port_roles: Sequence[Role] = ()
    alignment: Alignment | None = None
    tensors: Sides[StoredTensors] | None = None
    parameters: Sides[Sequence[Parameter]] = _NO_PARAMETERS
    pairs: Sequence[ParameterPair] = ()

    @property
    def role(self) -> Role | None:
        """The row of the reference, if it is one on each side."""
        return self.roles[0] if len(self.roles) == len(self.port_roles) == 1 else None

    @property
    def port_role(self) -> Role | None:
        """The row of the port, likewise."""
        return self.port_roles[0] if len(self.roles) == len(self.port_roles) == 1 else None

    @property
    def is_comparable(self) -> bool:
        """Whether both have as many elements."""
        return self.reference.numel == self.port.numel

    @property
    def subject(self) -> str:
        """The tensor at fault, at the start of a sentence."""
        return f"the port's {self.port.name}" if self.weight is not None else "the port's value"

    def axis_names(self, shape: Sequence[int]) -> list[str]:
        """Return what the axes of a tensor hold; rows are tokens where as many ids are given."""
        names = axis_names(len(shape), self.weight is not None)
        if self.alignment is None or len(shape) != 2:
            return names
        integers = [
            value.row.get("shape")
            for value in self.alignment.reference.values
            if value.is_integer and isinstance(value.row.get("shape"), list)
        ]
        if list(shape) in integers:
            return ["batch entry", "token"]
        return names if list(shape[:1]) in integers else ["row", "channel"]

    @cached_property
    def elements(self) -> tuple[Array, Array] | None:
        """The elements of both, in the reference's shape; None if either was not kept."""
        pair = self.raw_elements
        if pair is None or not all(np.isfinite(side).all() for side in pair):
            return None
        return pair

    @cached_property
    def raw_elements(self) -> tuple[Array, Array] | None:
        """Likewise, with NaN and Inf."""
        reference, port = self.reference.elements, self.port.elements
        if reference is None or port is None or reference.size != port.size:
            return None
        return reference, port.reshape(reference.shape)

    @property
    def same_size(self) -> list[Measured]:
        """The earlier tensors of the size of these."""
        return [candidate for candidate in self.earlier if candidate.numel == self.reference.numel]


def describe_role(role: Role) -> str:
    """Return a tensor of a call as in a sentence.

    >>> from types import SimpleNamespace as Plain
    >>> describe_role(Plain(call=Plain(module="fc", model="Net"), side="output", tensor="out[1]"))
    'the output `out[1]` of fc'
    """
    name = role.call.module or role.call.model
    tensor = "" if role.tensor in ("out", "in[0]") else f" `{role.tensor}`"
    return f"the {role.side}{tensor} of {name}"


def measured_role(role: Role, tensors: StoredTensors) -> Measured:
    """Return an activation."""
    value = role.value
    shape = role.row.get("shape")

    def load() -> Array | None:
        return tensors.of_role(role)

    return Measured(
        describe_role(role),
        value.row,
        value.numel,
        tuple(shape) if isinstance(shape, list) else (),
        value.sketch,
        load,
    )


def measured_parameter(parameter: Parameter, tensors: StoredTensors) -> Measured:
    """Return a parameter or buffer."""
    return Measured(
        parameter.full_name,
        parameter.row,
        parameter.numel,
        parameter.shape,
        parameter.sketch,
        lambda: tensors.of_parameter(parameter),
    )


def parameters_of(parameters: Sequence[Parameter], module: Any) -> dict[str, Parameter]:
    """Return the parameters and buffers of a module by name."""
    return {
        parameter.name: parameter for parameter in parameters if parameter.module_path == module
    }
