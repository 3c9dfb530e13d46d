"""Pair modules that no parameter pairs, by the rows of the tokens that both programs computed.

An inference engine packs its fused weights into a form of its own, and computes the logits in
another module than the one that owns their weight:

    reference                 port               because
    layers.0.o_proj           h.0.o_proj         one name in paired containers, equal widths
    q_proj, k_proj, v_proj    qkv_proj           in paired containers; their widths add up
    lm_head                   logits_processor   the port never calls its lm_head; equal input
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from otel_torch.parity.call_graph import enclosing_names
from otel_torch.parity.modules import ModulePairs, ModulePath
from otel_torch.parity.sides import Sides
from otel_torch.parity.tokens.merged_tensor import MergedTensor, TensorKey

# q, k, v and a gate
_MOST_PARTS = 4
# Other modules' rows differ by their own size. This tells which modules correspond, and not whether
# they are right.
_SAME = 0.02


@dataclass(slots=True)
class _Module:
    """The floating-point inputs and outputs of a module."""

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
    called = tensors.map(_modules)
    free = _free(called, pairs)
    pairs.matched |= _find_namesakes(free, pairs.matched)
    free = _free(called, pairs)
    backward = {match: module for module, match in pairs.matched.items()}
    pairs.parts |= _find_fused(free.port, free.reference, backward)
    pairs.wholes |= _find_fused(free.reference, free.port, pairs.matched)
    free = _free(called, pairs)
    for module, match in list(pairs.matched.items()):
        if module in called.reference and match not in called.port:
            stand_in = _stand_in(called.reference[module], free.port)
            if stand_in is not None:
                pairs.matched[module] = stand_in
        elif match in called.port and module not in called.reference:
            stand_in = _stand_in(called.port[match], free.reference)
            if stand_in is not None:
                del pairs.matched[module]
                pairs.matched[stand_in] = match


def _modules(tensors: Mapping[TensorKey, MergedTensor]) -> _Modules:
    modules: _Modules = defaultdict(_Module)
    for (model, module, tensor, _), rows in tensors.items():
        if "float" in str(rows.row.get("dtype")):
            called = modules[model, module]
            (called.inputs if tensor.startswith("in") else called.outputs).append(rows)
    return {path: called for path, called in modules.items() if called.is_function}


def _free(called: Sides[_Modules], pairs: ModulePairs) -> Sides[_Modules]:
    """Return the modules without a counterpart."""
    paired = (
        {*pairs.matched, *pairs.wholes, *itertools.chain(*pairs.parts.values())},
        {*pairs.matched.values(), *pairs.parts, *itertools.chain(*pairs.wholes.values())},
    )
    free = (
        {path: module for path, module in side.items() if path not in paths}
        for side, paths in zip(called, paired, strict=True)
    )
    return Sides(*free)


def _find_namesakes(
    free: Sides[_Modules], matched: Mapping[ModulePath, ModulePath]
) -> dict[ModulePath, ModulePath]:
    """Return the modules that have one name in matched containers, and the same widths."""
    found = {}
    for path, module in free.reference.items():
        match = _counterpart(path, matched)
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
        container = _counterpart((path[0], _parent(path)), matched)
        groups = list(_fitting(whole, siblings.get(container, []), parts))
        adding_up = [group for group in groups if _adds_up(whole, [parts[part] for part in group])]
        best = adding_up or groups
        if len(best) == 1:
            found[path] = best[0]
    return found


def _parent(path: ModulePath) -> str:
    return next(iter(enclosing_names(path[1])), "")


def _counterpart(path: ModulePath, matched: Mapping[ModulePath, ModulePath]) -> ModulePath:
    """Return the match of a module: its own, or what has its name in that of one around it."""
    model, module = path
    for name in (module, *enclosing_names(module)):
        if (model, name) in matched:
            other, match = matched[model, name]
            inside = module.removeprefix(name).removeprefix(".")
            return other, ".".join(filter(None, (match, inside)))
    return path


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
    """Return the module of the same widths with the same input, or the only one of these widths."""
    fitting = [path for path, rival in candidates.items() if rival.widths == module.widths]
    same = [path for path in fitting if _is_same(module.inputs[0], candidates[path].inputs[0])]
    best = same or fitting
    return best[0] if len(best) == 1 else None


def _is_same(tensor: MergedTensor, rival: MergedTensor) -> bool:
    both = tensor.present & rival.present
    if not both.any() or tensor.sketches.shape != rival.sketches.shape:
        return False
    sketches, others = tensor.sketches[both, :, :-1], rival.sketches[both, :, :-1]
    return bool(np.linalg.norm(sketches - others) <= _SAME * np.linalg.norm(sketches))
