"""Which changes are tried first."""

from __future__ import annotations

import json
from pathlib import Path

from otel_torch.bisecting.versions.ranking import CodePlace, ExecutedFunctions, rank

CALLS = [
    # function, caller
    ("a.py", "<module>", "", ""),
    ("a.py", "Net.__init__", "", ""),
    ("a.py", "Net.forward", "", ""),
    ("a.py", "Block.forward", "a.py", "Net.forward"),
    ("b.py", "scale", "a.py", "Block.forward"),
    ("b.py", "inner.<locals>.loop", "b.py", "scale"),
    ("c.py", "far", "", ""),
]


def executed(tmp_path: Path) -> ExecutedFunctions:
    lines = [
        [f"/p/{file}", name, caller and f"/p/{caller}", own] for file, name, caller, own in CALLS
    ]
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    functions = ExecutedFunctions()
    functions.read(tmp_path, lambda file: file.removeprefix("/p/"))
    return functions


def names(tmp_path: Path, anchors: list[CodePlace], weight: str | None = None) -> list[str]:
    places = [place for place in executed(tmp_path).order if place.name]
    candidates = dict.fromkeys(reversed(places), "function")
    candidates[CodePlace("b.py", "FACTOR")] = "value"
    texts = {
        CodePlace("b.py", "scale"): "return x * FACTOR",
        CodePlace("c.py", "far"): "module.bias.data = x",
    }
    ranked = rank(
        candidates,
        executed(tmp_path),
        anchors,
        lambda place, side: texts.get(place, "") if side else "",
        weight,
    )
    return [place.name for place in ranked]


def test_the_function_of_the_line_is_first_then_by_calls(tmp_path: Path) -> None:
    assert names(tmp_path, [CodePlace("a.py", "Block.forward")]) == [
        "Block.forward", "Net.forward", "scale", "inner", "FACTOR", "Net.__init__", "far",
    ]  # fmt: skip


def test_a_value_is_as_near_as_what_names_it(tmp_path: Path) -> None:
    assert names(tmp_path, [CodePlace("b.py", "scale")])[:2] == ["scale", "inner"]
    assert "FACTOR" in names(tmp_path, [CodePlace("b.py", "scale")])[:4]


def test_of_weights_what_names_them_is_first_then_what_makes_them(tmp_path: Path) -> None:
    ranked = names(tmp_path, [CodePlace("a.py", "Block.forward")], "bias")
    assert ranked[0] == "far" and set(ranked[1:3]) == {"Net.__init__", "Block.forward"}
