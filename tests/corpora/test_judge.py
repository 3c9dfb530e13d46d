"""The grades mean what they say, and the command prints them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.corpora import __main__ as command
from tests.corpora import page
from tests.corpora.case import Place, Right, into, out_of, parameter_of
from tests.corpora.judge import Named, Recordings, fastvideo_rule, grade


def _row(
    module: str, tensor: str, order: tuple[int, int], **statistics: object
) -> dict[str, object]:
    row = {"module": module, "tensor": tensor, "step": 0, "phase": "forward", "order": order}
    return row | {"shape": [2], "abs_mean": 1.0, "max": 2.0} | statistics


def _recording(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def recordings(tmp_path: Path) -> Recordings:
    """a, then b, which holds b.c, then d; the port's b.c is 1 % off, and so is all that follows."""
    order = {"a": (1, 2), "b.c": (4, 5), "b": (3, 6), "d": (7, 8), "": (0, 9)}
    off = {"b.c", "b", "d", ""}
    reference = _recording(
        tmp_path / "reference.jsonl", *(_row(name, "out", order[name]) for name in order)
    )
    port = _recording(
        tmp_path / "port.jsonl",
        *(_row(name, "out", order[name], abs_mean=1.01 if name in off else 1.0) for name in order),
    )
    return Recordings(reference, port, reference)


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (out_of("b.c"), "exact"),
        (into("b.c"), "near"),  # the same module
        (out_of("b"), "near"),  # its parent
        (into("d"), "late"),
        (out_of(""), "late"),
        (out_of("a"), "wrong"),
        (parameter_of("a"), "wrong"),
        (None, "missed"),
    ],
)
def test_a_named_place_is_graded_by_its_distance(
    recordings: Recordings, place: Place | None, expected: str
) -> None:
    named = None if place is None else Named(place, place)
    assert grade(Right(places=(out_of("b.c"),)), named, recordings) == (
        expected,
        expected == "exact",
    )
    assert grade(None, named, recordings)[0] == ("false" if place else "silent")


def test_the_event_next_to_the_right_one_is_near(recordings: Recordings) -> None:
    named = Named(None, into("d"))
    assert grade(Right(places=(out_of("b"),)), named, recordings)[0] == "near"


def test_fastvideos_rule_names_the_first_output_that_is_half_a_percent_off(
    recordings: Recordings,
) -> None:
    named = fastvideo_rule(recordings)
    assert named is not None and named.port == out_of("b.c")
    same = Recordings(recordings.port, recordings.port, recordings.port)
    assert fastvideo_rule(same) is None


def test_the_command_prints_a_line_each_and_their_sum(monkeypatch, capsys, tmp_path) -> None:
    arguments = ["causes", "--only", "llama_down", "--file", str(tmp_path / "scores.json")]
    monkeypatch.setattr(sys, "argv", ["tests.corpora", *arguments])
    command.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in lines[:2]] == [
        ["causes", "llama_down_scaled", variant, "exact"] for variant in ("tensors", "statistics")
    ]
    assert lines[2] == "" and "1 faults: 1 exact" in lines[3]
    assert len(json.loads((tmp_path / "scores.json").read_text())) == 2


@pytest.mark.parametrize("path", page.PAGES, ids=lambda path: path.name)
def test_the_pages_have_the_tables_of_the_file_of_scores(path) -> None:
    text = path.read_text()
    assert page.MARKED.search(text)
    assert text == page.updated(text), "python -m tests.corpora.page"
