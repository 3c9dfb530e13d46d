"""What programs print tells whether all was compared, and what else to compare."""

from __future__ import annotations

from pathlib import Path

import pytest

from otel_torch.bisecting.bisection import Bisection
from otel_torch.bisecting.printed import PrintedNumber, find_printed, pair_lines
from otel_torch.bisecting.search import Options, bisect_programs
from otel_torch.graph.builder import GraphBuilder
from otel_torch.graph.graph import Graph
from otel_torch.parity.sides import Sides
from tests.bisecting.recorded_runs import RecordedRuns


def write(folder: Path, **outputs: str) -> dict[str, Path]:
    for name, text in outputs.items():
        (folder / name).write_text(text)
    return {name: folder / name for name in outputs}


def test_lines_with_the_same_words_are_paired_in_order(tmp_path: Path) -> None:
    paths = write(
        tmp_path,
        reference="step 1 loss 2.5000\nnorm 0.10\nstep 2 loss 2.25\nonly here 1.5\n",
        port="step 1 loss 2.5001\nstep 2 loss 2.40\nnorm 0.10\nnorm 0.30\n",
    )
    pairs = pair_lines([paths["reference"]], paths["port"])
    texts = [(pair.reference.text, pair.port.text) for pair in pairs]
    assert texts == [
        ("step 1 loss 2.5000", "step 1 loss 2.5001"),
        ("step 2 loss 2.25", "step 2 loss 2.40"),
    ]
    apart = [pair.reference.numbers_apart(pair.port, 0.0) for pair in pairs]
    assert [[(own.value, its.value) for own, its in numbers] for numbers in apart] == [
        [],
        [(2.25, 2.40)],
    ]


def test_lines_are_paired_though_they_print_other_tokens(tmp_path: Path) -> None:
    paths = write(
        tmp_path, reference="[7, 12] 0.52\n3 of 4: 0.71\n", port="[7, 9, 1] 0.54\n2 of 4: 0.7\n"
    )
    (pair,) = pair_lines([paths["reference"]], paths["port"])
    assert pair.port.text == "[7, 9, 1] 0.54"


def test_what_the_reference_prints_otherwise_each_time_is_left_out(tmp_path: Path) -> None:
    paths = write(
        tmp_path, first="took 3.1 s\nloss nan\n", second="took 3.4 s\nloss nan\n", port="took 9.9 s\nloss 0.5\n"
    )  # fmt: skip
    (pair,) = pair_lines([paths["first"], paths["second"]], paths["port"])
    assert pair.reference.text == "loss nan"
    assert pair.reference.numbers_apart(pair.port, 0.0)


def test_digits_that_are_not_printed_tell_nothing(tmp_path: Path) -> None:
    paths = write(tmp_path, reference="eps 1.2e-03 mean 1e-9\n", port="eps 1.3e-03 mean 3e-8\n")
    (pair,) = pair_lines([paths["reference"]], paths["port"])
    assert not pair.reference.numbers_apart(pair.port, 0.0)


PREPARED = """
import torch
from torch import nn
torch.manual_seed(0)
x = torch.linspace(-2, 2, 48).sin().reshape(6, 8)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
with torch.no_grad():
    made = model(x)
    chosen = made.softmax(-1)
"""
# of a loss of some numbers both programs print one alone: what they return matches
REFERENCE = """
    share = chosen.mean(0)
    loss = (share * share).sum() * 4
    print(f"balance {loss.item():.7f}")
"""
PORT = """
    share = chosen.sum(0) / COUNT
    loss = 4 * torch.dot(share, share)
    print(f"balance {loss.item():.7f}")
"""


def bisect(folder: Path, count: str) -> Bisection:
    port = PREPARED + PORT.replace("COUNT", count)
    return bisect_programs(RecordedRuns(folder, PREPARED + REFERENCE, port), Options())


def test_a_number_that_is_printed_is_compared(tmp_path: Path) -> None:
    assert bisect(tmp_path / "legal", "len(chosen)").verdict == "match"
    answer = bisect(tmp_path / "wrong", "chosen.numel()")
    (fault,) = answer.faults
    assert fault.port_line is not None and fault.port_line.text.startswith("share = chosen.sum(0)")


SHOWN = """
    print(f"total {sum(TERMS):.7f}")
"""


