"""`otel-torch export --trackio`: Trackio's own API finds the scalars in its local database."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support import environment

pytest.importorskip("trackio")
# in a process of its own: Trackio reads its settings when it is imported
READ = """
import json, sys
from trackio import Api
from trackio.sqlite_storage import SQLiteStorage

print(json.dumps({run.name: [run.config, SQLiteStorage.get_logs(sys.argv[1], run.name)] for run in Api().runs(sys.argv[1])}))
"""


@pytest.fixture
def run(tmp_path):
    def run(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
        env = environment(tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"), **variables)
        argv = [sys.executable, *map(str, words)]
        return subprocess.run(
            argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120
        )

    return run


def test_each_rank_is_a_run_of_the_project(ranks, run):
    words = ("-m", "otel_torch", "export", ranks, "--trackio", "project", "--json")
    done = run(*words)
    assert done.returncode == 0, done.stderr
    (written,) = json.loads(done.stdout)["written"]
    assert (written["destination"], written["runs"]) == ("project", ["run.rank0", "run.rank1"])
    runs = json.loads(run("-c", READ, "project").stdout)
    assert sorted(runs) == ["run.rank0", "run.rank1"]
    config, logs = runs["run.rank1"]
    assert (config["rank"], config["run_id"]) == (1, "a-run")
    losses = {log["step"]: log["train/loss"] for log in logs if "train/loss" in log}
    assert sorted(losses) == list(range(12)) and losses[0] > 0
    kept = sum(len(log.keys() - {"step", "timestamp"}) for _, logs in runs.values() for log in logs)
    assert kept == written["scalars"]
    again = run(*words)
    assert again.returncode == 2
    assert again.stderr == "otel_torch: --trackio project: holds a run run.rank0 already\n"


@pytest.mark.parametrize("name", ["TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"])
def test_nothing_is_sent(ranks, run, name):
    done = run("-m", "otel_torch", "export", ranks, "--trackio", "project", **{name: "https://a.b"})
    assert (done.returncode, done.stderr) == (
        2,
        f"otel_torch: --trackio writes to the local database only: unset {name}\n",
    )
