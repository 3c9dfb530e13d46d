"""Pair the inputs, or the outputs, of two calls: by value first, then by name, size and number."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from otel_torch.parity.call_graph import ModuleCall, Role
from otel_torch.parity.rules import sum_errors
from otel_torch.parity.sides import Sides
from otel_torch.parity.tensor_pair import Basis, TensorPair
from otel_torch.parity.values import Comparer, Relation

# of a call with more inputs or outputs than that, only those with the same name are paired
MOST_SEARCHED_ROLES = 128


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
    terms = _terms(pairing.comparer, pairing.all.port)
    for role in pairing.all.reference:
        matches = [
            m
            for m in pairing.port
            if m not in terms and pairing.comparer.is_equal(role.value, m.value)
        ]
        if matches:
            best = max(matches, key=lambda m: (_have_same_name(role, m), m.tensor == role.tensor))
            pairing.take(role, best)


def _terms(comparer: Comparer, roles: Sequence[Role]) -> set[Role]:
    """Return the inputs of modules that add up two of them, and return the sum: each module reads
    the sum alone.
    """
    inputs: dict[ModuleCall, list[Role]] = defaultdict(list)
    for role in roles:
        if role.side == "input" and not role.call.children:
            inputs[role.call].append(role)
    return {
        part
        for call, own in inputs.items()
        for _, parts, _ in _equal_sums(comparer, call.outputs, own)
        for part in parts
    }


def _pair_sums(pairing: _RolePairing) -> None:
    """Pair a tensor with the two tensors that add up to it: a residual not yet added."""
    comparer = pairing.comparer
    for whole in list(pairing.reference):
        for _, parts, relation in _equal_sums(comparer, [whole], pairing.port):
            pairing.take_several([whole], list(parts), relation)
            break
    for whole in list(pairing.port):
        for _, parts, relation in _equal_sums(comparer, [whole], pairing.reference):
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
    """Pair the only computed tensors of two owners, or outputs of leaves, whatever their shapes.

    Merged tensors have the same tokens, so that an input of another width is another argument.
    """
    reference, port = computed_roles(pairing.reference), computed_roles(pairing.port)
    if len(reference) != 1 or len(port) != 1:
        return
    roles = reference[0], port[0]
    if all(role.side == "input" and "tokens" in role.row for role in roles):
        return
    are_leaves = all(role.side == "output" and not role.call.children for role in roles)
    if pairing.basis == "owner" or (pairing.basis == "outermost" and are_leaves):
        pairing.take(*roles)


def _pair_repeated(pairing: _RolePairing) -> None:
    """Pair a tensor with one that repeats it: a table expanded by one program only."""
    for role in list(pairing.reference):
        matches = [m for m in pairing.port if pairing.relation(role, m).state == "repeated"]
        if matches and not role.value.is_constant:
            pairing.take(role, matches[0])


_PASSES: tuple[Callable[[_RolePairing], None], ...] = (
    _pair_equal_values,
    _pair_sums,
    _pair_wrong_sums,
    _pair_same_names,
    _pair_same_sizes,
    _pair_indices_of_other_size,
    _pair_only_roles,
    _pair_only_computed,
    _pair_repeated,
)


def has_equal_sum(comparer: Comparer, reference: Sequence[Role], port: Sequence[Role]) -> bool:
    """Return whether two tensors of one side add up to one of the other side."""
    if max(len(reference), len(port)) > MOST_SEARCHED_ROLES:
        return False
    sums = itertools.chain(
        _equal_sums(comparer, reference, port), _equal_sums(comparer, port, reference)
    )
    return next(sums, None) is not None


def _equal_sums(
    comparer: Comparer, wholes: Sequence[Role], others: Sequence[Role]
) -> Iterator[tuple[Role, tuple[Role, Role], Relation]]:
    """Yield each tensor with the two others that add up to it."""
    for whole in wholes:
        for parts in itertools.combinations(others, 2):
            relation = _matching_sum(comparer, whole, parts)
            if relation is not None:
                yield whole, parts, relation


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
    sketches = [role.value.sketch for role in (whole, *parts) if role.value.sketch is not None]
    if len(sketches) <= len(parts) or len(set(map(len, sketches))) != 1:
        return Relation("different", None, limit)
    error = float(sum_errors(sketches[0][None], np.stack(sketches[1:])[:, None])[0])
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


def computed_roles(roles: Sequence[Role]) -> list[Role]:
    """Return the roles whose values are neither constant nor integers."""
    return [role for role in roles if not role.value.is_constant and not role.value.is_integer]
