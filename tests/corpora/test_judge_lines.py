"""A finding is graded by its line, its region and its module, in either program."""

from __future__ import annotations

from typing import Any

import pytest

from otel_torch.parity.finding import CodeLine, Finding, ListedOperation, Report
from tests.corpora import corpus_of
from tests.corpora.case import Line, Lines, Right, into, out_of
from tests.corpora.judge import Named
from tests.corpora.judge_lines import grade_line, grade_module

GATE = CodeLine("/lib/model.py", 7, "Block.forward", "x = residual + gate * y")
NEXT = CodeLine("/lib/model.py", 8, "Block.forward", "return self.norm(x)")
NOWHERE = (None, None, None, None)
READER = CodeLine("/lib/norms.py", 3, "Norm.forward", "return self.weight * x")


def _half(
    line: CodeLine, module: str = "blocks.0", tensor: str = "op[1]", side: str = "output"
) -> tuple[Any, ...]:
    return side, module, tensor, line


def _report(
    port: tuple[Any, ...], reference: tuple[Any, ...] = NOWHERE, *region: CodeLine
) -> Report:
    report = Report("diverged")
    report.first = _finding(port, reference)
    report.introduced = [report.first]
    report.operations = [], [ListedOperation("%1 = add(%0)", line, False) for line in region]
    return report


def _finding(port: tuple[Any, ...], reference: tuple[Any, ...]) -> Finding:
    side, module, tensor, line = reference
    port_side, port_module, port_tensor, port_line = port
    return Finding(
        model="M", module=module, tensor=tensor, loop=0, step=0, call=0, phase="forward",
        port_model="M", port_module=port_module, port_tensor=port_tensor, port_loop=0, port_step=0, port_call=0,
        rank=None, side=side, port_side=port_side, kind="value", error=None, floor=None, explanation="",
        line=line, port_line=port_line,
    )  # fmt: skip


def _right(port: Line, reference: Line | None = None) -> Right:
    return Right(lines=Lines((port,), (reference,) if reference else ()))


@pytest.mark.parametrize(
    ("right", "expected"),
    [
        (Line("gate * y"), "line"),
        (Line("gate * y", "model.py:Block.forward"), "line"),
        (Line("gate * y", module="blocks.0"), "line"),
        (Line("gate * y", module="blocks.1"), "other"),
        (Line("gate * y", "other.py"), "other"),
        (Line("self.norm(x)"), "region"),
        (Line("self.weight * x"), "other"),
    ],
)
def test_a_line_is_right_by_text_function_and_module(right: Line, expected: str) -> None:
    assert grade_line(_right(right), _report(_half(GATE), NOWHERE, NEXT)) == expected


def test_a_line_of_the_reference_is_as_good() -> None:
    report = _report(_half(NEXT), _half(GATE))
    assert grade_line(_right(Line("nothing"), Line("gate * y")), report) == "line"
    assert grade_line(_right(Line("gate * y")), report) == "other"


@pytest.mark.parametrize(
    ("half", "leaf", "expected"),
    [
        (_half(READER, "norm", "param.weight", "parameter"), "norm.weight", "line"),
        (_half(READER, "norm", "param.weight", "parameter"), "head.weight", "other"),
        (_half(READER, "norm", "param.weight", "parameter"), "norm.", "line"),
        # the line that reads a weight, in the module that owns it
        (_half(READER, "norm"), "norm.weight", "line"),
        (_half(READER, "norm.inner"), "norm.weight", "other"),
        (_half(READER, "blocks.0"), "norm.weight", "other"),
    ],
)
def test_a_weight_is_right_by_its_name_or_where_it_is_read(
    half: tuple[Any, ...], leaf: str, expected: str
) -> None:
    assert grade_line(_right(Line(leaf=leaf)), _report(half)) == expected


def test_a_match_misses_a_fault_and_a_clean_pair_has_no_line() -> None:
    match = Report("match")
    assert grade_line(_right(Line("gate * y")), match) == "missed"
    assert grade_line(None, match) == grade_line(Right(), match) == ""


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("up.0.resnets.1", "exact"),
        ("up.0", "near"),  # it calls what its list holds
        ("up.0.resnets.1.conv", "near"),
        ("up", "wrong"),
        ("", "wrong"),
    ],
)
def test_a_module_is_right_or_beside_the_right_one(module: str, expected: str) -> None:
    finding = _finding(_half(GATE, module), NOWHERE)
    right = Right(places=(into("up.0.resnets.1"),))
    assert grade_module(right, Named.of(finding)) == expected
    assert grade_module(right, None) == "missed"
    assert grade_module(Right(causes=("norm",)), Named.of(finding)) == ""
    assert grade_module(None, Named.of(finding)) == "false"


def test_a_loss_runs_in_no_module() -> None:
    finding = _finding(_half(GATE, ""), NOWHERE)
    loss = Right(places=(out_of(""),), phases=("loss",))
    assert grade_module(loss, Named.of(finding)) == "exact"
    elsewhere = Right(places=(out_of("head"),), phases=("backward",))
    assert grade_module(elsewhere, Named.of(finding)) == "wrong"


@pytest.mark.parametrize("name", ["small", "causes", "libraries", "training"])
def test_every_fault_has_right_lines(name: str) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("diffusers")
    cases = corpus_of(name).cases.values()
    assert [case.name for case in cases if case.right is not None and not case.right.lines] == []
