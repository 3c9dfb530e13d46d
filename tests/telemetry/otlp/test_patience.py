"""How long the end of a program waits for an endpoint, decided by the messages alone."""

from __future__ import annotations

import pytest

from otel_torch.telemetry.otlp.patience import ANSWER_SHARE, CONNECTED_SHARE, Pace, Patience


class Clock:
    """Shows the time that a test sets, in seconds."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def patience(clock: Clock) -> Patience:
    return Patience(clock=clock)


END_S = 10.0
ANSWER_S = ANSWER_SHARE * END_S


def end_program(patience: Patience, clock: Clock) -> float:
    """Begin an end that has END_S; return the time that it began."""
    patience.close(clock.now + END_S)
    return clock.now


def test_a_message_gets_its_share_from_the_beginning_of_the_end(
    patience: Patience, clock: Clock
) -> None:
    patience.begin()
    clock.now += 1
    closed = end_program(patience, clock)
    assert patience.waits_until(is_hopeless=False) == closed + ANSWER_S


def test_an_endpoint_that_never_worked_gets_nothing_for_a_message_that_is_overdue(
    patience: Patience, clock: Clock
) -> None:
    patience.begin()
    clock.now += END_S
    closed = end_program(patience, clock)
    assert patience.waits_until(is_hopeless=True) < closed


def test_data_that_moves_has_time_until_the_deadline(patience: Patience, clock: Clock) -> None:
    """The wait starts again with each message; between messages only the deadline bounds it."""
    closed = end_program(patience, clock)
    deadline = closed + END_S
    assert patience.waits_until(is_hopeless=False) == deadline
    clock.now += 3
    patience.begin()
    assert patience.waits_until(is_hopeless=False) == closed + 3 + ANSWER_S
    patience.end()
    clock.now += 3
    patience.begin()
    assert patience.waits_until(is_hopeless=False) == deadline
    patience.end()
    assert patience.waits_until(is_hopeless=False) == deadline


def test_an_endpoint_that_is_slow_but_answers_gets_twice_its_time(
    patience: Patience, clock: Clock
) -> None:
    patience.learn(4.0)
    patience.learn(1.0)
    closed = end_program(patience, clock)
    patience.begin()
    assert patience.waits_until(is_hopeless=False) == closed + 8.0


def test_a_queue_knows_the_pace_that_another_one_learned(clock: Clock) -> None:
    """Metrics of a short run are sent once, at the end, to an endpoint that has answered spans."""
    pace = Pace()
    spans, metrics = Patience(pace, clock=clock), Patience(pace, clock=clock)
    spans.learn(4.0)
    closed = end_program(metrics, clock)
    metrics.begin()
    assert metrics.waits_until(is_hopeless=False) == closed + 8.0


def test_a_message_gets_its_share_from_when_the_connection_was_made(
    patience: Patience, clock: Clock
) -> None:
    closed = end_program(patience, clock)
    patience.begin()
    connected = closed + 3
    assert patience.waits_until(is_hopeless=False, connected=connected) == connected + ANSWER_S
    early = closed - 1
    assert patience.waits_until(is_hopeless=False, connected=early) == closed + ANSWER_S
    late = closed + END_S - 1
    assert patience.waits_until(is_hopeless=False, connected=late) == closed + END_S


def test_a_message_on_a_connection_gets_more_unless_an_earlier_one_failed(
    patience: Patience, clock: Clock
) -> None:
    closed = end_program(patience, clock)
    patience.begin()
    until = patience.waits_until(is_hopeless=False, has_connected=True)
    assert until == closed + CONNECTED_SHARE * END_S
    until = patience.waits_until(is_hopeless=True, has_connected=True)
    assert until == closed + ANSWER_S


def test_a_disk_is_waited_for_until_the_deadline(clock: Clock) -> None:
    patience = Patience(is_local=True, clock=clock)
    closed = end_program(patience, clock)
    patience.begin()
    assert patience.waits_until(is_hopeless=False) == closed + END_S
