"""Pair what a model returns with what another program's module computes outside of its model.

transformers scales or caps its logits in the model, after the module `lm_head`. An engine does so
in a module that it calls once the model has returned hidden states:

    reference                     port
    lm_head out                   logits_processor out    paired, but scaled in one of them only
    (root)  out.logits            logits_processor out    equal
"""

from __future__ import annotations

from collections.abc import Set

from otel_torch.parity.align import Alignment
from otel_torch.parity.call_graph import Program, Role, is_informative
from otel_torch.parity.modules import ModulePairs, ModulePath
from otel_torch.parity.sides import Sides
from otel_torch.parity.tensor_pair import TensorPair
from otel_torch.parity.tokens.merged_tensor import Flags, MergedTensor, TensorKey


def find_final_outputs(
    tensors: Sides[dict[TensorKey, MergedTensor]],
    modules: ModulePairs,
    coverage: Sides[dict[ModulePath, Flags]],
) -> Sides[dict[TensorKey, Flags]]:
    """Return which tokens to compare of the outputs of a model.

    An output that a paired module made has the tokens of that module. Of others that the other
    side's model has not, they are those of the other side's last module whose output is as wide.

    Args:
        coverage: Which tokens the modules of either side have.
    """
    pairs = list(modules.matched.items())
    turned = [(port, reference) for reference, port in pairs]
    return Sides(
        _tokens_of_outputs(tensors.reference, tensors.port, pairs, coverage.port)
        | _tokens_of_makers(tensors.reference, set(modules.matched), coverage.reference),
        _tokens_of_outputs(tensors.port, tensors.reference, turned, coverage.reference)
        | _tokens_of_makers(tensors.port, set(modules.matched.values()), coverage.port),
    )


def _tokens_of_makers(
    own: dict[TensorKey, MergedTensor], paired: Set[ModulePath], coverage: dict[ModulePath, Flags]
) -> dict[TensorKey, Flags]:
    found = {}
    makers = [
        (key[:2], tensor)
        for key, tensor in own.items()
        if key[1] and key[2].startswith("out") and key[:2] in paired
    ]
    for key, tensor in own.items():
        for path, made in makers if _is_output_of_model(key) else ():
            if made.values == tensor.values:
                found[key] = coverage[path] & tensor.present
    return found


def _tokens_of_outputs(
    own: dict[TensorKey, MergedTensor],
    opposite: dict[TensorKey, MergedTensor],
    pairs: list[tuple[ModulePath, ModulePath]],
    coverage: dict[ModulePath, Flags],
) -> dict[TensorKey, Flags]:
    widths = {tensor.width for key, tensor in opposite.items() if _is_output_of_model(key)}
    partners = {match for module, match in pairs if module[1]}
    found = {}
    for key, tensor in own.items():
        if not _is_output_of_model(key) or tensor.width in widths:
            continue
        for rival_key, rival in opposite.items():
            path = rival_key[:2]
            is_as_wide = rival_key[2].startswith("out") and rival.width == tensor.width
            if path in partners and is_as_wide:
                found[key] = coverage[path] & tensor.present
    return found


def _is_output_of_model(key: TensorKey) -> bool:
    return not key[1] and key[2].startswith("out")


def pair_final_outputs(alignment: Alignment) -> None:
    """Pair outputs that only one program's model returns with another module's."""
    for output in _outputs_of_model(alignment.reference):
        match = _same_tokens(alignment, output, alignment.port)
        if match is not None:
            _pair(alignment, output, match)
    for output in _outputs_of_model(alignment.port):
        match = _same_tokens(alignment, output, alignment.reference)
        if match is not None:
            _pair(alignment, match, output)
    alignment.pairs.sort(key=lambda pair: pair.time)


def _pair(alignment: Alignment, reference: Role, port: Role) -> None:
    """Pair two outputs, unless their values are in a pair; replace those with other values."""
    values = reference.value, port.value
    paired = [{role.value for role in (*p.reference, *p.port)} for p in alignment.pairs]
    if any(pair.issuperset(values) for pair in paired):
        return
    of_module = port if not reference.call.module else reference
    alignment.pairs = [p for p in alignment.pairs if of_module not in (*p.reference, *p.port)]
    relation = alignment.comparer.relation(*values)
    alignment.pairs.append(TensorPair([reference], [port], "owner", relation))


def _outputs_of_model(program: Program) -> list[Role]:
    return [
        role
        for call in program.outermost
        if not call.module
        for role in call.outputs
        if is_informative(role)
    ]


def _same_tokens(alignment: Alignment, output: Role, program: Program) -> Role | None:
    """Return the last output of a paired module of a program that has the same tokens and width."""
    matches = [
        role
        for role in program.roles
        if role.side == "output"
        and role.call.module
        and not role.call.children
        and role.call in alignment.partner
        and role.value.numel == output.value.numel
        and role.row.get("tokens") == output.row.get("tokens")
    ]
    return matches[-1] if matches else None
