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

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from otel_torch.parity.call_graph import ModuleCall, Program, Role, TensorValue
from otel_torch.parity.modules import ModulePairs, ModulePath
from otel_torch.parity.parameters import pattern
from otel_torch.parity.rules import ORDER_BLIND, Floats, fused_errors, sum_errors
from otel_torch.parity.sides import Sides
from otel_torch.parity.values import Comparer, Relation

# how far beyond the error of its parts under noise the error of a fused tensor is still chance
FUSED_FACTOR = 2.0

# why two tensors should be equal, the surest first
Basis = Literal["owner", "fused", "container", "outermost", "alike"]

# of a call with more inputs or outputs than that, only those with the same name are paired
MOST_SEARCHED_ROLES = 128


@dataclass(slots=True, eq=False)
class TensorPair:
    """Two tensors that should be equal.

    One side may have several: their sum, or their concatenation, equals the other side's tensor.
    """

    reference: list[Role]
    port: list[Role]
    basis: Basis
    relation: Relation

    @property
    def is_right(self) -> bool:
        """Whether they are equal."""
        return self.relation.is_right

    @property
    def is_output(self) -> bool:
        """Whether the reference's tensor is an output of a module."""
        return self.reference[0].side == "output"

    @property
    def is_single(self) -> bool:
        """Whether it is one tensor on each side."""
        return len(self.reference) == len(self.port) == 1

    @property
    def time(self) -> int:
        """When the reference reaches it."""
        return min(role.time for role in self.reference)


