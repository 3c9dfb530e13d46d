"""Find the ranks whose parts are wrong by all places that follow inside of a block.

The sketch of an error has a product with that of the part that made it, and none with the others,
except for chance: of 64 numbers, cosines of 1/8. One place often does not tell the two apart. From
a wrong part on, the same positions are wrong at all places of the block around it, and chance
averages out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from otel_torch.parity.layouts.judged_places import JudgedPlace
from otel_torch.parity.layouts.rank_layout import add_up, terms_of
from otel_torch.statistics.sketch_format import SIZE

# fewer places do not average chance out
_FEW = 4
# standard errors by which a mean squared cosine exceeds that of chance, and those of the others
_SURE = 3.0
# likewise of fewer places
_SURE_ALONE = 0.15


def find_wrong_parts(first: JudgedPlace, following: Sequence[JudgedPlace]) -> list[int]:
    """Return the indices of the rows whose parts are wrong: of one, or of all; empty if unknown.

    Args:
        first: The first wrong place.
        following: The places of the step after it.
    """
    block = _block_around(first.key.module)
    when = *first.key.position, first.key.call, first.key.phase
    cosines: dict[tuple[float, ...], None] = {}  # those of a value that several places have, once
    for entry in (first, *following):
        key = entry.key
        is_inside = key.model == first.key.model and f"{key.module}.".startswith(block)
        is_then = (*key.position, key.call, key.phase) == when
        if not is_inside or not is_then or not entry.is_wrong:
            continue
        squared = _squared_cosines(entry, first)
        if squared is not None:
            cosines[squared] = None
    if not cosines:
        return []
    means = np.mean(list(cosines), axis=0)
    chance = 1 / SIZE
    slack = _SURE * chance * (2 / len(cosines)) ** 0.5
    if means.min() > max(chance + slack, 0.0 if len(cosines) >= _FEW else _SURE_ALONE):
        return list(range(len(means)))
    best = int(np.argmax(means))
    others = float(np.delete(means, best).max())
    is_sure = means[best] > max(chance, others) + slack and others < chance + slack
    return [best] if is_sure and len(cosines) >= _FEW else []


def _block_around(module: str) -> str:
    """Return the prefix of the modules of the numbered block around a module.

    >>> _block_around("layers.1.attention.proj"), _block_around("embed")
    ('layers.1.', 'embed.')
    """
    parts = module.split(".")
    numbered = [index for index, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbered[-1] + 1] if numbered else parts) + "."


def _squared_cosines(entry: JudgedPlace, first: JudgedPlace) -> tuple[float, ...] | None:
    """Return the squared cosine of the error with each part, None where they are not known."""
    layout, reference = entry.layout, entry.reference
    if layout is None or reference is None or reference.sketch is None:
        return None
    if first.layout is None or layout.kind != "parts" or layout.dim != first.layout.dim:
        return None
    terms = terms_of(layout, entry.rows)
    if terms is None or len(terms) < 2 or len(terms) != len(first.rows):
        return None
    error = add_up(terms) - reference.sketch
    norms = [float(np.linalg.norm(error) * np.linalg.norm(term)) for term in terms]
    if not all(norms):
        return None
    cosines = [float(error @ term) / norm for term, norm in zip(terms, norms, strict=True)]
    return tuple(round(cosine**2, 6) for cosine in cosines)
