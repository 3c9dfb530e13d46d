"""The ranks of a folder are compared on several processes, with the same report as on one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from otel_torch.parity import rank_executor
from otel_torch.parity.bitwise import compare_bitwise
from otel_torch.parity.compare import compare
from otel_torch.parity.rank_executor import RankPair, compare_pairs
from otel_torch.parity.recording_source import RecordingSource
from otel_torch.recording.reader import RecordingError
from tests.support import run_python

RANKS = 5


@pytest.fixture(scope="module")
def folders(tmp_path_factory, recorded_program) -> tuple[Path, Path]:
    """Return two folders of ranks that differ in rank 2, and a port in which all ranks match."""
    made = []
    texts = {}
    for program in ("reference", "port"):
        path = recorded_program("denoise_with_context.py", program)
        texts[program] = path.read_text(), path.with_name("run.meta.json").read_text()
    wrong = re.sub(
        r'("sketch":")(.{40})', lambda m: m[1] + "AACAPwAAgD8" * 3 + m[2][33:], texts["port"][0]
    )
    for program, (rows, meta) in texts.items():
        folder = tmp_path_factory.mktemp(f"ranks-{program}")
        for rank in range(RANKS):
            is_wrong = program == "port" and rank == 2
            (folder / f"run.rank{rank}.jsonl").write_text(wrong if is_wrong else rows)
            (folder / f"run.rank{rank}.meta.json").write_text(
                re.sub(r'"rank": ?\d+', f'"rank": {rank}', meta)
            )
        made.append(folder)
    return made[0], made[1]


@pytest.fixture
def in_processes(monkeypatch) -> list[rank_executor.ProcessExecutor]:
    """Compare any number of ranks on two processes; return what was started."""
    started = []
    make = rank_executor.ProcessExecutor

    def make_and_keep(*arguments):
        started.append(make(*arguments))
        return started[-1]

    monkeypatch.setattr(rank_executor, "_is_worth_it", lambda pairs: True)
    monkeypatch.setattr(rank_executor, "_cores", lambda: range(2))
    monkeypatch.setattr(rank_executor, "ProcessExecutor", make_and_keep)
    return started


def compare_here(compare, *arguments, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_executor, "_is_worth_it", lambda pairs: False)
        return compare(*arguments, **options)


@pytest.mark.parametrize("options", [{}, {"rtol": 1e-3, "noise": 0, "thorough": True}])
def test_reports_are_the_same(folders, in_processes, options):
    if "noise" in options:
        options = options | {"noise": folders[0]}
    texts: list[str] = []
    report = compare(*folders, progress=texts.append, **options)
    assert len(in_processes) == 1
    assert repr(report) == repr(compare_here(compare, *folders, **options))
    assert len(in_processes) == 1
    assert report.first is not None
    assert report.first.rank == 2
    assert texts[-1].startswith(f"{RANKS} of {RANKS} ranks compared")


def test_bitwise_reports_are_the_same(folders, in_processes):
    report = compare_bitwise(folders[0], folders[1])
    assert len(in_processes) == 1
    assert repr(report) == repr(compare_here(compare_bitwise, folders[0], folders[1]))


def test_what_learns_from_rank_to_rank_is_compared_here(folders, in_processes, tmp_path):
    compare(*folders, save_map=tmp_path / "map.toml")
    assert (tmp_path / "map.toml").exists()
    assert not in_processes


def test_two_small_ranks_start_no_process(folders, monkeypatch):
    sources = (RecordingSource(folder / "run.rank0.jsonl") for folder in folders)
    pair = RankPair("rank 0", *sources, None)
    assert not rank_executor._is_worth_it([pair] * 2)
    assert rank_executor._is_worth_it([pair] * 1000)


def test_the_first_broken_rank_is_the_error(folders, in_processes, tmp_path):
    for name in ("run.rank3.jsonl", "run.rank1.jsonl"):
        copy = tmp_path / name
        copy.write_text("no row\n")
    for rank in range(RANKS):
        for suffix in ("jsonl", "meta.json"):
            path = tmp_path / f"run.rank{rank}.{suffix}"
            if not path.exists():
                path.write_bytes((folders[1] / path.name).read_bytes())
    errors = []
    for run in (compare, lambda *paths: compare_here(compare, *paths)):
        with pytest.raises(RecordingError) as error:
            run(folders[0], tmp_path)
        errors.append(str(error.value))
    assert errors[0] == errors[1]
    assert "run.rank1.jsonl: line 1" in errors[0]


# -- what the processes are given here, instead of a comparison
# --------------------------------------------------------------------------------------------------


def _pairs(count: int) -> list[RankPair]:
    source = [
        [RecordingSource(Path(f"{side}{n}")) for side in ("ref", "port")] for n in range(count)
    ]
    return [RankPair(f"rank {n}", *sides, None) for n, sides in enumerate(source)]


def die(reference, port, *, noise, progress):
    os.kill(os.getpid(), signal.SIGKILL)


def wait(reference, port, *, noise, progress):
    Path(os.environ["TMPDIR"], f"began-{os.getpid()}").touch()
    time.sleep(600)


def note(reference, port, *, noise, progress):
    """Leave a file for each pair that was begun."""
    Path(os.environ["TMPDIR"], str(reference)).touch()
    from otel_torch.parity.finding import Report

    print("this must not come between the reports")
    return Report("match", reference=str(reference))


@pytest.fixture
def importable(monkeypatch, tmp_path):
    """Let other processes import this module, and leave their files here."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def test_a_process_that_is_killed_is_one_line(importable, tmp_path):
    with pytest.raises(RecordingError) as error:
        list(compare_pairs(_pairs(4), die, lambda text: None, workers=2))
    assert str(error.value) == (
        "ref0: the process that compared rank 0 or a rank beside it was killed; "
        "is there enough memory?"
    )


