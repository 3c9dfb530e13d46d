"""Two workers, and a worker whose forward raises: FastVideo then kills the parent and with it the
worker itself.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.fastvideo.runs import Run

pytestmark = pytest.mark.fastvideo

TRANSFORMER = "WanTransformer3DModel"


def test_each_worker_has_its_rank_and_its_recording(two_workers: Run) -> None:
    assert two_workers.status == 0, two_workers.output
    assert [path.name.split(".", 1)[1] for path in two_workers.recordings()] == [
        "rank0.jsonl",
        "rank1.jsonl",
    ]
    assert [(data["rank"], data["world_size"]) for data in two_workers.metadata()] == [
        (0, 2),
        (1, 2),
    ]


def test_both_workers_are_in_one_run_and_one_trace(two_workers: Run) -> None:
    assert len({data["run_id"] for data in two_workers.metadata()}) == 1
    assert len({data["trace_id"] for data in two_workers.metadata()}) == 1


def test_both_workers_make_the_same_forwards(two_workers: Run) -> None:
    fields = ("model", "module", "loop", "step", "call")
    first, second = (
        Counter(tuple(record[field] for field in fields) for record in two_workers.records_of(path))
        for path in two_workers.recordings()
    )
    assert first == second
    turns = {key[2:] for key in first if key[0] == TRANSFORMER}
    assert turns == {(loop, step, call) for loop in (0, 1) for step in (0, 1, 2) for call in (0, 1)}


def test_a_raising_forward_ends_the_program_as_without_us(broken: Run) -> None:
    # SIGQUIT, sent by the worker
    assert broken.status == -3, broken.output
    assert "the forward that was to break" in broken.output


def test_everything_before_the_raising_forward_is_on_disk(broken: Run) -> None:
    calls = Counter(
        (record["step"], record["branch"])
        for record in broken.records()
        if record["model"] == TRANSFORMER
    )
    complete = [calls[step, branch] for step in (0, 1) for branch in ("cond", "uncond")]
    assert len(set(complete)) == 1 and complete[0] > 0
    # of the step that broke, what had run
    assert 0 < calls[2, "cond"] < complete[0]
    assert set(calls) == {(0, "cond"), (0, "uncond"), (1, "cond"), (1, "uncond"), (2, "cond")}


def test_the_metadata_says_that_the_recording_ended_early(broken: Run) -> None:
    (metadata,) = broken.metadata()
    assert metadata["ended_cleanly"] is False and metadata["end"] is None
