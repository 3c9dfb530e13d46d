"""Folders of rank recordings: parts of tensors are put together by position, whole tensors are
compared rank by rank.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from otel_torch.parity.compare import compare
from otel_torch.parity.finding import Report
from otel_torch.parity.rank_recordings import find_recordings
from otel_torch.parity.ranks import compare_ranks
from otel_torch.recording.metadata import metadata_path
from otel_torch.recording.reader import RecordingError, load_recording
from tests.support import PROGRAMS, run_python, run_ranks

pytest.importorskip("duckdb")
pytestmark = pytest.mark.scoreboard

PROGRAM = PROGRAMS / "layouts/split_over_ranks.py"
WORLD = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Record one process as reference.jsonl and three folders of ranks: sharded, wrong, replicated."""
    folder = tmp_path_factory.mktemp("ranks")
    run_python(
        folder,
        PROGRAM,
        "alone",
        OTEL_TORCH_CAPTURE="parity",
        OTEL_TORCH_JSONL=str(folder / "reference.jsonl"),
    )
    for kind in ("sharded", "wrong", "replicated"):
        run_ranks(
            folder,
            PROGRAM,
            kind,
            ranks=WORLD,
            OTEL_TORCH_CAPTURE="parity",
            OTEL_TORCH_JSONL=str(folder / kind / "run.jsonl"),
        )
        assert len(list((folder / kind).glob("*.jsonl"))) == WORLD
    return folder


def test_parts_of_tensors_are_put_together_to_what_one_process_has(folder):
    warnings: list[str] = []
    (part,) = find_recordings(folder / "sharded", warnings.append, warnings.append)
    assert part.rank is None and warnings == []
    alone, together = load_recording(folder / "reference.jsonl").rows, list(part.source.rows())
    names = (
        "module",
        "tensor",
        "step",
        "call",
        "phase",
        "class",
        "shape",
        "dtype",
        "numel",
        "nonfinite",
    )
    spread = {
        (row["module"], row["tensor"])
        for row in load_recording(folder / "sharded" / "run.rank0.jsonl").rows
        if "shard" in row
    }
    assert {
        ("blocks.0.up", "param.weight"),
        ("blocks.1.down", "param.weight"),
        ("blocks.1.up", "out"),
    } <= spread
    assert [[row[name] for name in names] for row in together] == [
        [row[name] for name in names] for row in alone
    ]
    for expected, actual in zip(alone, together, strict=True):
        scale = expected["abs_mean"] * expected["numel"] ** 0.5
        for name in ("abs_mean", "min", "max", "mean", "std", "l2"):
            assert actual.get(name) == pytest.approx(expected.get(name), rel=1e-5, abs=1e-6), (
                expected["module"],
                expected["tensor"],
                name,
            )
        assert actual["sum"] == pytest.approx(expected["sum"], rel=1e-5, abs=1e-5 * scale)
        assert "shard" not in actual and ("sketch" in actual) == ("sketch" in expected)


def test_sharded_ranks_match_one_process(folder):
    report = compare(folder / "reference.jsonl", folder / "sharded")
    assert (report.verdict, report.warnings, report.weaker) == ("match", [], False)
    assert (report.reference, report.port) == (
        str(folder / "reference.jsonl"),
        str(folder / "sharded"),
    )


def test_a_shard_that_was_loaded_wrong_is_found_in_the_whole(folder):
    report = compare(folder / "reference.jsonl", folder / "wrong")
    assert report.verdict == "diverged"
    assert (report.first.kind, report.first.port_module, report.first.rank) == (
        "weights",
        "blocks.1.up",
        2,  # has most of the wrong rows
    )


def test_a_missing_rank_is_said_and_its_tensors_are_left_out(folder, tmp_path):
    port = shutil.copytree(folder / "sharded", tmp_path / "port")
    for path in port.glob("run.rank1.*"):
        path.unlink()
    report = compare(folder / "reference.jsonl", port)
    assert any(
        "some shards of their tensors are missing (is a rank's recording missing?)" in warning
        and "blocks.0.up param.weight" in warning
        for warning in report.warnings
    )


