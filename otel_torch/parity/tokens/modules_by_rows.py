"""Pair modules that no parameter pairs, by the rows of the tokens that both programs computed.

An inference engine packs its fused weights into a form of its own, and computes the logits in
another module than the one that owns their weight:

    reference                 port               because
    layers.0.o_proj           h.0.o_proj         one name in paired containers, equal widths
    q_proj, k_proj, v_proj    qkv_proj           in paired containers; their widths add up
    lm_head                   logits_processor   the port never calls its lm_head, or has none
                                                 (its head is tied); equal input
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field

import numpy as np

from otel_torch.parity.call_graph import enclosing_names
from otel_torch.parity.modules import ModulePairs, ModulePath, counterpart
from otel_torch.parity.sides import Sides
from otel_torch.parity.tokens.merged_tensor import MergedTensor, TensorKey

# q, k, v and a gate
_MOST_PARTS = 4
# Other modules' rows differ by their own size. This tells which modules correspond, and not whether
# they are right.
_SAME = 0.02


@dataclass(slots=True)
class _Module:
    """The floating-point inputs and outputs of a module, in its first call of a forward."""

    inputs: list[MergedTensor] = field(default_factory=list)
    outputs: list[MergedTensor] = field(default_factory=list)

    @property
    def is_function(self) -> bool:
        """Whether it has one input; of several outputs, the first one counts."""
        return len(self.inputs) == 1 and bool(self.outputs)

    @property
    def widths(self) -> tuple[int, int]:
        return self.inputs[0].width, self.outputs[0].width


_Modules = dict[ModulePath, _Module]


def pair_by_rows(tensors: Sides[Mapping[TensorKey, MergedTensor]], pairs: ModulePairs) -> None:
    """Add to `pairs` the namesakes, fused modules, and those that compute for an uncalled one."""
    called = tensors.map(lambda side: {key[:2] for key in side})
    functions = tensors.map(_functions)
    free = _free(functions, pairs)
    pairs.matched |= _find_namesakes(free, pairs.matched)
    free = _free(functions, pairs)
    backward = {match: module for module, match in pairs.matched.items()}
    pairs.parts |= _find_fused(free.port, free.reference, backward)
    pairs.wholes |= _find_fused(free.reference, free.port, pairs.matched)
    free = _free(functions, pairs)
    for module, match in list(pairs.matched.items()):
        if module in called.reference and match not in called.port:
            around = _called_around(module, match, called.port, pairs)
            if around is not None:
                pairs.matched[module] = around
                continue
        if module in functions.reference and match not in called.port:
            stand_in = _stand_in(functions.reference[module], free.port)
            if stand_in is not None:
                pairs.matched[module] = stand_in
        elif match in functions.port and module not in called.reference:
            stand_in = _stand_in(functions.port[match], free.reference)
            if stand_in is not None:
                del pairs.matched[module]
                pairs.matched[stand_in] = match
    pairs.matched |= _find_users_of_tied_weights(functions, pairs)


def _functions(tensors: Mapping[TensorKey, MergedTensor]) -> _Modules:
    modules: _Modules = defaultdict(_Module)
    for (model, module, tensor, number), rows in tensors.items():
        if number == 1 and "float" in str(rows.row.get("dtype")):
            called = modules[model, module]
            (called.inputs if tensor.startswith("in") else called.outputs).append(rows)
    return {path: called for path, called in modules.items() if called.is_function}


def _free(functions: Sides[_Modules], pairs: ModulePairs) -> Sides[_Modules]:
    """Return the modules without a counterpart."""
    free = (
        {path: module for path, module in side.items() if path not in paired}
        for side, paired in zip(functions, pairs.paired, strict=True)
    )
    return Sides(*free)


def _find_namesakes(
    free: Sides[_Modules], matched: Mapping[ModulePath, ModulePath]
) -> dict[ModulePath, ModulePath]:
    """Return the modules that have one name in matched containers, and the same widths."""
    found = {}
    for path, module in free.reference.items():
        match = counterpart(path, matched)
        if match in free.port and free.port[match].widths == module.widths:
            found[path] = match
    return found


# -- fused modules
# --------------------------------------------------------------------------------------------------


def _find_fused(
    wholes: _Modules, parts: _Modules, matched: Mapping[ModulePath, ModulePath]
) -> dict[ModulePath, list[ModulePath]]:
    """Return the parts of each fused module, in the order of their calls.

    Args:
        matched: Modules of the side of the wholes -> of the side of the parts.
    """
    siblings: dict[ModulePath, list[ModulePath]] = defaultdict(list)
    for part in parts:
        siblings[part[0], _parent(part)].append(part)
    found = {}
    for path, whole in wholes.items():
        container = counterpart((path[0], _parent(path)), matched)
        groups = list(_fitting(whole, siblings.get(container, []), parts))
        adding_up = [group for group in groups if _adds_up(whole, [parts[part] for part in group])]
        best = adding_up or groups
        if len(best) == 1:
            found[path] = best[0]
    return found


def _parent(path: ModulePath) -> str:
    return next(iter(enclosing_names(path[1])), "")


def _fitting(
    whole: _Module, candidates: list[ModulePath], parts: _Modules
) -> Iterator[list[ModulePath]]:
    """Yield the groups of modules with one input whose outputs are as wide as that of the whole."""
    width, total = whole.widths
    for count in range(2, min(_MOST_PARTS, len(candidates)) + 1):
        for group in itertools.combinations(candidates, count):
            widths = [parts[part].widths for part in group]
            values = {tuple(parts[part].inputs[0].values) for part in group}
            if len(values) == 1 and widths[0][0] == width and sum(w for _, w in widths) == total:
                yield list(group)


def _adds_up(whole: _Module, parts: list[_Module]) -> bool:
    """Return whether the squares of each row add up to those of the whole."""
    squares = whole.outputs[0].squares
    total = np.sum([part.outputs[0].squares for part in parts], axis=0)
    both = np.isfinite(squares) & np.isfinite(total)
    return bool(both.any() and (np.abs(total - squares)[both] <= _SAME * squares[both]).all())


# -- modules that compute in place of an uncalled one
# --------------------------------------------------------------------------------------------------


def _stand_in(module: _Module, candidates: _Modules) -> ModulePath | None:
    """Return the module that computes in place of another, if exactly one may.

    It has the same widths and input, else one of both; a vocabulary may have been padded.
    """
    fitting = {path for path, rival in candidates.items() if rival.widths == module.widths}
    same = {
        path
        for path, rival in candidates.items()
        if _is_same(module.inputs[0], rival.inputs[0]) and rival.widths >= module.widths
    }
    best = fitting & same or fitting or same
    return best.pop() if len(best) == 1 else None


def _called_around(
    module: ModulePath, match: ModulePath, called: Set[ModulePath], pairs: ModulePairs
) -> ModulePath | None:
    """Return the module around an uncalled owner of weights that computes with them, if any.

    It is called, corresponds to no other module, and has the name of the reference's module in its
    container: the experts of an engine are one operation, which calls no module for them.
    """
    names = counterpart((module[0], _parent(module)), pairs.matched), module[1].rpartition(".")[2]
    (model, container), name = names
    path = model, f"{container}.{name}" if container else name
    contains_owner = path[0] == match[0] and path[1] in enclosing_names(match[1])
    return path if contains_owner and path in called and path not in pairs.paired.port else None


def _find_users_of_tied_weights(
    functions: Sides[_Modules], pairs: ModulePairs
) -> dict[ModulePath, ModulePath]:
    """Return the owners whose weight the other side's module takes from elsewhere.

    A head that is tied to the embedding may own its weight in one program only. The other's module
    has no weight and calls no module, and has the same input and widths.
    """
    free, owners = _free(functions, pairs), pairs.owners
    users = Sides(_leaves(free.reference, owners.reference), _leaves(free.port, owners.port))
    found: dict[ModulePath, ModulePath] = {}
    for path in sorted(free.reference.keys() & owners.reference):
        user = _only_alike(free.reference[path], users.port)
        if user is not None and user not in found.values():
            found[path] = user
    for path in sorted(free.port.keys() & owners.port):
        user = _only_alike(free.port[path], users.reference)
        if user is not None and user not in found:
            found[user] = path
    return found


def _leaves(modules: _Modules, owners: Set[ModulePath]) -> _Modules:
    """Return the modules that own no weight and contain no owner of one."""
    containers = {(model, name) for model, module in owners for name in enclosing_names(module)}
    return {
        path: module
        for path, module in modules.items()
        if path not in owners and path not in containers
    }


def _only_alike(module: _Module, candidates: _Modules) -> ModulePath | None:
    """Return the only candidate with the same input and widths, None without one."""
    alike = [
        path
        for path, rival in candidates.items()
        if rival.widths == module.widths and _is_same(module.inputs[0], rival.inputs[0])
    ]
    return alike[0] if len(alike) == 1 else None


def _is_same(tensor: MergedTensor, rival: MergedTensor) -> bool:
    both = tensor.present & rival.present
    if not both.any() or tensor.sketches.shape != rival.sketches.shape:
        return False
    sketches, others = tensor.sketches[both, :, :-1], rival.sketches[both, :, :-1]
    return bool(np.linalg.norm(sketches - others) <= _SAME * np.linalg.norm(sketches))
