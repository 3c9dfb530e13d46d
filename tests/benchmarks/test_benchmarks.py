"""Every benchmark runs at its smallest size and returns the figures of its table. No test depends
on time.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.figures import ROOT, Figure, environment, module_command
from tests.benchmarks.pairing import BARE, Rounds, interleave, plainly
from tests.sampling import sample

# programs of a quarter of a minute each
pytestmark = pytest.mark.scoreboard

driver = importlib.import_module("tests.benchmarks.__main__")
ALL = [
    "compiled",
    "caching",
    "six_statistics",
    "small_tensors",
    "graph",
    "gpu",
    "training",
    "laws",
    "regions",
    "telemetry",
    "exit",
    "startup",
    "large",
    "bandwidth",
    "peers",
    "growth",
    "diff",
    "ranks",
    pytest.param("fastvideo_trace", marks=pytest.mark.fastvideo),
]
# why a figure may be missing
EXCUSES = ("no GPU here", "is not installed here")


@functools.cache
def smallest(name: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        module_command(name, "--smallest", "--json", "-"),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    figures: list[dict[str, Any]] = json.loads(done.stdout)["figures"]
    assert figures
    return figures


def check(figure: dict[str, Any]) -> None:
    assert set(figure) == {"name", "ours", "goal", "met", "detail", "spread"}
    if figure["ours"] is None:
        assert any(excuse in figure["detail"] for excuse in EXCUSES), figure
    else:
        assert math.isfinite(figure["ours"])
        assert figure["met"] is None or figure["met"] == (figure["ours"] <= figure["goal"])


@pytest.mark.parametrize("name", sample(ALL, len(ALL)))
def test_runs_at_its_smallest(name: str) -> None:
    if name == "diff":
        pytest.importorskip(
            "orjson", reason="`make bench` installs the readers that diff is held against"
        )
    for figure in smallest(name):
        check(figure)


def test_nothing_is_lost_by_processes_that_record_at_once() -> None:
    lost = [figure for figure in smallest("large") if "lost" in figure["name"]]
    assert [figure["ours"] for figure in lost] == [0]


def test_every_benchmark_is_in_the_table() -> None:
    shared = {"pairing", "figures", "sides", "history", "test_benchmarks"}
    files = {
        path.stem
        for path in (ROOT / "tests" / "benchmarks").glob("*.py")
        if not path.stem.startswith("_")
    }
    assert files - shared == set(driver.BENCHMARKS)


def test_a_goal_within_the_spread_is_neither_met_nor_missed() -> None:
    figure = Figure("step", 1.008, 1.01, "a step", spread=(1.002, 1.03))
    assert figure.met is None and figure.plain()["detail"] == "cannot tell; a step"
    assert Figure("step", 1.008, 1.01, spread=(1.002, 1.009)).met is True
    assert Figure("step", 1.02, 1.01, spread=(1.015, 1.03)).met is False
    assert "| step | 1 to 1.03 | ≤ 1.01 | cannot tell |" in driver.table([figure.plain()])


def test_a_figure_that_is_worse_than_in_the_run_before_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    history, page = tmp_path / "history.jsonl", tmp_path / "page.md"
    page.write_text((ROOT / "docs" / "performance.md").read_text())
    measured = iter([1.0, 1.05, 1.3])
    monkeypatch.setattr(driver, "BENCHMARKS", {"step": "a step"})
    monkeypatch.setattr(
        driver, "figures_of", lambda name: [Figure("a step", next(measured), 2).plain()]
    )
    said = []
    for _ in range(3):
        assert driver.main(["--history", str(history), "--page", str(page)]) == 0
        said.append(capsys.readouterr().out.splitlines()[-1])
    assert said[1:] == ["none", "a step: 1.05 → 1.3"]
    runs = [json.loads(line) for line in history.read_text().splitlines()]
    assert [run["figures"][0]["ours"] for run in runs] == [1.0, 1.05, 1.3]


def test_a_benchmark_that_fails_is_a_line_of_the_table() -> None:
    (figure,) = driver.figures_of("no_such_benchmark")
    assert figure["ours"] is None and "no_such_benchmark" in figure["detail"]
    assert "did not run" in driver.table([figure])


def test_the_page_is_rewritten_between_its_markers(tmp_path: Path) -> None:
    page, json_path = tmp_path / "page.md", tmp_path / "found.json"
    page.write_text((ROOT / "docs" / "performance.md").read_text())
    assert driver.main(["gpu", "--page", str(page), "--json", str(json_path)]) == 0
    assert "device synchronisations in a forward" in page.read_text()
    assert "six statistics, float32" not in page.read_text()
    assert {figure["benchmark"] for figure in json.loads(json_path.read_text())["figures"]} == {
        "gpu"
    }
    assert (
        driver.rewritten("a <!-- x -->old<!-- end of x --> b", x="new")
        == "a <!-- x -->\nnew\n<!-- end of x --> b"
    )
    with pytest.raises(ValueError, match="no <!-- y -->"):
        driver.rewritten("nothing", y="new")


def test_each_side_runs_once_a_round_and_as_often_as_asked() -> None:
    calls: list[str] = []
    sides = {name: plainly(functools.partial(calls.append, name)) for name in ("one", "two")}
    ratios = interleave(sides, rounds=8, times=2, warm_up=1)
    turns = [calls[start : start + 3] for start in range(0, 48, 3)]
    assert all(len(set(turn)) == 1 for turn in turns)
    rounds = [(first[0], second[0]) for first, second in zip(turns[::2], turns[1::2], strict=True)]
    assert set(rounds) == {("one", "two"), ("two", "one")}  # both orders come up
    assert ratios.cpu.count == ratios.wall.count == 8


def test_ratios_are_of_the_same_round() -> None:
    # the machine is ten times slower in the second round, for both sides alike
    rounds = Rounds({BARE: [1.0, 10.0, 1.0], "theirs": [1.4, 14.0, 1.4], "ours": [1.1, 11.0, 1.1]})
    assert rounds.ratio("ours").value == pytest.approx(1.1)
    assert rounds.mixed_ratio({"theirs": 0.5, "ours": 0.5}).value == pytest.approx(1.25)
    assert rounds.share("ours", "theirs").value == pytest.approx(0.25)
    assert rounds.overhead("theirs") == "+40.0 %"
    assert rounds.cost_share("ours", "theirs", {"ours": 2.0, "theirs": 1.0}).value == pytest.approx(
        0.125
    )


def test_a_goal_is_met_at_the_goal() -> None:
    assert Figure("f", 1.1, 1.1).met and not Figure("f", 1.2, 1.1).met
    assert Figure("f", None, 1.1).met is None and Figure("f", 1.0).met is None
