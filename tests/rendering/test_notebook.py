"""How results look in a REPL and a notebook: short, and as HTML without scripts or raw names."""

from __future__ import annotations

import copy
import html.parser
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import otel_torch
from tests.support import run_python

EVIL = "<script>alert(1)</script>"


MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(self.norm(x))

torch.manual_seed(0)
model = nn.Sequential(*[Block() for _ in range(60)])
model.add_module("<script>alert(1)</script>", Block())
"""
PROGRAM = """
with torch.no_grad():
    BREAK
    for _ in range(3):
        model(torch.ones(2, 8))
"""


def deep_model() -> nn.Module:
    """Return the model that the recordings are of."""
    names: dict[str, Any] = {}
    exec(MODEL, names)
    model: nn.Module = names["model"]
    return model


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("recordings")
    fault = "model[7].linear.weight[0] *= 3"
    for name, line in (("ref", "pass"), ("port", fault)):
        run_python(
            folder,
            MODEL + PROGRAM.replace("BREAK", line),
            OTEL_TORCH_CAPTURE="parity",
            OTEL_TORCH_JSONL=f"{name}.jsonl",
        )
    return folder / "ref.jsonl", folder / "port.jsonl"


class Tags(html.parser.HTMLParser):
    """The tags of a piece of HTML, which must be balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert not any(name in ("src", "href") or name.startswith("on") for name, _ in attrs)
        self.tags.append(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def results(recordings: tuple[Path, Path]) -> dict[str, Any]:
    model = deep_model()
    x = torch.ones(2, 8)
    with otel_torch.track(model) as tracker, torch.no_grad():
        model(x)
    cache = otel_torch.Cache().attach(model)
    with torch.no_grad(), cache as cached:
        model(x)
    return {
        "diff": otel_torch.diff(*recordings),
        "match": otel_torch.diff(recordings[0], recordings[0]),
        "scan": otel_torch.scan(model, x),
        "tracker": tracker,
        "cache": cache,
        "cached": cached,
        "rows": otel_torch.read_recording(recordings[0]),
    }


@pytest.fixture(scope="module")
def shown(recordings: tuple[Path, Path]) -> dict[str, Any]:
    return results(recordings)


NAMES = ["diff", "match", "scan", "tracker", "cache", "cached", "rows"]


@pytest.mark.parametrize("name", NAMES)
def test_the_text_of_a_result_is_short(shown: dict[str, Any], name: str) -> None:
    text = repr(shown[name])
    limit = 41 if name == "cached" else 8  # a cache prints a part of its tree
    assert len(text.splitlines()) <= limit and len(text) < 3000
    assert " at 0x" not in text and "tensor(" not in text


@pytest.mark.parametrize("name", NAMES)
def test_the_html_of_a_result_is_short_escaped_and_without_a_script(
    shown: dict[str, Any], name: str
) -> None:
    text = shown[name]._repr_html_()
    assert len(text) < 20_000 and EVIL not in text
    assert set(Tags(text).tags) <= {"div", "b", "br", "table", "tr", "th", "td", "pre"}


def test_a_comparison_says_where_and_why(shown: dict[str, Any]) -> None:
    text, page = repr(shown["diff"]), shown["diff"]._repr_html_()
    assert text.startswith("diverged: ") and "7.linear" in text
    assert shown["diff"].first.explanation in text
    assert "7.linear" in page and "<table>" in page
    assert repr(shown["match"]).startswith("match: ")


def test_a_tracker_shows_its_modules(shown: dict[str, Any]) -> None:
    assert repr(shown["tracker"]).startswith("Tracker(stashes=")
    assert repr(shown["tracker"][0]) == "Stash(0.norm, LayerNorm, output, float32[2, 8])"
    assert "<td>0.norm</td><td>LayerNorm</td><td>output</td>" in shown["tracker"]._repr_html_()
    assert f"and {len(shown['tracker']) - 30} more" in shown["tracker"]._repr_html_()


def test_rows_are_a_list_that_says_what_it_holds(
    shown: dict[str, Any], recordings: tuple[Path, Path]
) -> None:
    rows = shown["rows"]
    lines = [json.loads(line) for line in recordings[0].read_text().splitlines()]
    assert rows == lines and isinstance(rows, list)
    assert repr(rows).startswith(f"{recordings[0]}: {len(lines):,} records of ")
    assert repr(rows).endswith("steps 0 to 2")
    for same in (copy.deepcopy(rows), pickle.loads(pickle.dumps(rows))):
        assert same == rows and repr(same) == repr(rows)
