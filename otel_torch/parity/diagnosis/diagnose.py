"""Name the cause of a fault: try the hypotheses of a table, the simplest first.

A hypothesis is a function from the `Clues` about two tensors to a `Cause`, or None if the clues do
not show it. The first one that holds names the cause; a fault that none explains is not named.

    clues ─▶ WEIGHTS, VALUES or SHAPES, in order ─▶ Cause | None
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from otel_torch.parity.align import Alignment
from otel_torch.parity.breakdown import break_down
from otel_torch.parity.call_graph import ModuleCall, Parameter, Role, TensorValue, summed_sketch
from otel_torch.parity.diagnosis import (
    attention,
    biases,
    convolutions,
    functions,
    linear,
    orders,
    parts,
    rounding,
    shapes,
    weights,
)
from otel_torch.parity.diagnosis.clues import (
    Clues,
    Measured,
    describe_role,
    measured_parameter,
    measured_role,
    parameters_of,
)
from otel_torch.parity.diagnosis.stored_tensors import Array, StoredTensors
from otel_torch.parity.explain import is_exchanged
from otel_torch.parity.faults import Fault
from otel_torch.parity.finding import Cause
from otel_torch.parity.parameter_distance import distance, stacked_row_sketch
from otel_torch.parity.parameters import ParameterPair
from otel_torch.parity.sides import Sides
from otel_torch.parity.tensor_pair import TensorPair
from otel_torch.parity.tolerance import Tolerance

Hypothesis = Callable[[Clues], Cause | None]

WEIGHTS: tuple[Hypothesis, ...] = (
    weights.constant,
    weights.one_number,
    weights.rotary_base,
    weights.from_another_place,
    linear.scaled,
    linear.one_part_scaled,
    linear.shifted,
    rounding.rounded,
    orders.reordered,
    linear.one_term,
    linear.sum_of_two,
    linear.constant,
    rounding.clamped,
    parts.concentrated,
    weights.default_initialization,
)
VALUES: tuple[Hypothesis, ...] = (
    biases.missing_bias,
    linear.scaled,
    linear.one_term,
    linear.equal_to_another,
    linear.shifted,
    linear.scaled_and_shifted,
    rounding.dropout_module,
    functions.activation,
    linear.sum_of_two,
    biases.unused_bias,
    rounding.rounded,
    rounding.dropout,
    rounding.clamped,
    linear.constant,
    functions.norm,
    convolutions.padding,
    functions.gate,
    orders.reordered,
    attention.attention,
    parts.nonfinite,
    parts.concentrated,
)


SHAPES: tuple[Hypothesis, ...] = (shapes.other_length,)

# the limit of a dtype allows for sums of many roundings; a loaded weight was rounded once
_OF_ONE_ROUNDING = 1 / 8
# causes that say which tensor the port should have had: as sure as it is that the two correspond
_OF_A_PAIR = ("other_tensor", "sum")
_NO_FOLDERS: tuple[str | None, str | None] = (None, None)


class Examination(NamedTuple):
    """What is known of a fault.

    Attributes:
        cause: What it is, or None.
        breakdown: Where in its tensor the difference is, a line each.
        folders: Where the two runs kept the whole tensor; None where they did not.
    """

    cause: Cause | None
    breakdown: tuple[str, ...] = ()
    folders: tuple[str | None, str | None] = _NO_FOLDERS


@dataclass(slots=True)
class Diagnosis:
    """Diagnoses the faults of one comparison.

    Attributes:
        parameters: All parameters of both programs.
        pairs: How they correspond.
        tensors: The whole tensors that the two runs kept.
        matched: The tensors, by module, side and name, that matched in some call.
    """

    parameters: Sides[Sequence[Parameter]]
    pairs: Sequence[ParameterPair]
    tensors: Sides[StoredTensors]
    tolerance: Tolerance
    matched: set[tuple[object, ...]] = field(default_factory=set)

    def learn(self, alignment: Alignment) -> None:
        """Learn which pairs match in a forward."""
        self.matched.update(_names(pair) for pair in alignment.pairs if pair.is_right)

    def examine(self, fault: Fault, alignment: Alignment) -> Examination:
        """Return what the fault is, and where in its tensor, as far as that is known."""
        if fault.kind == "missing":
            return Examination(_missing(fault))
        if fault.port is not None and is_exchanged(fault.reference, fault.port, alignment):
            return Examination(None)  # the values are right, the modules are others
        is_known = fault.pair is not None and _names(fault.pair) in self.matched
        causes: list[Cause | None] = []
        breakdown: tuple[str, ...] = ()
        folders = _NO_FOLDERS
        with np.errstate(all="ignore"):
            for clues in self._clues(fault, alignment):
                if clues.is_comparable or fault.kind == "shape":
                    causes.append(next(filter(None, _answers(clues)), None))
                if clues.weight in (None, *fault.weights[:1]):
                    breakdown, folders = self._breakdown(clues), self._folders(clues)
        cause = next(filter(None, causes), None)
        if cause is not None and cause.kind in _OF_A_PAIR and not is_known:
            cause = replace(cause, certain=False)
        return Examination(cause, breakdown, folders)

    def _folders(self, clues: Clues) -> tuple[str | None, str | None]:
        """Return where the two runs kept these tensors; None where they did not."""
        reference, port = (
            None if side.elements is None or stored.folder is None else str(stored.folder.folder)
            for side, stored in zip((clues.reference, clues.port), self.tensors, strict=True)
        )
        return reference, port

    def _breakdown(self, clues: Clues) -> tuple[str, ...]:
        """Return where two tensors differ, a line each; () if neither run kept whole tensors."""
        if all(stored.folder is None for stored in self.tensors):
            return ()
        sides = Sides(clues.reference, clues.port)
        lacking = [
            f"The {program} kept no whole tensor of {side.name}: record it with this module."
            for program, side in zip(Sides._fields, sides, strict=True)
            if side.elements is None
        ]
        if lacking:
            return tuple(lacking)
        reference, port = (side.elements for side in sides)
        assert reference is not None and port is not None
        if reference.size != port.size:
            shapes = f"{list(reference.shape)} in the reference, {list(port.shape)} in the port"
            return (f"The shapes are {shapes}.",)
        names = clues.axis_names(reference.shape)
        return tuple(break_down(reference, port, names).lines())

    def _clues(self, fault: Fault, alignment: Alignment) -> Iterator[Clues]:
        """Yield the clues about the weights at fault, then about the tensors."""
        for weight in fault.weights:
            yield self._weight_clues(weight)
        if fault.pair is None or fault.weights:
            return
        makers = _roles(fault, fault.pair).map(lambda roles: roles[0].maker)
        if makers.reference is not None and makers.port is not None:
            for weight in self._unequal_weights(makers.reference, makers.port, alignment):
                yield self._weight_clues(weight)
        yield self._value_clues(fault, fault.pair, alignment)

    def _unequal_weights(
        self, call: ModuleCall, port_call: ModuleCall, alignment: Alignment
    ) -> Iterator[ParameterPair]:
        """Yield the parameters of two modules that have one name and other numbers."""
        module, port_module = call.module_path, port_call.module_path
        if any(module == folded[0] or port_module == folded[1] for folded in alignment.folded):
            return
        paired = alignment.modules.weights.get((module, port_module), ())
        yield from (weight for weight in paired if not weight.equal)
        owned = parameters_of(self.parameters.reference, module)
        port_owned = parameters_of(self.parameters.port, port_module)
        seen = {id(parameter) for weight in paired for parameter in weight.reference}
        for name, parameter in owned.items():
            other = port_owned.get(name)
            if other is None or id(parameter) in seen or other.shape != parameter.shape:
                continue
            if parameter.sketch is not None and other.sketch is not None:
                error = distance(parameter.sketch, other.sketch)
                if error > self.tolerance.of_parameters((parameter, other)):
                    yield ParameterPair((parameter,), (other,), "name", error, False)

    def _weight_clues(self, weight: ParameterPair) -> Clues:
        if weight.is_fused:
            earlier = list(_parts_in_place(max(weight.reference, weight.port, key=len)))
        else:
            earlier = [
                measured_parameter(parameter, self.tensors.reference)
                for parameter in self.parameters.reference
                if parameter is not weight.reference[0]
            ]
        return Clues(
            _measured_parts(weight.reference, self.tensors.reference, weight.is_fused),
            _measured_parts(weight.port, self.tensors.port, weight.is_fused),
            self.tolerance.of_parameters((*weight.reference, *weight.port)) * _OF_ONE_ROUNDING,
            earlier,
            weight=weight,
            tensors=self.tensors,
            parameters=self.parameters,
            pairs=self.pairs,
        )

    def _value_clues(self, fault: Fault, pair: TensorPair, alignment: Alignment) -> Clues:
        roles, port_roles = _roles(fault, pair)
        role, port_role = roles[0], port_roles[0]
        values = {other.value for other in roles}
        right = [
            (value.birth.time, measured_role(value.birth, self.tensors.reference))
            for value in alignment.reference.values
            if value not in values
            and not value.is_integer
            and _have_equal_sketches(value, role.value)
        ]
        return Clues(
            _measured_roles(roles, self.tensors.reference, port_role.value.numel),
            _measured_roles(port_roles, self.tensors.port, role.value.numel),
            pair.relation.limit,
            earlier=[measured for time, measured in right if time < role.time],
            right=[measured for _, measured in right],
            roles=roles,
            port_roles=port_roles,
            alignment=alignment,
            tensors=self.tensors,
            parameters=self.parameters,
            pairs=self.pairs,
        )


def _answers(clues: Clues) -> Iterator[Cause | None]:
    """Yield what each hypothesis says."""
    table = VALUES if clues.weight is None else WEIGHTS
    for hypothesis in table if clues.is_comparable else SHAPES:
        yield _test(hypothesis, clues)


def _test(hypothesis: Hypothesis, clues: Clues) -> Cause | None:
    """Return what a hypothesis says; odd tensors that it cannot handle leave the cause unknown."""
    try:
        return hypothesis(clues)
    except (ValueError, TypeError, ArithmeticError, MemoryError, np.linalg.LinAlgError):
        return None


def _roles(fault: Fault, pair: TensorPair) -> Sides[list[Role]]:
    """Return the rows that differ: where their values were made, as the finding says."""
    if not pair.is_single:
        return Sides(pair.reference, pair.port)
    made = [
        given[0] if location is None or location.role is None else location.role
        for location, given in ((fault.reference, pair.reference), (fault.port, pair.port))
    ]
    return Sides([made[0]], [made[1]])


def _names(pair: TensorPair) -> tuple[object, ...]:
    """Return what identifies a pair in all calls."""
    return tuple(
        (*role.call.module_path, role.side, role.tensor) for role in (*pair.reference, *pair.port)
    )


def _missing(fault: Fault) -> Cause | None:
    idle, side = fault.port, "port"
    if idle is None or idle.call is not None:
        idle, side = fault.reference, "reference"
    if idle is None:
        return None
    # its work may be done without a call of it
    return Cause("not_called", False, f"the {side} leaves out {idle.module[1] or idle.module[0]}")


def _have_equal_sketches(value: TensorValue, other: TensorValue) -> bool:
    """Return whether two sketches have the same length; those of tokens depend on the shape."""
    if value.sketch is None or other.sketch is None:
        return True
    return len(value.sketch) == len(other.sketch)


def _measured_roles(roles: Sequence[Role], tensors: StoredTensors, other_numel: int) -> Measured:
    """Return a tensor; several are its terms if each has its size, else its channels in parts."""
    if len(roles) == 1:
        return measured_role(roles[0], tensors)
    numels = [role.value.numel for role in roles]
    are_terms = numels[0] == other_numel

    def load() -> Array | None:
        arrays = [array for role in roles if (array := tensors.of_role(role)) is not None]
        if len(arrays) < len(roles):
            return None
        return np.sum(arrays, axis=0) if are_terms else np.concatenate(arrays, axis=-1)

    return Measured(
        " and ".join(map(describe_role, roles)),
        {},
        numels[0] if are_terms else sum(numels),
        (),
        summed_sketch(roles) if are_terms else None,
        load,
    )


def _measured_parts(
    parameters: Sequence[Parameter], tensors: StoredTensors, by_rows: bool
) -> Measured:
    """Return a parameter; several are the parts of a fused one, row after row.

    Args:
        by_rows: Whether to use its row sketch, which adds up from those of the parts.
    """
    if not by_rows:
        return measured_parameter(parameters[0], tensors)

    def load() -> Array | None:
        arrays = [tensors.of_parameter(parameter) for parameter in parameters]
        if any(array is None for array in arrays):
            return None
        return np.concatenate(arrays)  # type: ignore[arg-type]

    names = " and ".join(parameter.full_name for parameter in parameters)
    numel = sum(parameter.numel for parameter in parameters)
    row = parameters[0].row if len(parameters) == 1 else {}
    return Measured(names, row, numel, (), stacked_row_sketch(parameters), load)


def _parts_in_place(parts: Sequence[Parameter]) -> Iterator[Measured]:
    """Yield each part of a fused parameter alone, with zeros in the rows of the others."""
    numel = sum(part.numel for part in parts)
    for index, part in enumerate(parts):
        before = stacked_row_sketch(parts[:index])
        through = stacked_row_sketch(parts[: index + 1])
        if before is not None and through is not None:
            yield Measured(part.full_name, part.row, numel, (), through - before)