def test_a_rank_that_was_killed_in_its_last_line_is_merged_without_it(folder, tmp_path):
    port = shutil.copytree(folder / "sharded", tmp_path / "port")
    path = port / "run.rank1.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    report = compare(folder / "sharded", port)
    assert report.verdict == "partial"
    (line,) = report.uncompared
    assert line.startswith(f"{path}: line 82 was cut off and is skipped")


def replicated_reference(folder: Path, copies: Path) -> Path:
    """Write the recording of the one process as those of all ranks."""
    copies.mkdir()
    for rank in range(WORLD):
        for path in (folder / "reference.jsonl", metadata_path(folder / "reference.jsonl")):
            shutil.copy(path, copies / path.name.replace("reference", f"reference.rank{rank}"))
        beside = metadata_path(copies / f"reference.rank{rank}.jsonl")
        beside.write_text(json.dumps({**json.loads(beside.read_text()), "rank": rank}))
    return copies


def test_pairs_of_one_rank_alone_are_kept(folder, tmp_path):
    reports: list[Report] = []

    def compare_rank(reference, port, *, noise, progress):
        reports.append(compare(reference.path, port.path, noise=noise))
        return reports[-1]

    right = replicated_reference(folder, tmp_path / "right")
    merged = compare_ranks(right, folder / "replicated", None, compare_rank, print, workers=1)
    assert [bool(report.compared) for report in reports] == [False, True, False]
    assert len(merged.compared) == len(reports[1].compared)
    assert merged.pairs == merged.compared_left_out + len(merged.compared)
    assert merged.pairs == sum(report.pairs for report in reports)


def test_whole_tensors_are_compared_rank_by_rank(folder, tmp_path):
    right = replicated_reference(folder, tmp_path / "right")
    report = compare(right, folder / "replicated")
    assert report.verdict == "diverged"
    assert (report.first.rank, report.first.port_module, report.first.port_side) == (
        1,
        "blocks.1",
        "input",
    ) or (
        report.first.rank,
        report.first.port_module,
    ) == (1, "blocks.1.norm")
    assert {finding.rank for finding in report.introduced} == {1}
    alone = compare(folder / "reference.jsonl", folder / "replicated")
    assert alone.verdict == "diverged" and alone.warnings == []
    assert alone.first.rank == 1
    assert alone.first.port_module in ("blocks.1", "blocks.1.norm")
    assert alone.first.explanation.endswith("Only rank 1 is wrong.")


def test_ranks_that_disagree_on_a_whole_tensor_are_named(folder, tmp_path):
    port = shutil.copytree(folder / "sharded", tmp_path / "port")
    path = port / "run.rank2.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row["module"] == "head" and row["step"] == 1:
            row["abs_mean"] *= 1.01
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = compare(folder / "sharded", port)
    (warning,) = report.warnings
    assert "2 tensors that are not sharded differ between ranks, first on rank 2" in warning


def test_without_duckdb_one_line_says_what_to_do(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(RecordingError, match=r"pip install 'otel-torch\[ranks\]'"):
        compare(folder / "sharded", folder / "sharded")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "holds no recording"),
        (["a.jsonl", "b.jsonl"], "gives its rank"),
        (["a.rank0.jsonl", "b.rank0.jsonl"], "are both of rank 0; leave one run in the folder"),
    ],
)
def test_a_folder_that_is_no_folder_of_ranks_is_one_line(folder, tmp_path, names, message):
    for name in names:
        shutil.copy(folder / "reference.jsonl", tmp_path / name)
    with pytest.raises(RecordingError, match=message) as raised:
        compare(folder / "reference.jsonl", tmp_path)
    assert str(tmp_path) in str(raised.value) and "\n" not in str(raised.value)


def test_earlier_runs_in_the_folder_are_left_alone(folder, tmp_path):
    port = shutil.copytree(folder / "sharded", tmp_path / "port")
    for path in list(port.iterdir()):
        shutil.copy(
            path, port / path.name.replace(f"rank{path.name[8]}.", f"rank{path.name[8]}.1.")
        )
    assert len(os.listdir(port)) == 4 * WORLD
    assert compare(folder / "reference.jsonl", port).verdict == "match"
