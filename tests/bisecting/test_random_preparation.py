"""Numbers that a program draws and does not use, such as weights before a checkpoint is loaded."""

from __future__ import annotations

from pathlib import Path

from otel_torch.bisecting.search import Options, bisect_programs
from tests.bisecting.recorded_runs import RecordedRuns

PROGRAM = """
import torch
torch.seed()  # other numbers in each run
drawn = DRAWN
torch.manual_seed(0)
x, w = torch.randn(6, 8), torch.randn(8, 16)
h = torch.FUNCTION(x @ w)
print(f"mean {h.mean().item():.7f}")
out = h.cumsum(-1)
"""


def program(drawn: str, function: str) -> str:
    return PROGRAM.replace("DRAWN", drawn).replace("FUNCTION", function)


def test_a_reference_may_draw_what_it_does_not_use(tmp_path: Path) -> None:
    runs = RecordedRuns(
        tmp_path, program("torch.randn(32, 32)", "tanh"), program("None", "sigmoid")
    )
    answer = bisect_programs(runs, Options())
    (fault,) = answer.faults
    assert fault.proof == "proven" and fault.port_line is not None
    assert fault.port_line.text == "h = torch.sigmoid(x @ w)"


def test_a_result_that_is_other_in_each_run_cannot_be_compared(tmp_path: Path) -> None:
    drawn = "torch.randn(8, 16)"
    reference = program(drawn, "tanh").replace("x @ w)", "x @ (w + drawn))")
    runs = RecordedRuns(tmp_path, reference, program("torch.zeros(8, 16)", "sigmoid"))
    answer = bisect_programs(runs, Options())
    assert answer.verdict == "incomparable"
    assert answer.report.reason is not None and "in each run" in answer.report.reason
