"""`otel-torch export --parquet`: DuckDB and Polars read back what a recording holds."""

from __future__ import annotations

import glob
import json
import math
from pathlib import Path
from typing import Any

import duckdb
import polars
import pytest

from otel_torch.cli.main import main
from otel_torch.exporting import parquet
from otel_torch.recording.reader import read_recording

ROW: dict[str, Any] = {"module": "fc", "tensor": "out", "step": 0, "loop": 0, "call": 0}


def export(recording: Path, folder: Path) -> Path:
    assert main(["export", str(recording), "--parquet", str(folder)]) == 0
    return folder


def table(folder: Path, name: str, query: str = "SELECT * FROM rows") -> list[dict[str, Any]]:
    pattern = f"{glob.escape(str(folder))}/{name}/**/*.parquet".replace("'", "''")
    files = f"read_parquet('{pattern}', hive_partitioning = true)"
    result = duckdb.sql(f"WITH rows AS (FROM {files}) {query}")
    return [dict(zip(result.columns, row, strict=True)) for row in result.fetchall()]


def write(path: Path, *rows: dict[str, Any] | str) -> Path:
    path.write_text(
        "".join(row if isinstance(row, str) else f"{json.dumps(row)}\n" for row in rows)
    )
    return path


def test_rows_read_back_as_they_were_recorded(ranks, tmp_path):
    folder = export(ranks, tmp_path / "export")
    for rank in (0, 1):
        recorded = read_recording(ranks / f"run.rank{rank}.jsonl")
        query = f"SELECT * FROM rows WHERE rank = {rank} ORDER BY row_number"
        exported = table(folder, "rows", query)
        assert len(exported) == len(recorded) > 100
        for number, (row, was) in enumerate(zip(exported, recorded, strict=True), 1):
            assert (row["row_number"], row["recording"]) == (number, f"run.rank{rank}")
            for name, value in was.items():
                both_nan = value != value and row[name] != row[name]
                assert row[name] == value or both_nan, (name, row)
    assert any(math.isnan(row["mean"]) for row in table(folder, "rows") if row["tensor"] == "loss")


def test_each_rank_and_step_has_a_folder(ranks, tmp_path):
    folder = export(ranks, tmp_path / "export")
    found = {tuple(path.parts[-3:-1]) for path in (folder / "rows").glob("*/*/*.parquet")}
    assert found == {(f"rank={rank}", f"step={step}") for rank in (0, 1) for step in range(12)}
    assert not (folder / "values").exists()  # a training numbers no values


def test_polars_reads_the_same(ranks, tmp_path):
    folder = export(ranks, tmp_path / "export")
    frame = polars.scan_parquet(folder / "rows/**/*.parquet", hive_partitioning=True)
    losses = frame.filter(polars.col("tensor") == "loss").collect()
    assert sorted(zip(losses["rank"], losses["step"], strict=True)) == [
        (rank, step) for rank in (0, 1) for step in range(12)
    ]


def test_metadata_is_a_row_for_each_recording(ranks, tmp_path):
    rows = table(export(ranks, tmp_path / "export"), "metadata", "SELECT * FROM rows ORDER BY rank")
    assert [(row["rank"], row["recording"], row["run_id"], row["world_size"]) for row in rows] == [
        (0, "run.rank0", "a-run", 2),
        (1, "run.rank1", "a-run", 2),
    ]
    written = json.loads((ranks / "run.rank1.meta.json").read_text())
    assert json.loads(rows[1]["metadata"]) == written and rows[1]["ended_cleanly"] is True


def test_values_of_a_graph_are_where_they_were_made(graph, tmp_path):
    folder = export(graph, tmp_path / "export [1]")
    recorded = read_recording(graph)
    values = table(folder, "values", "SELECT * FROM rows ORDER BY value")
    assert [row["value"] for row in values] == sorted(
        {row["value"] for row in recorded if "value" in row}
    )
    made = {row["value"]: row["op"] for row in recorded if "op" in row}
    assert {row["value"]: row["op"] for row in values if row["op"]} == made
    readers = {
        value: sum(value in (row.get("reads") or ()) for row in recorded)
        for value in (row["value"] for row in values)
    }
    assert {row["value"]: row["readers"] for row in values} == readers and max(readers.values()) > 0
    (end,) = [row for row in recorded if "end" in row]
    assert next(row["seen"] for row in values if row["value"] == end["value"]) == 2


def test_arguments_of_operations_are_json(graph, tmp_path):
    rows = table(
        export(graph, tmp_path / "export"), "rows", "SELECT * FROM rows ORDER BY row_number"
    )
    assert [json.loads(row["args"]) for row in rows if row["op"]] == [
        row["args"] for row in read_recording(graph) if "op" in row
    ]


def test_long_recordings_are_written_in_pieces(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "_PIECE_BYTES", 20_000)
    folder = export(ranks / "run.rank0.jsonl", tmp_path / "export")
    count = len(read_recording(ranks / "run.rank0.jsonl"))
    rows = table(
        folder, "rows", "SELECT count(*) AS rows, count(DISTINCT row_number) AS all FROM rows"
    )
    assert rows == [{"rows": count, "all": count}]
    assert len({path.name for path in (folder / "rows").rglob("*.parquet")}) > 3


def test_what_a_reader_tolerates_is_exported(tmp_path, capsys):
    path = write(
        tmp_path / "foreign.jsonl",
        {**ROW, "mean": "-Infinity", "l2": 2**70, "std": "<error: failed>", "shape": "?"},
        '{"module": "it\'s", "tensor": "out", "step": null, "mean": NaN, "mine": {"a": [1]}, "rank": 7}\n',
        {**ROW, "module": "\ud800", "hash": "00ff", "order": [3, None], "args": ["NaN", 1]},
        '{"module": "cut o',
    )
    rows = table(export(path, tmp_path / "it's"), "rows", "SELECT * FROM rows ORDER BY row_number")
    first, second, third = rows
    assert (first["mean"], first["l2"], first["std"], first["shape"]) == (
        -math.inf,
        2.0**70,
        None,
        None,
    )
    assert (second["module"], second["step"], second["rank"]) == ("it's", None, 0)
    assert math.isnan(second["mean"]) and json.loads(second["other"]) == {
        "mine": {"a": [1]},
        "rank": 7,
    }
    assert (third["module"], third["hash"], third["order"]) == ("?", "00ff", [3, None])
    assert json.loads(third["args"]) == ["NaN", 1] and first["other"] is None
    assert "line 4 was cut off" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_a_broken_line_leaves_nothing(tmp_path, capsys, name):
    path = write(tmp_path / "run.jsonl", ROW, {**ROW, "step": "x"}, ROW)
    if name.endswith(".gz"):
        import gzip

        path = tmp_path / name
        path.write_bytes(gzip.compress((tmp_path / "run.jsonl").read_bytes()))
    assert main(["export", str(path), "--parquet", str(tmp_path / "export")]) == 2
    assert f"{name}: line 2 is not a record: `step` is not" in capsys.readouterr().err
    assert not (tmp_path / "export").exists()
