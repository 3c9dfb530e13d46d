"""Rows of statistics on a device: stored side by side, copied together, and never waited for in a
forward.
"""

from __future__ import annotations

import json
import math

import pytest
import torch

from otel_torch.statistics import device_rows
from otel_torch.statistics.device_rows import RowCopy, allocate_row
from otel_torch.statistics.measure import Measurement, measure
from otel_torch.statistics.read_rows import RowTransfer, read_rows
from otel_torch.statistics.row_layout import COLUMNS, SUM
from tests.support import run_python

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_rows, "_memories", {})


def rows(count: int, size: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [allocate_row(size, dtype, CPU).fill_(number) for number in range(count)]


def test_rows_lie_side_by_side_and_are_one_copy():
    taken = rows(100, 7)
    assert len({row.untyped_storage().data_ptr() for row in taken}) == 1
    assert RowCopy(taken).fetch() == [[float(number)] * 7 for number in range(100)]
    assert RowCopy([taken[70], taken[3]]).fetch() == [[70.0] * 7, [3.0] * 7]


def test_a_piece_that_is_full_is_followed_by_another():
    taken = rows(3000, 7)
    assert len({row.untyped_storage().data_ptr() for row in taken}) == math.ceil(
        3000 / (device_rows._BLOCK // 7)
    )
    assert [row[0] for row in RowCopy(taken).fetch()] == list(range(3000))
    assert (
        allocate_row(3 * device_rows._BLOCK, torch.float64, CPU).numel() == 3 * device_rows._BLOCK
    )


def test_inside_inference_mode_and_outside_rows_share_a_piece():
    with torch.inference_mode():
        first = allocate_row(2, torch.float64, CPU).fill_(1.0)
    second = allocate_row(2, torch.float64, CPU).fill_(2.0)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert RowCopy([first, second]).fetch() == [[1.0, 1.0], [2.0, 2.0]]


def test_rows_of_hosts_and_devices_and_none_come_in_order():
    def measured(row: torch.Tensor | list[float] | None) -> Measurement:
        return Measurement(row, ("sum",), 1, 1, [1], "torch.float32")

    single = allocate_row(1, torch.float32, CPU).fill_(4.0)
    reading = RowTransfer(
        [
            measured(row)
            for row in ([1.0], allocate_row(1, torch.float64, CPU).fill_(2.0), None, single)
        ]
    )
    assert reading.is_ready()
    assert reading.fetch() == [[1.0], [2.0], None, [4.0]]
    assert reading.fetch() == [[1.0], [2.0], None, [4.0]]


def test_while_a_graph_is_captured_no_row_is_copied_and_none_is_lost(
    monkeypatch: pytest.MonkeyPatch,
):
    capture = [True]
    monkeypatch.setattr("otel_torch.statistics.read_rows.is_capturing", lambda: capture[0])
    made: list[RowCopy] = []

    class Counted(RowCopy):
        def __init__(self, rows: list[torch.Tensor]) -> None:
            made.append(self)
            super().__init__(rows)

        def is_ready(self) -> bool:
            assert not capture[0], "to ask a device would spoil the graph"
            return super().is_ready()

    monkeypatch.setattr("otel_torch.statistics.read_rows.RowCopy", Counted)
    measured = [
        Measurement(row, ("sum",), 1, 1, [1], "torch.float32") for row in (*rows(2, 1), None)
    ]
    before = RowTransfer([])
    reading = RowTransfer(measured)
    assert before.is_ready() and not reading.is_ready() and not made
    with pytest.raises(RuntimeError, match="graph is being captured"):
        reading.fetch()
    capture[0] = False
    assert reading.is_ready() and len(made) == 1
    capture[0] = True
    assert not reading.is_ready()  # of another graph, while the copy is under way
    capture[0] = False
    assert reading.fetch() == [[0.0], [1.0], None]


def test_rows_that_cannot_be_copied_are_no_tensors_without_numbers(monkeypatch: pytest.MonkeyPatch):
    def fail(rows: list[torch.Tensor]) -> RowCopy:
        raise MemoryError("no memory that is pinned")

    capture = [True]
    monkeypatch.setattr("otel_torch.statistics.read_rows.is_capturing", lambda: capture[0])
    monkeypatch.setattr("otel_torch.statistics.read_rows.RowCopy", fail)
    reading = RowTransfer(
        [Measurement(row, ("sum",), 1, 1, [1], "torch.float32") for row in rows(2, 1)]
    )
    capture[0] = False
    for _ in range(2):
        with pytest.raises(MemoryError):
            reading.fetch()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_program_that_captures_a_graph_keeps_it_and_what_came_before_is_recorded(tmp_path):
    done = run_python(
        tmp_path,
        """
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(20)]).cuda()
x = torch.randn(8, 64, device="cuda")
stream = torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
with torch.no_grad(), torch.cuda.stream(stream):
    for _ in range(3):
        wanted = model(x)
torch.cuda.current_stream().wait_stream(stream)
graph = torch.cuda.CUDAGraph()
with torch.no_grad(), torch.cuda.graph(graph):
    y = model(x)
graph.replay()
torch.cuda.synchronize()
assert torch.equal(y, wanted)
""",
        fresh=True, OTEL_TORCH_ENABLED="1", OTEL_TORCH_JSONL="run.jsonl", OTEL_TORCH_CAPTURE="parity",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("a CUDA graph is captured") == 1
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    outputs = [line for line in lines if line["module"] == "" and line["tensor"] == "out"]
    assert ["mean" in line for line in outputs] == [True, True, True, False]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_is_not_waited_for_and_has_the_numbers_of_the_host():
    values = torch.randn(5, 1000)
    on_device = values.cuda()
    measure(on_device, COLUMNS)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        reading = RowTransfer([measure(on_device, COLUMNS) for _ in range(50)])
        reading.is_ready()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted = read_rows([measure(values, COLUMNS)])[0]
    for row in reading.fetch():
        assert row == pytest.approx(wanted, rel=1e-6, abs=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_rows_that_several_streams_write_are_all_there():
    streams = [torch.cuda.Stream() for _ in range(4)]
    values = [torch.full((1_000_000,), float(number), device="cuda") for number in range(4)]
    torch.cuda.synchronize()
    measured = []
    for stream, value in zip(streams, values, strict=True):
        with torch.cuda.stream(stream):
            measured.append(measure(value, ("sum",)))
    assert [row and row[SUM] for row in read_rows(measured)] == [
        number * 1e6 for number in range(4)
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_whole_forward_on_a_gpu_makes_nobody_wait(tmp_path):
    done = run_python(
        tmp_path,
        """
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(20)]).cuda()
x = torch.randn(8, 64, device="cuda")
model(x); torch.cuda.synchronize()
before = torch.cuda.memory_stats()["num_alloc_retries"], torch.cuda.memory_reserved()
torch.cuda.set_sync_debug_mode("error")
for _ in range(20):
    model(x)
torch.cuda.set_sync_debug_mode("default")
assert (torch.cuda.memory_stats()["num_alloc_retries"], torch.cuda.memory_reserved()) == before
print("done")
""",
        fresh=True, OTEL_TORCH_ENABLED="1", OTEL_TORCH_JSONL="run.jsonl",
    )  # fmt: skip
    assert done.returncode == 0 and "done" in done.stdout, done.stderr
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 21 * 21
