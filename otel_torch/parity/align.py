"""Decide which tensors of two programs should be equal: pair their calls, then the calls' tensors.

Two ports of one model name their modules differently and cut them at other places. Modules that own
the same parameters surely correspond. Their containers, and modules of the same name next to them,
follow from these.

For example, with `blocks.0.norm` paired with `layers.0.ln` by its weight, and the reference's
rotation `blocks.0.rope` without parameters:

    reference                         port                     basis
    blocks.0.norm  in[0], out         layers.0.ln  x, out      owner: equal weights
    blocks.0       in[0], out         layers.0     x, out      container of the paired modules
    blocks.0.rope  in[0], out         layers.0.rope in[0], out alike: same name in paired containers
    (root)         out                (root)       out         outermost
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from otel_torch.parity.call_graph import ModuleCall, Program, Role, TensorValue
from otel_torch.parity.modules import ModulePairs, ModulePath
from otel_torch.parity.pair_roles import computed_roles, has_equal_sum, pair_roles
from otel_torch.parity.parameter_names import pattern
from otel_torch.parity.parameters import ParameterPair
from otel_torch.parity.rules import ORDER_BLIND, Floats, fused_errors
from otel_torch.parity.sides import Sides
from otel_torch.parity.tensor_pair import Basis, TensorPair
from otel_torch.parity.values import Comparer, Relation

# how far beyond the error of its parts under noise the error of a fused tensor is still chance
FUSED_FACTOR = 2.0


@dataclass(slots=True)
class Alignment:
    """Two programs with their calls and tensors paired.

    Attributes:
        calls: The reference's call -> the port's.
        partner: Likewise, in both directions.
        folded: Pairs of modules of which one has others folded into it (see `folds`).
        uncalled: Calls without a partner, of paired modules.
        pairs: In the reference's order.
    """

    reference: Program
    port: Program
    modules: ModulePairs
    comparer: Comparer
    calls: dict[ModuleCall, ModuleCall] = field(default_factory=dict)
    uncalled: Sides[list[ModuleCall]] = field(
        default_factory=lambda: Sides[list[ModuleCall]]([], [])
    )
    pairs: list[TensorPair] = field(default_factory=list)
    partner: dict[ModuleCall, ModuleCall] = field(default_factory=dict)
    folded: set[tuple[ModulePath, ModulePath]] = field(default_factory=set)

    def unequal_weights(self, reference: ModuleCall, port: ModuleCall) -> list[ParameterPair]:
        """Return the parameters of two paired modules that should be equal and are not known to."""
        modules = reference.module_path, port.module_path
        if modules in self.folded:
            return []
        return [weight for weight in self.modules.weights.get(modules, ()) if not weight.equal]

    def is_extra(self, birth: Role) -> bool:
        """Return whether a module returns a value besides what the other program's module does: a
        fused norm returns the residual, too.
        """
        partner = self.partner.get(birth.call)
        if partner is None or birth.side == "input":
            return False
        return birth is not birth.call.outputs[0] and len(birth.call.outputs) > len(partner.outputs)

    def further_calls(self) -> set[ModuleCall]:
        """Return the calls that one side makes more of than the other one, of the same module."""
        called = {call.module_path for call in self.partner}
        uncalled = (*self.uncalled.reference, *self.uncalled.port)
        return {call for call in uncalled if call.module_path in called}


def align(reference: Program, port: Program, modules: ModulePairs, comparer: Comparer) -> Alignment:
    """Pair the calls and tensors of two forwards."""
    alignment = Alignment(reference, port, modules, comparer)
    _pair_outermost_calls(alignment)
    _pair_calls_of_paired_modules(alignment)
    _pair_tensors_of_paired_calls(alignment)
    _pair_fused_modules(alignment)
    for name_of in (_short_name, _class_of_leaf):
        _pair_namesakes(alignment, name_of)
    alignment.pairs.sort(key=lambda pair: pair.time)
    return alignment


# -- calls
# --------------------------------------------------------------------------------------------------


def _pair_outermost_calls(alignment: Alignment) -> None:
    """Pair the outermost calls of modules that are not paired, whatever their names."""
    matched = alignment.modules.matched
    reference = _unmatched_outermost(alignment.reference, set(matched))
    port = _unmatched_outermost(alignment.port, set(matched.values()))
    for call, match in _pair_in_order(alignment, reference, port):
        _pair_calls(alignment, call, match)


def _unmatched_outermost(program: Program, matched: set[ModulePath]) -> list[ModuleCall]:
    return [
        call
        for call in program.outermost
        if call.module_path not in matched and (not call.module or call.number is not None)
    ]


def _pair_calls(alignment: Alignment, reference: ModuleCall, port: ModuleCall) -> None:
    if reference not in alignment.partner and port not in alignment.partner:
        alignment.calls[reference] = port
        alignment.partner[reference], alignment.partner[port] = port, reference


def _pair_calls_of_paired_modules(alignment: Alignment) -> None:
    calls = Sides(alignment.reference, alignment.port).map(lambda side: _by_module(side.calls))
    partner = alignment.partner
    for module, match in alignment.modules.matched.items():
        reference = [call for call in calls.reference.get(module, []) if call not in partner]
        port = [call for call in calls.port.get(match, []) if call not in partner]
        for first, second in _pair_in_order(alignment, reference, port):
            _pair_calls(alignment, first, second)
        alignment.uncalled.reference.extend(call for call in reference if call not in partner)
        alignment.uncalled.port.extend(call for call in port if call not in partner)


def _by_module(calls: Iterable[ModuleCall]) -> dict[ModulePath, list[ModuleCall]]:
    groups: dict[ModulePath, list[ModuleCall]] = defaultdict(list)
    for call in calls:
        groups[call.module_path].append(call)
    return groups


def _pair_in_order(
    alignment: Alignment,
    reference: Sequence[ModuleCall],
    port: Sequence[ModuleCall],
) -> list[tuple[ModuleCall, ModuleCall]]:
    """Pair calls of one module in order; if one side has more, first those with equal inputs."""
    if len(reference) == len(port):
        return list(zip(reference, port, strict=True))
    pairs: list[tuple[ModuleCall, ModuleCall]] = []
    remaining = list(port)
    unmatched = []
    for call in reference:
        match = next((c for c in remaining if _share_input(alignment.comparer, call, c)), None)
        if match is None:
            unmatched.append(call)
        else:
            pairs.append((call, match))
            remaining.remove(match)
    return pairs + list(zip(unmatched, remaining, strict=False))


def _share_input(comparer: Comparer, reference: ModuleCall, port: ModuleCall) -> bool:
    """Return whether an input of one call is an input of the other, or the sum of two of them."""
    return any(
        comparer.is_equal(first.value, second.value)
        for first in reference.inputs
        for second in port.inputs
        if not first.value.is_constant
    ) or has_equal_sum(comparer, reference.inputs, port.inputs)


def _pair_tensors_of_paired_calls(alignment: Alignment) -> None:
    for reference, port in alignment.calls.items():
        basis: Basis = "owner"
        if reference.parent is None or port.parent is None:
            basis = "outermost"
        elif reference.module_path in alignment.modules.containers:
            basis = "container"
        comparer = alignment.comparer
        alignment.pairs += pair_roles(comparer, reference.inputs, port.inputs, basis)
        alignment.pairs += pair_roles(comparer, reference.outputs, port.outputs, basis)


# -- fused modules
# --------------------------------------------------------------------------------------------------


def _pair_fused_modules(alignment: Alignment) -> None:
    """Pair a fused module with its parts: they share the input, and their outputs make its own."""
    reference, port = Sides(alignment.reference, alignment.port).map(
        lambda side: _by_module(side.calls)
    )
    for whole, parts in alignment.modules.parts.items():
        part_calls = [reference.get(part, []) for part in parts]
        _pair_fused(alignment, part_calls, port.get(whole, []), whole_is_reference=False)
    for whole, parts in alignment.modules.wholes.items():
        part_calls = [port.get(part, []) for part in parts]
        _pair_fused(alignment, part_calls, reference.get(whole, []), whole_is_reference=True)


def _pair_fused(
    alignment: Alignment,
    part_calls: list[list[ModuleCall]],
    whole_calls: list[ModuleCall],
    whole_is_reference: bool,
) -> None:
    if not part_calls or any(len(calls) != len(whole_calls) for calls in part_calls):
        return
    comparer = alignment.comparer
    for index, whole in enumerate(whole_calls):
        calls = [part[index] for part in part_calls]
        for call in calls:
            reference, port = (whole, call) if whole_is_reference else (call, whole)
            alignment.pairs += pair_roles(comparer, reference.inputs, port.inputs, "fused")
        parts = [call.outputs[0] for call in calls if call.outputs]
        if len(parts) < len(calls) or not whole.outputs:
            continue
        output = whole.outputs[0]
        relation = _fused_relation(comparer, parts, output, whole_is_reference)
        sides = ([output], parts) if whole_is_reference else (parts, [output])
        alignment.pairs.append(TensorPair(*sides, "fused", relation))


def _fused_relation(
    comparer: Comparer, parts: list[Role], whole: Role, whole_is_reference: bool
) -> Relation:
    """Compare parts with a whole by the sums that do not depend on how they are concatenated."""
    limit = _fused_limit(comparer, parts, whole, whole_is_reference)
    error = fused_errors(
        _statistics_or_zero(whole)[:, None],
        np.stack([_statistics_or_zero(part) for part in parts], axis=1)[:, :, None],
        np.array([float(whole.value.numel)]),
        np.array([[float(part.value.numel)] for part in parts]),
    )[0]
    if sum(part.value.numel for part in parts) != whole.value.numel:
        return Relation("shape", None, limit)
    return Relation("equal" if error <= limit else "different", float(error), limit)


def _fused_limit(
    comparer: Comparer, parts: list[Role], whole: Role, whole_is_reference: bool
) -> float:
    values: tuple[TensorValue, TensorValue] = parts[0].value, whole.value
    limit = comparer.limit(*(reversed(values) if whole_is_reference else values))
    factor = FUSED_FACTOR * comparer.noise_scale(parts[0].value, whole.value)
    return max(limit, *(factor * comparer.floors.get(part.value, 0.0) for part in parts))


def _statistics_or_zero(role: Role) -> Floats:
    return np.array([float(role.row.get(name) or 0.0) for name in ORDER_BLIND])


# -- modules without parameters
# --------------------------------------------------------------------------------------------------


def _pair_namesakes(alignment: Alignment, name_of: Callable[[ModuleCall], str]) -> None:
    """Pair calls of one name in paired containers; their outputs only if all inputs are equal.

    One of them may have parameters, and be paired with another call: then only inputs are.
    """
    further = alignment.further_calls()
    ports = _by_container_and_name(alignment, alignment.port, name_of, further)
    references = _by_container_and_name(alignment, alignment.reference, name_of, further)
    partner, comparer = alignment.partner, alignment.comparer
    for key, calls in references.items():
        if len(calls) != len(ports.get(key, [])):  # a name alone is weak evidence
            continue
        for reference, port in zip(calls, ports[key], strict=True):
            if reference in partner and port in partner:
                continue
            are_free = reference not in partner and port not in partner
            _pair_calls(alignment, reference, port)
            given = Sides(reference.inputs, port.inputs)
            inputs = pair_roles(
                comparer, *(given if are_free else given.map(computed_roles)), "alike"
            )
            alignment.pairs += inputs
            are_equal = all(pair.relation.state == "equal" for pair in inputs)
            are_all = len(inputs) == len(reference.inputs) == len(port.inputs)
            if inputs and are_free and are_equal and are_all:
                alignment.pairs += pair_roles(comparer, reference.outputs, port.outputs, "alike")


def _by_container_and_name(
    alignment: Alignment,
    program: Program,
    name_of: Callable[[ModuleCall], str],
    further: set[ModuleCall],
) -> dict[tuple[ModuleCall, str], list[ModuleCall]]:
    """Group calls by (the port's call of the innermost paired container, name), without those that
    the user's map keeps unpaired, or that run in a further call of a block.
    """
    unpaired = alignment.modules.unpaired[0 if program is alignment.reference else 1]
    groups: dict[tuple[ModuleCall, str], list[ModuleCall]] = defaultdict(list)
    for call in program.calls:
        container = paired_container(alignment.partner, call)
        is_repeated = bool(further) and not further.isdisjoint(enclosing_calls(call))
        if container is not None and call.module_path not in unpaired and not is_repeated:
            port = alignment.calls.get(container, container)
            groups[port, name_of(call)].append(call)
    return groups


def _class_of_leaf(call: ModuleCall) -> str:
    """Return what an activation of another name is known by; other calls by their own names."""
    return call.module if call.children else call.cls


def _short_name(call: ModuleCall) -> str:
    """Return the last component of a module's name, with its parent's if it is an index."""
    parts = pattern(call.module).split(".")
    return parts[-1] if parts[-1] != "*" else ".".join(parts[-2:])


def enclosing_calls(call: ModuleCall) -> Iterator[ModuleCall]:
    """Yield the calls around a call, the innermost first."""
    parent = call.parent
    while parent is not None:
        yield parent
        parent = parent.parent


def paired_container(partner: dict[ModuleCall, ModuleCall], call: ModuleCall) -> ModuleCall | None:
    """Return the innermost enclosing call that has a partner, or None."""
    return next((outer for outer in enclosing_calls(call) if outer in partner), None)
