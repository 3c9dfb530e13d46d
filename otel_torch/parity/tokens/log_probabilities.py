"""Compare the log-probabilities that both programs gave the tokens which followed.

token         a     b     c          the reference knows which one follows
reference  -1.20 -0.31 -2.05         of `b` after `a`, of `c` after `b`, ...
port       -1.20 -0.31 -2.11         the largest difference
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from otel_torch.parity.finding import LogProbabilities
from otel_torch.parity.sides import Sides
from otel_torch.parity.tensor_pair import TensorPair
from otel_torch.parity.tokens.first_token import errors_by_token
from otel_torch.parity.tokens.requests import MatchedToken, TokenForward, TokenPlace, hashes_of


def compare_log_probabilities(
    forwards: Sides[list[TokenForward]], tokens: Sequence[MatchedToken]
) -> LogProbabilities | None:
    """Return how the log-probabilities of the tokens differ, None if neither program has any."""
    sides = forwards.map(lambda side: [_Likeliest.of(forward) for forward in side])
    compared = LogProbabilities()
    for index, (token, following) in enumerate(pairwise(tokens)):
        if following[:2] != (token.request, token.position + 1):
            continue
        place = following.places.reference[0]
        chosen = int(forwards.reference[place.forward].hashes[place.row])
        reference, port = (
            _log_probability(side, places, chosen)
            for side, places in zip(sides, token.places, strict=True)
        )
        if reference is None or port is None:
            continue  # the logits of this token were not computed
        difference = abs(reference - port)
        if math.isnan(difference):
            compared.unknown += 1
            continue
        compared.tokens += 1
        if compared.index is None or difference > compared.largest:
            compared.largest, compared.index = difference, index
            compared.request, compared.position = following[:2]
            compared.reference, compared.port = reference, port
    return compared if compared.tokens or compared.unknown else None


def name_contribution(compared: LogProbabilities, pairs: Sequence[TensorPair]) -> None:
    """Note the module that adds most to the error of the token whose log-probability differs most.

    Args:
        pairs: Of the forward, in the reference's order.
    """
    if compared.index is None:
        return
    error_so_far = most = 0.0
    for pair in pairs:
        role = pair.reference[0]
        if not pair.is_output or role.call.children or pair.basis == "fused":  # parts are no terms
            continue
        error = errors_by_token(pair).get(compared.index)
        if error is None or not math.isfinite(error):
            continue
        if error - error_so_far > most:
            most = error - error_so_far
            compared.module, compared.port_module = role.call.module, pair.port[0].call.module
        error_so_far = max(error_so_far, error)


class _Likeliest:
    """The likeliest next ids of each row of logits.

    Args:
        hashes: Shape (rows, ids).
        values: Log-probabilities, likewise.
        rows: The row of each token of the forward, -1 without one.
    """

    def __init__(
        self, hashes: NDArray[np.uint64], values: NDArray[np.float32], rows: NDArray[np.int64]
    ) -> None:
        self._hashes, self._values, self._rows = hashes, values, rows

    @staticmethod
    def of(forward: TokenForward) -> _Likeliest | None:
        row = forward.rows.log_probabilities
        if row is None:
            return None
        *rows, count = row["shape"]
        hashes = hashes_of(row)
        values = np.frombuffer(base64.b64decode(row["logprobs"]), "<f4")
        tokens = _rows_of_tokens(forward.grid, rows)
        if hashes is None or tokens is None or len(hashes) != len(values):
            return None
        return _Likeliest(hashes.reshape(-1, count), values.reshape(-1, count), tokens)

    def of_token(self, row: int, chosen: int) -> float | None:
        """Return the log-probability of an id after a token: NaN if it is none of the likeliest."""
        index = int(self._rows[row])
        if not 0 <= index < len(self._hashes):
            return None
        places = np.flatnonzero(self._hashes[index] == np.uint64(chosen))
        return float(self._values[index, places[0]]) if len(places) else math.nan


def _rows_of_tokens(grid: tuple[int, ...], rows: Sequence[int]) -> NDArray[np.int64] | None:
    """Return the row of logits of each token; a program may compute those of the last ones only.

    >>> _rows_of_tokens((1, 3), [1, 2]).tolist()
    [-1, 0, 1]
    """
    count = math.prod(grid)
    if math.prod(rows) == count:
        return np.arange(count)
    if len(grid) != 2 or len(rows) != 2 or rows[0] != grid[0] or rows[1] > grid[1]:
        return None
    numbers = np.full(grid, -1, np.int64)
    numbers[:, grid[1] - rows[1] :] = np.arange(math.prod(rows)).reshape(tuple(rows))
    return numbers.reshape(-1)


def _log_probability(
    side: Sequence[_Likeliest | None], places: Sequence[TokenPlace], chosen: int
) -> float | None:
    for place in places:
        likeliest = side[place.forward]
        value = None if likeliest is None else likeliest.of_token(place.row, chosen)
        if value is not None:
            return value
    return None
