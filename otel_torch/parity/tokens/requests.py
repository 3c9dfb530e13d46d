"""Which token each row of a forward is, and which tokens two runs have in common.

reference   one forward    request 0: a b c d e
port        a prefill      request 7: a b c        then steps  request 7: d   request 7: e
matched     (a, a) (b, b) (c, c) (d, d) (e, e)
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from otel_torch.parity.forwards import ForwardRows
from otel_torch.parity.sides import Sides
from otel_torch.recording.rows import Row

# of splitmix64, by which recordings hash ids
_STRIDE, _MIX, _LAST_MIX = (
    np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


@dataclass(slots=True, eq=False)
class TokenForward:
    """A forward whose tokens are known.

    grid: shape of its ids. hashes, positions, requests: one entry per token; -1 for a padding.
    updates: how often optimizers of its process had stepped.
    """

    rows: ForwardRows
    grid: tuple[int, ...]
    hashes: NDArray[np.uint64]
    positions: NDArray[np.int64]
    requests: NDArray[np.int64]
    updates: int

    @property
    def batch(self) -> tuple[object, ...]:
        """What two runs with the same batches have in common."""
        numbers = (self.hashes, self.positions, self.requests)
        return self.grid, *(part.tobytes() for part in numbers)


class TokenPlace(NamedTuple):
    """Where a token was computed: index of the forward, and of the row in it."""

    forward: int
    row: int


class MatchedToken(NamedTuple):
    """A token that both runs computed; `request` counts the reference's, from 0.

    An engine may compute it in several forwards: its logits after its hidden states.
    """

    request: int
    position: int
    places: Sides[list[TokenPlace]]


@dataclass(slots=True, eq=False)
class _ServedRequest:
    """A request of one run.

    updates: how often optimizers had stepped when it began. tokens: by position, with their places.
    """

    updates: int
    tokens: dict[int, tuple[int, list[TokenPlace]]] = field(default_factory=dict)


def read_tokens(forward: ForwardRows) -> TokenForward | None:
    """Return a forward with its tokens; None if they are not known, or not all of them."""
    row = forward.tokens
    if row is None:
        return None
    grid = tuple(row["shape"])
    count = int(np.prod(grid))
    hashes, positions = hashes_of(row), row.get("positions")
    if hashes is None or positions is None or not len(hashes) == len(positions) == count:
        return None
    where = np.array(positions, dtype=np.int64)
    requests = row.get("requests")
    if requests is None:  # a request begins where the positions do not go on
        requests = np.cumsum(np.diff(where, prepend=where[:1] - 1) != 1)
    numbers = np.array(requests, dtype=np.int64)
    return TokenForward(forward, grid, hashes, where, numbers, row.get("updates") or 0)


def hashes_of(row: Row) -> NDArray[np.uint64] | None:
    """Return the hashes of a row's ids, None if it has none."""
    if "hashes" in row:
        return np.frombuffer(base64.b64decode(row["hashes"]), "<u8").astype(np.uint64)
    return None if "ids" not in row else hash_ids(np.array(row["ids"]))


def hash_ids(ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the hashes that a recording has in place of ids.

    >>> hash_ids(np.array([0, 1])).tolist()
    [16294208416658607535, 10451216379200822465]
    """
    mixed = ids.astype(np.uint64) + _STRIDE
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _LAST_MIX
    return mixed ^ (mixed >> np.uint64(31))


def match_tokens(
    reference_forwards: Sequence[TokenForward], port_forwards: Sequence[TokenForward]
) -> list[MatchedToken]:
    """Return the tokens that both runs computed, in the order of the reference.

    A request has one partner: that with which it has the longest beginning in common. If both runs
    know of updates, it is one that began after as many.
    """
    reference, port = _find_requests(reference_forwards), _find_requests(port_forwards)
    by_updates = know_updates(reference_forwards, port_forwards)
    common = [
        (_common_positions(request, other), index, other_index)
        for index, request in enumerate(reference)
        for other_index, other in enumerate(port)
        if not by_updates or request.updates == other.updates
    ]
    common.sort(key=lambda entry: (-len(entry[0]), entry[1], entry[2]))
    partners: dict[int, tuple[int, list[int]]] = {}
    taken = set()
    for positions, index, other_index in common:
        if positions and index not in partners and other_index not in taken:
            partners[index] = other_index, positions
            taken.add(other_index)
    return [
        MatchedToken(
            index,
            position,
            Sides(reference[index].tokens[position][1], port[other_index].tokens[position][1]),
        )
        for index, (other_index, positions) in sorted(partners.items())
        for position in positions
    ]


def count_unmatched(
    forwards: Sequence[TokenForward], places: Sequence[Sequence[TokenPlace]]
) -> tuple[int, int]:
    """Return how many computed tokens of one run have no partner, and how many there are.

    Tokens before the first one that a partner computed are in its cache: what follows shows them.
    A program that generates the last token of an answer need not compute with it, another one does.

    Args:
        places: Where the matched tokens were computed.
    """
    known = {place for several in places for place in several}
    for request in _find_requests(forwards):
        matched = [at for at, (_, several) in request.tokens.items() if known & {*several}]
        for position, (_, several) in request.tokens.items():
            is_last = position == max(request.tokens)
            if matched and (position < min(matched) or (is_last and position - 1 in matched)):
                known.update(several)
    computed = {
        TokenPlace(index, row)
        for index, forward in enumerate(forwards)
        for row in np.flatnonzero(forward.positions >= 0).tolist()
    }
    return len(computed - known), len(computed)


def know_updates(*sides: Sequence[TokenForward]) -> bool:
    """Return whether all runs have forwards after an update that they know of."""
    return all(any(forward.updates for forward in side) for side in sides)


def _find_requests(forwards: Sequence[TokenForward]) -> list[_ServedRequest]:
    """Collect the tokens of each request over all forwards.

    A request is a new one, also in the same row of a batch, when the module that began the last one
    is at position 0 again. Another module goes on with it: the one that computes its logits. What
    follows an update is left out: its parameters are not those of the beginning.
    """
    requests: list[_ServedRequest] = []
    running: dict[int, _ServedRequest] = {}
    begun_by: dict[int, str] = {}
    for index, forward in enumerate(forwards):
        module = forward.rows.record(0).module
        numbers = forward.requests.tolist()
        entries = zip(numbers, forward.positions.tolist(), forward.hashes.tolist(), strict=True)
        for row, (number, position, token) in enumerate(entries):
            if position < 0:
                continue
            begins_anew = position == 0 and begun_by.get(number) == module
            if number not in running or begins_anew:
                running[number], begun_by[number] = _ServedRequest(forward.updates), module
                requests.append(running[number])
            if running[number].updates != forward.updates:
                continue
            tokens, place = running[number].tokens, TokenPlace(index, row)
            known, places = tokens.get(position, (None, []))
            tokens[position] = token, [*places, place] if known == token else [place]
    return requests


def _common_positions(reference: _ServedRequest, port: _ServedRequest) -> list[int]:
    """Return the positions up to the first token that differs."""
    positions = []
    for position in sorted(reference.tokens.keys() & port.tokens.keys()):
        if reference.tokens[position][0] != port.tokens[position][0]:
            break
        positions.append(position)
    return positions
