"""A helper that is right elsewhere is not at fault: the line that calls it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from otel_torch.bisecting.bisection import Bisection
from otel_torch.bisecting.search import Options, bisect_programs
from tests.bisecting.recorded_runs import RecordedRuns

PROGRAM = """
import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(6, 16)
weights = [torch.randn(16, 16) / 4 for _ in range(3)]

def mix(x, weight, slope=SLOPE):
    return torch.nn.functional.leaky_relu(x @ weight, slope)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(weights)

    def forward(self, x):
        first = mix(x, self.weights[0])
        second = mix(first, self.weights[1]PASSED)
        third = mix(second, self.weights[2])
        return third + first

with torch.no_grad():
    Net()(x)
"""


def bisect(folder: Path, slope: str, passed: str) -> Bisection:
    def program(slope: str, passed: str) -> str:
        return PROGRAM.replace("SLOPE", slope).replace("PASSED", passed)

    runs = RecordedRuns(folder, program("0.01", ""), program(slope, passed))
    return bisect_programs(runs, Options())


@pytest.mark.parametrize(
    ("slope", "passed", "text", "caller"),
    [
        ("0.01", ", 0.1", "second = mix(first, self.weights[1], 0.1)", None),
        ("0.1", "", "return torch.nn.functional.leaky_relu(", "first = mix(x, self.weights[0])"),
    ],
    ids=["what is passed", "the helper"],
)
def test_the_line_that_calls_a_helper_is_named_if_the_helper_is_right(
    tmp_path: Path, slope: str, passed: str, text: str, caller: str | None
) -> None:
    answer = bisect(tmp_path, slope, passed)
    fault = answer.faults[0]
    assert fault.port_line is not None and fault.port_line.text.startswith(text)
    assert fault.proof == "proven"
    if caller is not None:
        assert fault.port_callers[0].text == caller
        assert "port called from" in repr(answer)
