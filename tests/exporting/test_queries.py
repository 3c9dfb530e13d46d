"""The commands of `docs/show.md` and its five queries run, and find what they say."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess

import duckdb
import pytest

from tests.interpreters import folder_of_commands

SHOW = (pathlib.Path(__file__).parents[2] / "docs" / "show.md").read_text()
PAGE = SHOW.partition("\n## In other tools\n")[2]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Return the columns and rows of each query."""
    folder = tmp_path_factory.mktemp("page")
    (commands,) = re.findall(r"^```sh\n(.*?)^```", PAGE, re.S | re.M)
    path = os.pathsep.join([str(folder_of_commands()), os.environ["PATH"]])
    own = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    subprocess.run(
        ["bash", "-euc", commands], cwd=folder, env=own | {"PATH": path}, check=True, timeout=300
    )
    queries = re.findall(r"^```sql\n(.*?)^```", PAGE, re.S | re.M)
    assert len(queries) == 5
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        results = [duckdb.sql(query) for query in queries]
        return [
            [dict(zip(result.columns, row, strict=True)) for row in result.fetchall()]
            for result in results
        ]


def test_losses_by_rank_and_step(answers):
    assert [(row["rank"], row["step"]) for row in answers[0]] == [
        (rank, step) for rank in (0, 1) for step in range(20)
    ]
    assert all(row["loss"] > 0 and row["learning_rate"] == 0.01 for row in answers[0])


def test_growing_modules(answers):
    assert {row["module"] for row in answers[1]} == {"", "0", "1", "2"}
    assert sorted(answers[1], key=lambda row: -row["growth"]) == answers[1]


def test_differences_of_ranks(answers):
    assert len(answers[2]) == 4
    assert all(row["least"] < row["largest"] and row["of_rank"] in (0, 1) for row in answers[2])


def test_how_runs_ended(answers):
    assert [(row["recording"], row["ended_cleanly"]) for row in answers[3]] == [
        ("train.rank0", True),
        ("train.rank1", True),
    ]
    assert all(row["torch"] and row["threads"] for row in answers[3])


def test_lines_of_values(answers):
    assert len(answers[4]) == 5 and answers[4][0]["readers"] > 1
    assert all("model" in row["text"] or "loss" in row["text"] for row in answers[4])


def test_the_page_has_every_column_of_rows():
    from otel_torch.exporting.parquet import _COLUMNS

    section = PAGE.partition("\n#### Columns of `rows`\n")[2].partition("\n#### ")[0]
    assert set(_COLUMNS) | {"step"} == set(re.findall(r"`([a-z_0-9]+)`", section))
