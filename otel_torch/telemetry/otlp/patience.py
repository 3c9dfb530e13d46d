"""How long the end of a program waits for an endpoint: as long as its messages are answered.

A message in flight gets a share of the time that there is. Between messages the queue encodes; that
is not the endpoint's fault, and only the deadline bounds it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# the share of the time at the end that a message gets, unless earlier answers took longer: as long
# as it waits for a connection, and once it has one
ANSWER_SHARE = 0.5
CONNECTED_SHARE = 0.72


class Pace:
    """How slow an endpoint's answers were so far. All queues that send to it share it: metrics are
    often sent only once, at the end.

    Attributes:
        slowest_s: the time that the slowest accepted message took, in seconds.
    """

    def __init__(self) -> None:
        self.slowest_s = 0.0

    def learn(self, answer_s: float) -> None:
        """Note how long an accepted message took."""
        self.slowest_s = max(self.slowest_s, answer_s)


class Patience:
    """Follows the messages of one queue: its thread sends them, the ending program asks.

    Args:
        pace: of the endpoint.
        is_local: whether the destination is a disk, which is waited for until the deadline.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        pace: Pace | None = None,
        *,
        is_local: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pace, self._is_local, self._clock = pace or Pace(), is_local, clock
        self._begun: float | None = None
        self._closed = self._deadline = 0.0

    def begin(self) -> None:
        """Note that a message is sent, for the first time."""
        self._begun = self._clock()

    def end(self) -> None:
        """Note that the message is accepted, refused or given up."""
        self._begun = None

    def learn(self, answer_s: float) -> None:
        """Note how long an accepted message took: a slow endpoint gets twice that."""
        self._pace.learn(answer_s)

    def close(self, deadline: float) -> None:
        """Note that the end begins now, and has time until `deadline`, both by the clock."""
        self._closed, self._deadline = self._clock(), deadline

    @property
    def answer_s(self) -> float:
        """How long a message without a connection may take at the end, in seconds."""
        return self._answer_s(ANSWER_SHARE)

    def _answer_s(self, share: float) -> float:
        return max(share * (self._deadline - self._closed), 2 * self._pace.slowest_s)

    def waits_until(
        self, *, is_hopeless: bool, connected: float = 0.0, has_connected: bool = False
    ) -> float:
        """Return when to stop waiting, by the clock: the deadline while no message is in flight.

        Args:
            is_hopeless: nothing was ever accepted, and an earlier message failed. Then a message
                sent before the end gets no more time because of it.
            connected: when the connection was made, by the clock; 0 if it was not, or if that is
                not known. A far endpoint, or one with TLS, takes a while to connect.
            has_connected: whether a connection was made: then the endpoint may be slow, not dead.
        """
        begun = self._begun
        if begun is None or self._is_local:
            return self._deadline
        since = max(begun, connected, begun if is_hopeless else self._closed)
        share = CONNECTED_SHARE if has_connected and not is_hopeless else ANSWER_SHARE
        return min(self._deadline, since + self._answer_s(share))
