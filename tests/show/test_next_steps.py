"""The steps after `otel-torch show`: what is wrong with a recording decides them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from otel_torch.cli.main import main, make_parser
from otel_torch.rendering.progress import Progress
from otel_torch.show.next_steps import next_steps
from otel_torch.show.overview import Overview, read_overview
from otel_torch.show.selection import Selection

CLEAN = {"ended_cleanly": True}
ROW = {
    "module": "block", "tensor": "out", "step": 0, "call": 0, "loop": 0, "model": "M",
    "phase": "forward", "max": 1.0, "nonfinite": 0,
}  # fmt: skip
BAD = {**ROW, "max": "NaN", "nonfinite": 3}
SPIKE = [
    {**ROW, "module": "", "phase": "train", "tensor": "loss", "step": step, "mean": value}
    for step, value in enumerate([1.0] * 30 + [50.0])
]


def write(folder: Path, *rows: dict[str, Any], meta: dict[str, Any], name: str = "run") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path.with_suffix(".meta.json").write_text(json.dumps(meta))
    return path


def overview_of(path: Path) -> Overview:
    return read_overview(Selection(str(path)), Progress())


@pytest.mark.parametrize(
    ("rows", "meta", "lines"),
    [
        ([ROW], CLEAN, []),
        (
            [ROW, BAD],
            CLEAN,
            [
                "OTEL_TORCH_ENABLED=1 OTEL_TORCH_JSONL={stem}-zoom.jsonl "
                "OTEL_TORCH_ON_NONFINITE=zoom PROGRAM_COMMAND",
                "otel-torch show {stem}-zoom.jsonl",
            ],
        ),
        ([BAD], {**CLEAN, "settings": {"OTEL_TORCH_ON_NONFINITE": "zoom"}}, []),
        (
            [ROW],
            {**CLEAN, "writing_ended": "max_bytes"},
            [
                "OTEL_TORCH_ENABLED=1 OTEL_TORCH_JSONL={stem}-whole.jsonl "
                "OTEL_TORCH_STEPS='*/10' PROGRAM_COMMAND"
            ],
        ),
        ([ROW], {"ended_cleanly": False}, ["otel-torch watch {stem}.jsonl"]),
        (SPIKE, CLEAN, ["otel-torch show {stem}.jsonl --html {stem}-page.html"]),
    ],
)
def test_what_is_wrong_decides(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    rows: list[dict[str, Any]],
    meta: dict[str, Any],
    lines: list[str],
) -> None:
    path = write(tmp_path, *rows, meta=meta)
    steps = next_steps(overview_of(path))
    stem = str(path.with_suffix(""))
    assert [step.line for step in steps] == [line.format(stem=stem) for line in lines]
    for step in steps:
        assert step.why and step.expects
        if step.command[0] == "otel-torch":
            make_parser(step.command[1]).parse_args(list(step.command[1:]))
    assert main(["show", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["next"] == [step.as_json() for step in steps]
    assert main(["show", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.endswith("".join(f"  {step.line}\n" for step in steps[-1:]))
    assert ("Next: " in text) == bool(steps)


def test_the_ranks_of_a_run_share_their_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, row in enumerate((ROW, BAD)):
        write(tmp_path / "runs", row, meta={**CLEAN, "rank": rank}, name=f"run.rank{rank}")
    folder = str(tmp_path / "runs")
    assert main(["show", folder, "--json"]) == 0
    again, show = json.loads(capsys.readouterr().out)["next"]
    assert again["environment"]["OTEL_TORCH_JSONL"] == f"{folder}-zoom/program.jsonl"
    assert show["command"] == ["otel-torch", "show", f"{folder}-zoom"]
    assert main(["show", folder]) == 0
    assert capsys.readouterr().out.count("Next: ") == 1
