"""Calls are counted for each step, and a number never comes twice."""

from __future__ import annotations

import threading

from otel_torch.sources.steps.calls import CallCounter


def run(
    calls: CallCounter,
    step: int,
    times: int = 1,
    module: str = "layer",
    phase: str = "forward",
    loop: int = 0,
) -> list[int]:
    counted = calls.of(phase, loop, step)
    return [calls.count(counted, module) for _ in range(times)]


def test_each_module_step_loop_and_phase_is_counted_for_itself() -> None:
    calls = CallCounter()
    assert run(calls, 0, 2) == [0, 1]
    assert (
        run(calls, 1)
        == run(calls, 0, module="other")
        == run(calls, 0, loop=1)
        == run(calls, 0, phase="eval")
        == [0]
    )
    assert run(calls, 0) == [2]
    assert (
        calls.of("forward", 0, 0).next_number("layer") == 3
        and calls.of("forward", 0, 0).next_number("never") == 0
    )
    assert calls.modules() == {"layer", "other"}
    assert calls.of("forward", 0, 9) is calls.of("forward", 0, 9)  # before any call in it, too


def test_a_forgotten_step_that_comes_again_begins_behind_all_calls_of_before() -> None:
    calls = CallCounter()
    before = {step: run(calls, step, 3 if step == 4 else 1) for step in range(20)}
    assert [before[step] for step in (0, 4, 19)] == [[0], [0, 1, 2], [0]]
    for begin in (3, 4):
        for step in range(20):  # a new optimizer counts from 0
            assert run(calls, step) == [begin]
    assert calls.of("forward", 0, 5).next_number("came later") == 0
    assert calls.modules() == {"layer"}


def test_threads_share_a_steps_numbers() -> None:
    calls, numbers = CallCounter(), []
    counted = calls.of("forward", 0, 0)
    threads = [
        threading.Thread(
            target=lambda: numbers.extend([calls.count(counted, "layer") for _ in range(5000)])
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(20000))
