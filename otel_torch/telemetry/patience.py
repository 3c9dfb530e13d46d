"""How long the end of a program waits for an endpoint: as long as its messages are answered.

A message in flight gets a share of the time that there is. Between messages the queue encodes; that
is not the endpoint's fault, and only the deadline bounds it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# the share of the time at the end that a message gets, unless earlier answers took longer
ANSWER_SHARE = 0.5


class Patience:
    """Follows the messages of one queue: its thread sends them, the ending program asks.

    Args:
        is_local: whether the destination is a disk, which is waited for until the deadline.
        clock: returns the time in seconds.
    """

    def __init__(
        self, *, is_local: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._is_local, self._clock = is_local, clock
        self._begun: float | None = None
        self._slowest_s = 0.0
        self._closed = self._deadline = 0.0

    def begin(self) -> None:
        """Note that a message is sent, for the first time."""
        self._begun = self._clock()

    def end(self) -> None:
        """Note that the message is accepted, refused or given up."""
        self._begun = None

    def learn(self, answer_s: float) -> None:
        """Note how long an accepted message took: a slow endpoint gets twice that."""
        self._slowest_s = max(self._slowest_s, answer_s)

    def close(self, deadline: float) -> None:
        """Note that the end begins now, and has time until `deadline`, both by the clock."""
        self._closed, self._deadline = self._clock(), deadline

    @property
    def answer_s(self) -> float:
        """How long a message may take at the end, in seconds."""
        return max(ANSWER_SHARE * (self._deadline - self._closed), 2 * self._slowest_s)

    def waits_until(self, *, is_hopeless: bool) -> float:
        """Return when to stop waiting, by the clock: the deadline while no message is in flight.

        Args:
            is_hopeless: nothing was ever accepted, and an earlier message failed. Then a message
                sent before the end gets no more time because of it.
        """
        begun = self._begun
        if begun is None or self._is_local:
            return self._deadline
        since = begun if is_hopeless else max(begun, self._closed)
        return min(self._deadline, since + self.answer_s)
