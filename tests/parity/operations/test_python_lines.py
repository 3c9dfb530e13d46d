"""The lines without an operation that set what a line at fault reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from otel_torch.parity.finding import CodeLine
from otel_torch.parity.operations.python_lines import python_lines

PROGRAM = dedent("""\
    import torch

    THETA = 10000.0

    class Net:
        def __init__(self, rate, eps=1e-5):
            self.eps = eps
            self.rate = rate
            self.rate = 2 * rate

        def modulate(self, x, scale, parts):
            batch = x.shape[0]
            first, second = parts
            third = torch.tanh(x)
            return x * scale + first * self.eps + self.rate + batch + third

        def rotate(self, x, position):
            angle = THETA ** position
            for step in range(3):
                x = x * step * angle
            return x

    def main(x, net):
        decay = 0.9
        parts = [1, 2]
        y = net.modulate(
            x, scale=decay + 1, parts=parts
        )
        return net.rotate(y, decay - 1)
    """)
MODULATE, ROTATE, CALL, CALL_OF_ROTATE = 15, 20, 26, 29


def lines(
    folder: Path, number: int, callers: Sequence[int], computed: Sequence[int] = ()
) -> list[int]:
    file = folder / "net.py"
    file.write_text(PROGRAM)
    text = PROGRAM.splitlines()
    at = [CodeLine(str(file), line, "", text[line - 1].strip()) for line in (number, *callers)]
    found = python_lines(at[0], at[1:], {(str(file), line) for line in computed})
    assert all(text[line.line - 1].strip() == line.text for line in found)
    return sorted(line.line for line in found)


def test_names_are_followed_to_where_they_are_set_and_through_arguments(tmp_path: Path) -> None:
    # no size, no attribute that is set twice, and nothing that runs an operation
    expected = [7, 13, 24, 25, 26]
    assert lines(tmp_path, MODULATE, [CALL], computed=[14, 15]) == expected


def test_without_a_caller_arguments_are_not_known(tmp_path: Path) -> None:
    assert lines(tmp_path, MODULATE, [], computed=[14, 15]) == [7, 13]


def test_loops_globals_and_numbers_that_are_passed_are_seen(tmp_path: Path) -> None:
    expected = [3, 18, 19, 24, CALL_OF_ROTATE]
    assert lines(tmp_path, ROTATE, [CALL_OF_ROTATE], computed=[20, *range(26, 29)]) == expected


def test_a_size_that_a_caller_passes_to_a_module_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    text = [
        "class Net:",
        "    def forward(self, x, start):",
        "        return x[start:]",
        "def main(net, x):",
        "    return net(x, x.shape[0])",
    ]
    file.write_text("\n".join(text))
    read, call = (CodeLine(str(file), number, "", text[number - 1].strip()) for number in (3, 5))
    assert python_lines(read, [call], {(str(file), 3)}) == (replace(call, function="main"),)


@pytest.mark.parametrize("text", ["other = 1", "def ("])
def test_another_text_or_none_tells_nothing(tmp_path: Path, text: str) -> None:
    file = tmp_path / "net.py"
    line = CodeLine(str(file), 1, "", "x = y")
    assert python_lines(line, [], set()) == ()
    file.write_text(text)
    assert python_lines(line, [], set()) == ()