@dataclass(slots=True)
class Alignment:
    """Two programs with their calls and tensors paired.

    Attributes:
        calls: The reference's call -> the port's.
        partner: Likewise, in both directions.
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


def align(reference: Program, port: Program, modules: ModulePairs, comparer: Comparer) -> Alignment:
    """Pair the calls and tensors of two forwards."""
    alignment = Alignment(reference, port, modules, comparer)
    _pair_outermost_calls(alignment)
    _pair_calls_of_paired_modules(alignment)
    _pair_tensors_of_paired_calls(alignment)
    _pair_fused_modules(alignment)
    _pair_modules_alike(alignment)
    _pair_modules_with_equal_inputs(alignment)
    _pair_only_modules_of_a_class(alignment)
    _pair_inputs_of_namesakes(alignment)
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
    alignment: Alignment, reference: Sequence[ModuleCall], port: Sequence[ModuleCall]
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
    """Return whether an input of one call is an input of the other."""
    return any(
        comparer.is_equal(first.value, second.value)
        for first in reference.inputs
        for second in port.inputs
        if not first.value.is_constant
    )


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


# -- the inputs or outputs of two calls
# --------------------------------------------------------------------------------------------------


def pair_roles(
    comparer: Comparer, reference: Sequence[Role], port: Sequence[Role], basis: Basis
) -> list[TensorPair]:
    """Pair the inputs, or the outputs, of two calls by the passes in `_PASSES`, the surest first.

    Args:
        basis: Why the calls correspond.

    >>> from otel_torch.parity.call_graph import build_program
    >>> from otel_torch.parity.tolerance import Tolerance
    >>> def inputs(**sums):
    ...     rows = [
    ...         {"module": "attn", "tensor": f"in.{name}", "step": 0, "order": [1, 2]}
    ...         | {"shape": [4], "sum": total, "abs_mean": 1.0}
    ...         for name, total in sums.items()
    ...     ]
    ...     return build_program(rows).calls[0].inputs
    >>> reference, port = inputs(query=3.0, bias=1.0), inputs(x=3.0, bias=1.5)
    >>> for pair in pair_roles(Comparer(Tolerance()), reference, port, "owner"):
    ...     print(pair.reference[0].tensor, pair.port[0].tensor, pair.relation.state)
    in.query in.x equal
    in.bias in.bias different
    """
    pairing = _RolePairing(comparer, basis, tuple(reference), tuple(port))
    is_crowded = max(len(reference), len(port)) > MOST_SEARCHED_ROLES
    for pair_by in (_pair_names_in_order,) if is_crowded else _PASSES:
        pair_by(pairing)
    return pairing.pairs


class _RolePairing:
    """The roles of two calls, the pairs so far and the roles that have none."""

    def __init__(
        self,
        comparer: Comparer,
        basis: Basis,
        reference: tuple[Role, ...],
        port: tuple[Role, ...],
    ) -> None:
        self.comparer = comparer
        self.basis = basis
        self.all = Sides(reference, port)
        self.reference, self.port = list(reference), list(port)
        self.pairs: list[TensorPair] = []

    def relation(self, reference: Role, port: Role) -> Relation:
        return self.comparer.relation(reference.value, port.value)

    def take(self, reference: Role, port: Role) -> None:
        self.take_several([reference], [port], self.relation(reference, port))

    def take_several(self, reference: list[Role], port: list[Role], relation: Relation) -> None:
        self.pairs.append(TensorPair(reference, port, self.basis, relation))
        for role in reference:
            self.reference.remove(role)
        for role in port:
            self.port.remove(role)


def _pair_names_in_order(pairing: _RolePairing) -> None:
    """Pair the tensors of each name in order, for calls with too many to compare each with all."""
    waiting: dict[str, deque[Role]] = defaultdict(deque)
    for role in pairing.all.port:
        waiting[role.tensor].append(role)
    for role in pairing.all.reference:
        if waiting[role.tensor]:
            match = waiting[role.tensor].popleft()
            relation = pairing.relation(role, match)
            pairing.pairs.append(TensorPair([role], [match], pairing.basis, relation))


def _pair_equal_values(pairing: _RolePairing) -> None:
    """Pair equal tensors; if several are equal, those with the same name."""
    for role in pairing.all.reference:
        matches = [m for m in pairing.port if pairing.comparer.is_equal(role.value, m.value)]
        if matches:
            best = max(matches, key=lambda m: (_have_same_name(role, m), m.tensor == role.tensor))
            pairing.take(role, best)


def _undo_exchanges(pairing: _RolePairing) -> None:
    """Pair equal tensors by name if two names are exchanged: q passed as k, and k as q.

    Both are faults, though each tensor has an equal one on the other side.
    """
    pairs, comparer = pairing.pairs, pairing.comparer
    for first, second in itertools.permutations(list(pairs), 2):
        if first not in pairs or second not in pairs:
            continue
        a, b, c, d = first.reference[0], first.port[0], second.reference[0], second.port[0]
        are_exchanged = _have_same_name(a, d) and _have_same_name(c, b)
        if not are_exchanged or comparer.is_equal(a.value, d.value) or _have_same_name(a, b):
            continue
        pairs.remove(first)
        pairs.remove(second)
        pairs.append(TensorPair([a], [d], pairing.basis, pairing.relation(a, d)))
        pairs.append(TensorPair([c], [b], pairing.basis, pairing.relation(c, b)))


def _pair_sums(pairing: _RolePairing) -> None:
    """Pair a tensor with the two tensors that add up to it: a residual not yet added."""
    comparer = pairing.comparer
    for whole in list(pairing.reference):
        for parts in itertools.combinations(pairing.port, 2):
            relation = _matching_sum(comparer, whole, parts)
            if relation is not None:
                pairing.take_several([whole], list(parts), relation)
                break
    for whole in list(pairing.port):
        for parts in itertools.combinations(pairing.reference, 2):
            relation = _matching_sum(comparer, whole, parts)
            if relation is not None:
                pairing.take_several(list(parts), [whole], relation)
                break


def _pair_wrong_sums(pairing: _RolePairing) -> None:
    """Pair an input with the only two of its size, though they do not add up to it.

    The port's module adds the residual itself, to a wrong input.
    """
    if pairing.basis != "owner":
        return
    for role in list(pairing.reference):
        parts = [m for m in pairing.port if _have_same_size(role, m)]
        if role.side != "input" or len(parts) != 2:
            continue
        if sum(_have_same_size(rival, parts[0]) for rival in pairing.reference) == 1:
            pairing.take_several([role], parts, _sum_relation(pairing.comparer, role, parts))


def _pair_same_names(pairing: _RolePairing) -> None:
    for role in list(pairing.reference):
        matches = [
            m
            for m in pairing.port
            if _have_same_name(role, m)
            and (_have_same_size(role, m) or _are_meaningful_scalars(role, m))
        ]
        if len(matches) == 1:
            pairing.take(role, matches[0])


def _pair_same_sizes(pairing: _RolePairing) -> None:
    """Pair tensors of one size in order, if both sides have equally many.

    Two containers may receive different inputs; the output of a module is always its output.
    """
    for role in list(pairing.reference):
        matches = [m for m in pairing.port if _have_same_size(role, m)]
        rivals = [rival for rival in pairing.reference if _have_same_size(role, rival)]
        is_result = role.side == "output" and pairing.basis != "container"
        if matches and (len(matches) == len(rivals) or is_result):
            pairing.take(role, matches[min(rivals.index(role), len(matches) - 1)])


def _pair_indices_of_other_size(pairing: _RolePairing) -> None:
    """Pair integer inputs of one name whose sizes differ: wrong indices."""
    if pairing.basis not in ("owner", "outermost"):
        return
    for role in list(pairing.reference):
        matches = [
            m
            for m in pairing.port
            if role.value.is_integer and m.value.is_integer and _have_same_name(role, m)
        ]
        if role.side != "input" or len(matches) != 1:
            continue
        if role.value.numel != matches[0].value.numel:
            pairing.take(role, matches[0])


def _pair_only_roles(pairing: _RolePairing) -> None:
    """Pair the only tensors of two owners if just one of them is constant."""
    reference, port = pairing.all
    if pairing.basis != "owner" or not (len(reference) == len(port) == 1):
        return
    if not pairing.reference or not pairing.port:
        return
    if reference[0].value.is_constant != port[0].value.is_constant:
        pairing.take(reference[0], port[0])


def _pair_only_computed(pairing: _RolePairing) -> None:
    """Pair the only computed tensors of two owners, whatever their shapes."""
    reference, port = computed_roles(pairing.reference), computed_roles(pairing.port)
    if pairing.basis == "owner" and len(reference) == len(port) == 1:
        pairing.take(reference[0], port[0])


def _pair_repeated(pairing: _RolePairing) -> None:
    """Pair a tensor with one that repeats it: a table expanded by one program only."""
    for role in list(pairing.reference):
        matches = [m for m in pairing.port if pairing.relation(role, m).state == "repeated"]
        if matches and not role.value.is_constant:
            pairing.take(role, matches[0])


_PASSES: tuple[Callable[[_RolePairing], None], ...] = (
    _pair_equal_values,
    _undo_exchanges,
    _pair_sums,
    _pair_wrong_sums,
    _pair_same_names,
    _pair_same_sizes,
    _pair_indices_of_other_size,
    _pair_only_roles,
    _pair_only_computed,
    _pair_repeated,
)


def _matching_sum(comparer: Comparer, whole: Role, parts: tuple[Role, Role]) -> Relation | None:
    """Return how a tensor compares with the sum of two, None unless they are equal."""
    values = [role.value for role in (whole, *parts)]
    if len({value.numel for value in values}) > 1:
        return None
    if any(value.sketch is None or value.is_constant for value in values):
        return None
    relation = _sum_relation(comparer, whole, parts)
    return relation if relation.is_right else None


def _sum_relation(comparer: Comparer, whole: Role, parts: Sequence[Role]) -> Relation:
    limit = 2 * comparer.limit(whole.value, parts[0].value)
    sketches = [role.value.sketch for role in parts if role.value.sketch is not None]
    if whole.value.sketch is None or len(sketches) < len(parts):
        return Relation("different", None, limit)
    error = float(sum_errors(whole.value.sketch[None], np.stack(sketches)[:, None])[0])
    return Relation("equal" if error <= limit else "different", error, limit)


def _have_same_size(role: Role, match: Role) -> bool:
    """Return whether two tensors have as many elements and neither is constant."""
    if role.value.is_constant or match.value.is_constant:
        return False
    return role.value.numel == match.value.numel


def _are_meaningful_scalars(role: Role, match: Role) -> bool:
    """Return whether two constants are numbers of the program, such as a timestep, and no masks."""
    if role.value.numel != match.value.numel:
        return False
    return _is_meaningful_scalar(role) and _is_meaningful_scalar(match)


def _is_meaningful_scalar(role: Role) -> bool:
    number = role.row.get("min")
    if not role.value.is_constant or not isinstance(number, int | float):
        return False
    return abs(number) not in (0, 1) and abs(number) < 1e9


def _have_same_name(role: Role, match: Role) -> bool:
    """Return whether both programs use the same argument name or output key."""
    name = _argument_name(role)
    return bool(name) and name == _argument_name(match)


def _argument_name(role: Role) -> str:
    return role.argument or role.tensor.partition(".")[2]


# -- fused modules
# --------------------------------------------------------------------------------------------------


def _pair_fused_modules(alignment: Alignment) -> None:
    """Pair a fused module with its parts: they share the input, and their outputs make its own."""
    reference, port = _by_module(alignment.reference.calls), _by_module(alignment.port.calls)
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


def _pair_modules_alike(alignment: Alignment) -> None:
    """Pair calls of one name in paired containers; their outputs only if all inputs are equal."""
    ports = _unpaired_by_container(alignment, alignment.port)
    for key, calls in _unpaired_by_container(alignment, alignment.reference).items():
        for reference, port in _pair_in_order(alignment, calls, ports.get(key, [])):
            _pair_calls(alignment, reference, port)
            if reference.module_path in alignment.modules.matched:
                continue
            inputs = pair_roles(alignment.comparer, reference.inputs, port.inputs, "alike")
            alignment.pairs += inputs
            are_all_paired = len(inputs) == len(reference.inputs) == len(port.inputs)
            if inputs and are_all_paired and _are_equal(inputs):
                alignment.pairs += pair_roles(
                    alignment.comparer, reference.outputs, port.outputs, "alike"
                )


def _unpaired_by_container(
    alignment: Alignment, program: Program
) -> dict[tuple[ModuleCall, str], list[ModuleCall]]:
    """Group unpaired calls by (the port's call of the innermost paired container, short name)."""
    groups: dict[tuple[ModuleCall, str], list[ModuleCall]] = defaultdict(list)
    for call in _pairable_calls(alignment, program):
        if call not in alignment.partner:
            container = _paired_container(alignment, call)
            if container is not None:
                groups[_port_call(alignment, container), _short_name(call)].append(call)
    return groups


def _port_call(alignment: Alignment, call: ModuleCall) -> ModuleCall:
    """Return the port's call of a pair of calls, of which one is given."""
    return alignment.calls.get(call, call)


def _pair_inputs_of_namesakes(alignment: Alignment) -> None:
    """Pair the computed inputs of modules of one name in paired containers.

    One of them may have parameters and the other none.
    """
    ports = _with_inputs_by_container(alignment, alignment.port)
    partner = alignment.partner
    for key, calls in _with_inputs_by_container(alignment, alignment.reference).items():
        matches = ports.get(key, [])
        if len(calls) != len(matches):
            continue
        for reference, port in zip(calls, matches, strict=True):
            if reference in partner and port in partner:
                continue
            alignment.pairs += pair_roles(
                alignment.comparer,
                computed_roles(reference.inputs),
                computed_roles(port.inputs),
                "alike",
            )


def _with_inputs_by_container(
    alignment: Alignment, program: Program
) -> dict[tuple[ModuleCall, str], list[ModuleCall]]:
    groups: dict[tuple[ModuleCall, str], list[ModuleCall]] = defaultdict(list)
    for call in _pairable_calls(alignment, program):
        container = _paired_container(alignment, call)
        if container is not None and call.inputs:
            groups[_port_call(alignment, container), _short_name(call)].append(call)
    return groups


def _pair_modules_with_equal_inputs(alignment: Alignment) -> None:
    """Pair leaf modules without parameters that compute from equal inputs, whatever their names."""
    ports = [
        call
        for call in _pairable_calls(alignment, alignment.port)
        if _is_unpaired_leaf(alignment, call)
    ]
    references = [
        call
        for call in _pairable_calls(alignment, alignment.reference)
        if _is_unpaired_leaf(alignment, call)
    ]
    for reference in references:
        inputs = computed_roles(reference.inputs)
        candidates = [
            port
            for port in ports
            if port not in alignment.partner
            and len(inputs) == len(computed_roles(port.inputs))
            and _are_in_paired_calls(alignment, reference, port)
        ]
        for port in candidates:
            outputs = _outputs_of_equal_inputs(alignment, reference, port)
            if outputs:
                _pair_calls(alignment, reference, port)
                alignment.pairs += outputs
                break


def _pair_only_modules_of_a_class(alignment: Alignment) -> None:
    """Pair the inputs of unpaired leaf modules, the only ones of their class in paired containers.

    Their inputs differ, so they are wrong: an activation of one program has another name there.
    """
    ports = _unpaired_leaves_by_class(alignment, alignment.port)
    for key, calls in _unpaired_leaves_by_class(alignment, alignment.reference).items():
        if len(calls) == len(ports.get(key, [])) == 1:
            reference, port = calls[0], ports[key][0]
            inputs = pair_roles(alignment.comparer, reference.inputs, port.inputs, "alike")
            if inputs:
                _pair_calls(alignment, reference, port)
                alignment.pairs += inputs


def _unpaired_leaves_by_class(
    alignment: Alignment, program: Program
) -> dict[tuple[ModuleCall, str], list[ModuleCall]]:
    """Group unpaired leaf calls by (the port's call of the innermost paired container, class)."""
    groups: dict[tuple[ModuleCall, str], list[ModuleCall]] = defaultdict(list)
    for call in _pairable_calls(alignment, program):
        container = _paired_container(alignment, call)
        if container is not None and _is_unpaired_leaf(alignment, call):
            groups[_port_call(alignment, container), call.cls].append(call)
    return groups


def _outputs_of_equal_inputs(
    alignment: Alignment, reference: ModuleCall, port: ModuleCall
) -> list[TensorPair]:
    """Return the pairs of outputs of two calls, [] unless all their computed inputs are equal."""
    inputs = computed_roles(reference.inputs)
    pairs = pair_roles(alignment.comparer, inputs, computed_roles(port.inputs), "alike")
    if len(pairs) != len(inputs) or not _are_equal(pairs):
        return []
    outputs = Sides(reference, port).map(lambda call: computed_roles(call.outputs))
    return pair_roles(alignment.comparer, *outputs, "alike")


def _are_equal(pairs: Iterable[TensorPair]) -> bool:
    return all(pair.relation.state == "equal" for pair in pairs)


def _pairable_calls(alignment: Alignment, program: Program) -> list[ModuleCall]:
    """Return the calls of a program without those that the user's map keeps unpaired."""
    unpaired = alignment.modules.unpaired[0 if program is alignment.reference else 1]
    return [call for call in program.calls if call.module_path not in unpaired]


def _is_unpaired_leaf(alignment: Alignment, call: ModuleCall) -> bool:
    """Return whether a call is an unpaired leaf that computes one tensor, and no identity."""
    if call in alignment.partner or call.children:
        return False
    if any(word in call.cls.lower() for word in ("identity", "dropout", "droppath")):
        return False
    return bool(computed_roles(call.inputs)) and len(computed_roles(call.outputs)) == 1


def computed_roles(roles: Sequence[Role]) -> list[Role]:
    """Return the roles whose values are neither constant nor integers."""
    return [role for role in roles if not role.value.is_constant and not role.value.is_integer]


def _are_in_paired_calls(alignment: Alignment, reference: ModuleCall, port: ModuleCall) -> bool:
    """Return whether two calls are made in a pair of calls.

    For modules of different classes, that pair must be a part of the model, not the whole.
    """
    enclosing = set(enclosing_calls(port))
    pairs = (c for c in enclosing_calls(reference) if alignment.partner.get(c) in enclosing)
    innermost = next(pairs, None)
    if innermost is None:
        return False
    return innermost.parent is not None or reference.cls == port.cls


def enclosing_calls(call: ModuleCall) -> Iterator[ModuleCall]:
    """Yield the calls around a call, the innermost first."""
    parent = call.parent
    while parent is not None:
        yield parent
        parent = parent.parent


def _paired_container(alignment: Alignment, call: ModuleCall) -> ModuleCall | None:
    return paired_container(alignment.partner, call)


def paired_container(partner: dict[ModuleCall, ModuleCall], call: ModuleCall) -> ModuleCall | None:
    """Return the innermost enclosing call that has a partner, or None."""
    return next((outer for outer in enclosing_calls(call) if outer in partner), None)


def _short_name(call: ModuleCall) -> str:
    """Return the last component of a module's name, with its parent's if it is an index."""
    parts = pattern(call.module).split(".")
    return parts[-1] if parts[-1] != "*" else ".".join(parts[-2:])