def test_few_reports_wait_for_who_asks_for_them(importable, tmp_path):
    reports = compare_pairs(_pairs(40), note, lambda text: None, workers=2)
    first = next(reports)
    assert first.reference == "ref0"
    most = 2 * rank_executor.WAITING
    assert len(list(tmp_path.glob("ref*"))) <= most
    assert [report.reference for report in reports] == [f"ref{n}" for n in range(1, 40)]


def test_processes_end_when_nobody_asks_any_more(importable, tmp_path, in_processes):
    reports = compare_pairs(_pairs(40), note, lambda text: None)
    next(reports)
    (executor,) = in_processes
    processes = list(executor._pool._processes.values())
    assert len(processes) == 2 and all(process.is_alive() for process in processes)
    reports.close()
    assert not any(process.is_alive() for process in processes)


def test_an_interrupt_ends_all_processes(tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import tests.parity.test_rank_executor as here
from otel_torch.parity.rank_executor import compare_pairs
def progress(text):
    print(text, flush=True)
list(compare_pairs(here._pairs(4), here.wait, progress, workers=2))
"""
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "0 of 4 ranks compared\n"
        while not list(tmp_path.glob("began*")):
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(60) != 0
        assert process.stderr is not None
        assert process.stderr.read().rstrip().endswith("KeyboardInterrupt")
    with pytest.raises(ProcessLookupError):
        for _ in range(100):  # loky's resource tracker exits a moment after its last client
            os.killpg(process.pid, 0)
            time.sleep(0.2)


def test_without_loky_the_ranks_are_compared_here(folders, in_processes, monkeypatch):
    monkeypatch.setitem(sys.modules, "loky", None)
    report = compare(*folders)
    assert repr(report) == repr(compare_here(compare, *folders))


def test_a_script_without_a_guard_is_not_run_again(folders, tmp_path):
    """As a program that is not written for `multiprocessing` calls it, and a notebook does."""
    program = f"""
import otel_torch
from otel_torch.parity import rank_executor
rank_executor._is_worth_it = lambda pairs: True
rank_executor._cores = lambda: range(2)
print("begins")
print(otel_torch.diff({str(folders[0])!r}, {str(folders[1])!r}).first.rank)
"""
    done = run_python(tmp_path, program, fresh=True)
    assert done.stdout.split() == ["begins", "2"], done.stderr


def test_without_ray_the_command_says_what_to_install(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"Ray is not installed: pip install 'otel-torch\[ray\]'"):
        compare(*folders, on="ray")
