"""The ranks of a folder are compared on a cluster of Ray, with the same report as here."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import otel_torch
from otel_torch.parity.finding import Report
from otel_torch.parity.rank_executor import RankPair, compare_pairs
from otel_torch.parity.recording_source import RecordingSource
from tests.support import PROGRAMS, run_python

pytestmark = pytest.mark.frameworks
RANKS = 64


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two folders of 64 ranks, of which rank 40 differs."""
    made = []
    for side in ("reference", "port"):
        folder = tmp_path_factory.mktemp(side)
        run_python(folder, PROGRAMS / "denoise_with_context.py", side, OTEL_TORCH_CAPTURE="parity")
        rows, meta = ((folder / f"run.{end}").read_text() for end in ("jsonl", "meta.json"))
        wrong = re.sub(r'("sketch":")(.{40})', lambda m: m[1] + "AACAPwAAgD8" * 3 + m[2][33:], rows)
        ranks = tmp_path_factory.mktemp(f"ranks-{side}")
        for rank in range(RANKS):
            is_wrong = side == "port" and rank == 40
            (ranks / f"run.rank{rank}.jsonl").write_text(wrong if is_wrong else rows)
            named = re.sub(r'"rank": ?\d+', f'"rank": {rank}', meta)
            (ranks / f"run.rank{rank}.meta.json").write_text(named)
        made.append(ranks)
    return made[0], made[1]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Run three nodes here, of which two compute."""
    import ray
    from ray.cluster_utils import Cluster

    memory = {"object_store_memory": 80_000_000}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **memory})
    made.computing = [made.add_node(num_cpus=1, **memory) for _ in range(2)]
    yield made
    ray.shutdown()
    made.shutdown()


def test_the_report_of_a_cluster_is_that_of_this_machine(
    folders: tuple[Path, Path], cluster: Any
) -> None:
    here = otel_torch.diff(*folders)
    texts: list[str] = []
    there = otel_torch.diff(*folders, on=cluster.address, progress=texts.append)
    assert there.first is not None and there.first.rank == 40
    assert json.dumps(there.as_json()) == json.dumps(here.as_json())
    assert texts[-1] == f"{RANKS} of {RANKS} ranks compared"


def compare_slowly(
    reference: RecordingSource, port: RecordingSource, *, noise: None, progress: Any
) -> Report:
    """Leave a file with the name of its node when it begins, and take a while."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    (port.path / f"{reference}-{node}").touch()
    time.sleep(2)
    return Report("match", reference=str(reference))


def test_the_tasks_of_a_lost_node_run_again(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    root = str(Path(__file__).parents[2])
    ray.init(cluster.address, runtime_env={"env_vars": {"PYTHONPATH": root}}, log_to_driver=False)
    port = RecordingSource(tmp_path)
    pairs = [RankPair(f"rank {n}", RecordingSource(Path(f"ref{n}")), port, None) for n in range(6)]

    def lose_a_node() -> None:
        lost = cluster.computing[0]
        while not list(tmp_path.glob(f"*-{lost.node_id}")):
            time.sleep(0.05)
        cluster.remove_node(lost, allow_graceful=False)

    losing = threading.Thread(target=lose_a_node)
    losing.start()
    reports = list(compare_pairs(pairs, compare_slowly, print, on="ray"))
    losing.join()
    assert [report.reference for report in reports] == [f"ref{n}" for n in range(6)]
    assert len(list(tmp_path.iterdir())) > 6  # what the lost node had begun, once more


def test_an_address_without_a_cluster_is_one_line(folders: tuple[Path, Path]) -> None:
    command = [shutil.which("otel-torch", path=str(Path(sys.executable).parent)) or "otel-torch"]
    command += ["diff", *map(str, folders), "--on", "127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "127.0.0.1:1: no cluster of Ray answers" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