@pytest.mark.parametrize("terms", ["chosen[0].tolist()", "chosen[1].tolist()[:2]"])
def test_other_numbers_that_no_tensor_has_make_a_match_partial(tmp_path: Path, terms: str) -> None:
    reference = PREPARED + SHOWN.replace("TERMS", "chosen[0].tolist()")
    port = PREPARED + SHOWN.replace("TERMS", terms)
    answer = bisect_programs(RecordedRuns(tmp_path, reference, port), Options())
    if reference == port:
        assert answer.verdict == "match" and len(answer.runs) == 2
    else:
        assert answer.verdict == "partial"
        assert (
            "the programs print other numbers, `total 1.0000000` and `total" in answer.report.reason
        )


FUNCTIONS = """
import torch
torch.manual_seed(0)
x = torch.linspace(-2, 2, 48).sin().reshape(6, 8)
w = torch.randn(8, 16)
"""
WHOLE = """
scores = (x @ w).log_softmax(-1)
best = scores.amax(-1).cumsum(0)
print(f"score {best[-1].item():.7f}")
"""
# another program: it goes through the rows one by one, and keeps only a running sum
STEPS = """
best = torch.zeros(())
for row in x:
    scores = w.T @ row
    best = best + scores.max() - scores.FUNCTION
print(f"score {best.item():.7f}")
"""


def test_programs_that_return_nothing_in_common_are_compared_by_what_they_print(
    tmp_path: Path,
) -> None:
    def of(name: str, function: str, print_: str = "print") -> Bisection:
        port = STEPS.replace("FUNCTION", function)
        texts = [FUNCTIONS + text.replace("print", print_) for text in (WHOLE, port)]
        return bisect_programs(RecordedRuns(tmp_path / name, *texts), Options())

    assert of("quiet", "logsumexp(0)", "str").verdict == "incomparable"
    legal = of("legal", "logsumexp(0)")
    assert legal.verdict == "match"
    assert any("compared by the numbers that both print" in text for text in legal.report.warnings)
    answer = of("wrong", "exp().sum()")
    (fault,) = answer.faults
    assert fault.port_line is not None and fault.port_line.text.startswith("best = best + scores")


# the reference has the numbers in one tensor; the port has them one by one, of fewer candidates
TOGETHER = """
best = (x @ w).index_fill(-1, torch.arange(12, 16), -1e9).log_softmax(-1).amax(-1)
for number in best.tolist():
    print(f"score {number:.7f}")
"""
ONE_BY_ONE = """
for row in x:
    scores = w.T[:12] @ row
    print(f"score {(scores.max() - scores.FUNCTION).item():.7f}")
"""


def test_programs_that_only_print_the_same_match(tmp_path: Path) -> None:
    def of(name: str, function: str) -> Bisection:
        texts = [FUNCTIONS + text for text in (TOGETHER, ONE_BY_ONE.replace("FUNCTION", function))]
        return bisect_programs(RecordedRuns(tmp_path / name, *texts), Options())

    legal = of("legal", "logsumexp(0)")
    assert legal.verdict == "match"
    assert any("compared by the numbers that both print" in text for text in legal.report.warnings)
    wrong = of("wrong", "mean()")
    assert wrong.verdict != "match"
    reason = wrong.report.reason or wrong.faults[0].port_line.text
    assert "the programs print other numbers, `score" in reason


def graph_of(*values: list[float]) -> Graph:
    """Return a graph of values with these elements."""
    builder = GraphBuilder(width=1)
    for own in values:
        statistics = {"mean": sum(own) / len(own), "min": min(own), "max": max(own)}
        builder.add_value(
            shape=(len(own),), roundoff=1e-7, sketch=[0.0], statistics=statistics, leaf="constant"
        )
    return builder.finish()


def test_a_number_stands_beside_one_that_is_as_alone() -> None:
    # each of them is also among all, and of each program another one is the largest
    graphs = graph_of([1.5], [2.5], [1.5, 2.5]), graph_of([2.6], [1.6], [2.6, 1.6])

    def found(reference: str, port: str) -> object:
        return find_printed(graphs, Sides(*map(PrintedNumber.read, (reference, port))))

    assert found("1.50000", "2.60000") == Sides(0, 0)
    assert found("2.50000", "1.60000") == Sides(1, 1)
    assert found("2.00000", "2.10000") == Sides(2, 2)  # the means of both
    assert found("2.00000", "2.60000") == Sides(2, 2)
    assert found("2.50000", "2.10000") == Sides(2, 2)
    assert found("1.50000", "3.00000") is None and found("1.5", "2.6") is None
