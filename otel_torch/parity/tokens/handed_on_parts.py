"""Pair the parts of a fused projection with what the port hands on of it.

The squares of a fused output add up whatever the order of its rows. The next modules receive its
parts again, and there the order shows:

    reference     port
    q_proj out    rotary_emb in[1]    the heads of qkv_proj in another order: the same numbers
    k_proj out    rotary_emb in[2]
    v_proj out    attn in[2]          that is k_proj out: keys and values are exchanged
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from otel_torch.parity.align import Alignment
from otel_torch.parity.call_graph import Role, is_informative
from otel_torch.parity.tensor_pair import TensorPair
from otel_torch.parity.token_norms import have_equal_token_norms
from otel_torch.parity.tokens.requests import MatchedToken
from otel_torch.parity.values import Relation

# another order moves numbers by their own size; rounding exceeds a limit by less than this factor
_CLEARLY = 5.0


def pair_handed_on_parts(alignment: Alignment, tokens: Sequence[MatchedToken]) -> None:
    """Add pairs of equal parts; a fused pair whose part is in another order becomes wrong.

    Args:
        tokens: Those of the forward.
    """
    fused = [pair for pair in alignment.pairs if pair.basis == "fused" and pair.is_right]
    for pair in fused:
        if len(pair.reference) > 1:
            _pair_parts(alignment, pair, tokens)
    alignment.pairs.sort(key=lambda pair: pair.time)


def _pair_parts(alignment: Alignment, fused: TensorPair, tokens: Sequence[MatchedToken]) -> None:
    comparer, handed = alignment.comparer, _handed_on(alignment, fused.port[0])
    unequal = []
    for part in fused.reference:
        equal = [role for role in handed if comparer.is_equal(part.value, role.value)]
        if equal:
            handed.remove(equal[0])
            relation = comparer.relation(part.value, equal[0].value)
            if _is_in_place_of_another(alignment, part, equal[0], fused.reference):
                fused.relation = Relation("order", None, fused.relation.limit)
            else:
                alignment.pairs.append(TensorPair([part], [equal[0]], "alike", relation))
        else:
            unequal.append(part)
    for part in unequal:
        errors = [
            (relation.error, index, role)
            for index, role in enumerate(handed)
            if role.value.numel == part.value.numel
            and (relation := comparer.relation(part.value, role.value)).error is not None
        ]
        error, _, rival = min(errors, default=(None, 0, None))
        if rival is not None and _is_reordered(alignment, part, rival, tokens):
            fused.relation = Relation("order", error, fused.relation.limit)


def _handed_on(alignment: Alignment, whole: Role) -> list[Role]:
    """Return the inputs of later calls in the container of a fused one that no module made."""
    return [
        role
        for role in alignment.port.roles
        if role.value.birth is role
        and role.side == "input"
        and role.call.parent is whole.call.parent
        and role.time >= whole.time
        and is_informative(role)
    ]


def _is_in_place_of_another(
    alignment: Alignment, part: Role, handed: Role, parts: Sequence[Role]
) -> bool:
    """Return whether the reference hands on another part where the port hands on this one."""
    call = alignment.partner.get(handed.call)
    expected = [role.value for role in call.inputs if role.tensor == handed.tensor] if call else []
    others = [other.value for other in parts if other is not part]
    return any(value in others for value in expected)


def _is_reordered(
    alignment: Alignment, part: Role, handed: Role, tokens: Sequence[MatchedToken]
) -> bool:
    """Return whether the tensor handed on differs from the part, but every token has the same norm.

    A rotation keeps the norms, too, but changes no token at position 0.
    """
    reference, port = part.value.sketch, handed.value.sketch
    if reference is None or port is None or len(reference) != len(port):
        return False
    limit = alignment.comparer.limit(part.value, handed.value)
    if not have_equal_token_norms(part, handed, limit):
        return False
    numbers = part.row["tokens"]
    is_first = [tokens[number].position == 0 for number in numbers]
    first, port_first = (side.reshape(len(numbers), -1)[is_first] for side in (reference, port))
    distance = np.linalg.norm(first - port_first)
    return bool(distance > _CLEARLY * limit * np.linalg.norm(first))
