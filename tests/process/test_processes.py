"""Every process is recorded once, and however it ends, every completed step is on disk.

Unmodified programs in child processes, switched on by environment variables. Programs that are
independent run two at a time, started when the first of them is needed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from otel_torch.process.job import Job, name_run, this_job
from otel_torch.recording.reader import load_recording
from tests.support import PROGRAMS, environment, lines, metadata, run_python

# a model of two layers, of which the second can be made to do something in the middle of a step:
# three records a step
MODEL = (PROGRAMS / "two_layers.py").read_text()
WHOLE_STEP = [("0", "out"), ("1", "out"), ("", "out")]


@dataclass
class Ended:
    """The results of a program."""

    folder: Path
    status: int
    stdout: str
    stderr: str

    @property
    def recording(self) -> Path:
        return self.folder / "run.jsonl"

    @property
    def reported(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if line.startswith("otel_torch")]


def execute(folder: Path, code: str | Path, fresh: bool = False, **variables: str) -> Ended:
    """Run a program, or code to append to the model of two layers."""
    program = code if isinstance(code, Path) else MODEL + textwrap.dedent(code)
    done = run_python(
        folder, program, check=False, timeout=120, fresh=fresh, is_taken_apart=True, **variables
    )
    return Ended(folder, done.returncode, done.stdout, done.stderr)


def by_step(path: Path) -> dict[int, list[tuple[str, str]]]:
    """Return (module, tensor) of the records of each step, in the order of the file."""
    steps: dict[int, list[tuple[str, str]]] = {}
    for row in lines(path):
        steps.setdefault(row["step"], []).append((row["module"], row["tensor"]))
    return steps


def whole_steps(*steps: int) -> dict[int, list[tuple[str, str]]]:
    return dict.fromkeys(steps, WHOLE_STEP)


# how a process ends


# sends a signal when half of a step's lines is written, as if it had come from outside just then
SIGNAL_IN_A_WRITE = """
    from otel_torch.recording import append_file
    run(3)
    write = os.write

    def write_half(descriptor, data):
        os.write = write
        done = write(descriptor, data[:100])
        os.kill(os.getpid(), signal.{signal})
        return done

    os.write = write_half
    run(1)
    for _ in range(600):  # a signal is not heeded while a lock is waited for
        time.sleep(0.1)
"""
SIGTERM_WHILE_IT_ENDS = """
from otel_torch.recorder import Recorder
finish = Recorder.finish

def interrupted(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    finish(*arguments)

Recorder.finish = interrupted
run(4)
"""
# name: (program, exit status, what is in the last step, whether the recording says that the run
# ended cleanly)
ENDS: dict[str, tuple[str, int, list[tuple[str, str]], bool]] = {
    "normally": ("run(4)", 0, WHOLE_STEP, True),
    "sys.exit": ("run(4); sys.exit(7)", 7, WHOLE_STEP, True),
    "an exception": ("run(4); raise ValueError('mine')", 1, WHOLE_STEP, True),
    "an exception in a forward": ("run(3); Between.action = lambda: 1 / 0; run(1)", 1, WHOLE_STEP[:1], True),
    "Ctrl-C": ("run(4); send(signal.SIGINT)", -signal.SIGINT, WHOLE_STEP, True),
    "Ctrl-C in a forward": ("run(3); Between.action = lambda: send(signal.SIGINT); run(1)", -signal.SIGINT, WHOLE_STEP[:1], True),
    "Ctrl-C in a write": (SIGNAL_IN_A_WRITE.format(signal="SIGINT"), -signal.SIGINT, WHOLE_STEP, True),
    "SIGTERM in a forward": (
        "run(3); Between.action = lambda: send(signal.SIGTERM); run(1)", -signal.SIGTERM, WHOLE_STEP[:1], True,
    ),
    "SIGTERM in a write": (SIGNAL_IN_A_WRITE.format(signal="SIGTERM"), -signal.SIGTERM, WHOLE_STEP, True),
    "SIGTERM while the recording ends": (SIGTERM_WHILE_IT_ENDS, -signal.SIGTERM, WHOLE_STEP, True),
    "SIGTERM with the program's own handler while the recording ends": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))"
        + SIGTERM_WHILE_IT_ENDS
        + "import otel_torch; otel_torch.stop()",
        5, WHOLE_STEP, True,
    ),
    "SIGTERM while the device hangs": (
        """
        import otel_torch.process.sigterm
        otel_torch.process.sigterm.SIGTERM_S = 0.2
        run(4)
        with otel_torch.session.current().recorder._lock:
            send(signal.SIGTERM)
        """,
        -signal.SIGTERM, WHOLE_STEP, False,
    ),
    "SIGTERM with the program's own handler": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); run(4); send(signal.SIGTERM)", 5, WHOLE_STEP, True,
    ),
    "SIGTERM with a handler that restores the one before": (
        """
        def handle(*_):
            print("mine", flush=True)
            signal.signal(signal.SIGTERM, before)
            signal.raise_signal(signal.SIGTERM)

        before = signal.signal(signal.SIGTERM, handle)
        run(4)
        send(signal.SIGTERM)
        """,
        -signal.SIGTERM, WHOLE_STEP, True,
    ),
    "SIGKILL in a forward": ("run(4); Between.action = lambda: send(signal.SIGKILL); run(1)", -signal.SIGKILL, WHOLE_STEP, False),
    "os._exit": ("run(4); os._exit(3)", 3, WHOLE_STEP, True),
    "os._exit in a forward": ("run(3); Between.action = lambda: os._exit(3); run(1)", 3, WHOLE_STEP[:1], True),
    "os._exit while a thread is in a forward": (
        """
        run(3)
        inside = threading.Event()
        Between.action = lambda: (inside.set(), threading.Event().wait())
        threading.Thread(target=run, args=[1], daemon=True).start()
        inside.wait()
        os._exit(3)
        """,
        3, WHOLE_STEP[:1], True,
    ),
    "os._exit while the device hangs": (
        """
        import otel_torch.bootstrap
        otel_torch.bootstrap._LOCK_S = 0.2
        run(4)
        with otel_torch.session.current().recorder._lock:
            os._exit(3)
        """,
        3, WHOLE_STEP, False,
    ),
    "while a daemon thread is in a forward": (
        """
        run(3)
        inside = threading.Event()
        Between.action = lambda: (inside.set(), threading.Event().wait())
        threading.Thread(target=run, args=[1], daemon=True).start()
        inside.wait()
        """,
        0, WHOLE_STEP[:1], True,
    ),
    "when its last thread does": (
        """
        main_is_over = threading.main_thread().join
        threading.Thread(target=lambda: (main_is_over(), run(4))).start()
        """,
        0, WHOLE_STEP, True,
    ),
}  # fmt: skip


# these end in a fresh interpreter, the others in a forked one
FRESH = ("normally", "Ctrl-C", "SIGTERM in a forward", "while a daemon thread is in a forward")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ended]:
    running: dict[str, Future[Ended]] = {}
    pool = ThreadPoolExecutor(2)

    def result(name: str) -> Ended:
        if not running:
            for each, (code, *_) in ENDS.items():
                running[each] = pool.submit(
                    execute, tmp_path_factory.mktemp("end"), code, fresh=each in FRESH
                )
        return running[name].result()

    return result


@pytest.mark.parametrize("how", ENDS)
def test_however_a_process_ends_what_was_complete_is_on_disk(
    how: str, ended: Callable[[str], Ended]
) -> None:
    _, status, last_step, cleanly = ENDS[how]
    end = ended(how)
    assert end.status == status, end.stderr
    assert by_step(end.recording) == whole_steps(0, 1, 2) | {3: last_step}
    recording = load_recording(end.recording)
    assert recording.ended_early is not cleanly
    assert ("ends early" in "".join(recording.warnings)) is not cleanly
    count = 9 + len(last_step)
    assert end.reported == ([f"otel_torch: {count} records in {end.recording}"] if cleanly else [])
    if cleanly:
        assert metadata(end.recording)["records_written"] == count
    assert list(end.folder.glob(".*")) == []


def test_what_ends_a_program_looks_as_it_always_does(ended: Callable[[str], Ended]) -> None:
    assert "ValueError: mine" in ended("an exception").stderr
    assert "ZeroDivisionError" in ended("an exception in a forward").stderr
    assert "KeyboardInterrupt" in ended("Ctrl-C in a forward").stderr
    assert ended("SIGTERM with a handler that restores the one before").stdout == "mine\n"
    for how in ("an exception in a forward", "Ctrl-C in a forward"):
        trace = ended(how).stderr
        assert (
            "otel_torch"
            not in trace[trace.index("Between.action()") :].partition("\notel_torch:")[0]
        )


# how a process starts


def test_off_is_off(tmp_path: Path) -> None:
    program = MODEL + textwrap.dedent("""
        run(2)
        loaded = [name for name in sys.modules if name.startswith(("otel_torch", "opentelemetry"))]
        finders = [finder for finder in sys.meta_path if "otel_torch" in type(finder).__module__]
        hooks = [hook for module in model.modules() for hook in (*module._forward_hooks, *module._forward_pre_hooks)]
        print(loaded, finders, hooks, torch.nn.Module.__call__.__module__, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
        print(threading.active_count())
    """)
    done = run_python(tmp_path, program, fresh=True, OTEL_TORCH_ENABLED="0")
    assert (done.stdout, done.stderr) == ("[] [] [] torch.nn.modules.module True\n1\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


@pytest.mark.parametrize(
    "arguments",
    [["-c", "import program"], ["-m", "program"], ["-E", "program.py"]],
    ids=lambda a: a[0],
)
def test_however_the_interpreter_is_called(tmp_path: Path, arguments: list[str]) -> None:
    # asking whether torch exists, as many libraries do, is not importing it
    (tmp_path / "program.py").write_text(
        "import importlib.util; importlib.util.find_spec('torch')\n" + MODEL + "run(2)\n"
    )
    subprocess.run(
        [sys.executable, *arguments],
        env=environment(tmp_path),
        cwd=tmp_path,
        check=True,
        timeout=120,
    )
    assert by_step(tmp_path / "run.jsonl") == whole_steps(0, 1)


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return execute(
        tmp_path_factory.mktemp("children"), PROGRAMS / "children_of_every_kind.py", fresh=True
    )


ROLES = (
    "fork", "spawn", "forkserver", "raising", "terminated", "executor", "pool",
    "os.fork", "os.fork and os._exit", "forked from a thread's flush",
)  # fmt: skip


def pids(children: Ended, role: str) -> list[int]:
    return [
        int(line.split()[-1])
        for line in children.stdout.splitlines()
        if line.rpartition(" ")[0] == role
    ]


@pytest.mark.parametrize("role", ROLES)
def test_every_child_has_a_whole_recording_of_its_own(children: Ended, role: str) -> None:
    (pid,) = pids(children, role)
    path = children.folder / f"run.pid{pid}.jsonl"
    first = 0 if role in ("spawn", "forkserver") else 1  # a forked child continues to count
    assert by_step(path) == whole_steps(first, first + 1)
    meta = metadata(path)
    assert meta["ended_cleanly"]
    assert (meta["pid"], meta["rank"], meta["run_id"]) == (
        pid,
        0,
        metadata(children.recording)["run_id"],
    )


def test_the_parent_has_its_own_records_and_nobody_anybody_elses(children: Ended) -> None:
    assert children.status == 0, children.stderr
    assert by_step(children.recording) == whole_steps(0, 1)
    expected = {"run.jsonl"} | {
        f"run.pid{pid}.jsonl" for role in ROLES for pid in pids(children, role)
    }
    assert {path.name for path in children.folder.glob("*.jsonl")} == expected
    reported = Counter(line for line in children.reported)
    assert set(reported.values()) == {1} and all(" records in " in line for line in reported)


def test_a_worker_that_runs_no_model_has_no_file_and_no_thread(children: Ended) -> None:
    workers = [
        line.split()[1:] for line in children.stdout.splitlines() if line.startswith("worker ")
    ]
    assert len({pid for pid, *_ in workers}) == 2
    assert all(threads == [] for _, *threads in workers)
    assert not any((children.folder / f"run.pid{pid}.jsonl").exists() for pid, *_ in workers)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_child_that_is_the_first_to_load_torch(tmp_path: Path, method: str) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    program = f"""
        import multiprocessing

        def child():
            import model
            model.run(2)

        if __name__ == "__main__":
            process = multiprocessing.get_context("{method}").Process(target=child)
            process.start()
            process.join()
            assert process.exitcode == 0
    """
    run_python(tmp_path, textwrap.dedent(program), fresh=True)
    assert by_step(tmp_path / "run.jsonl") == whole_steps(0, 1)
    assert metadata(tmp_path / "run.jsonl")["ended_cleanly"]


def test_the_compilers_workers_leave_nothing_behind(tmp_path: Path) -> None:
    code = """
        if __name__ == "__main__":
            from torch._inductor.async_compile import AsyncCompile
            run(2)
            threads = "[thread.name for thread in __import__('threading').enumerate() if 'otel' in thread.name]"
            worker = f"__import__('os').getpid(), 'torch' in __import__('sys').modules, {threads}"
            print(os.getpid(), *AsyncCompile.process_pool().submit(eval, worker).result(60))
    """
    end = execute(tmp_path, code, TORCHINDUCTOR_COMPILE_THREADS="2")
    assert end.status == 0, end.stderr
    loaded_here, there, torch_is_loaded, threads = end.stdout.split()
    assert loaded_here != there and (torch_is_loaded, threads) == ("True", "[]")
    assert [path.name for path in tmp_path.glob("*.jsonl")] == ["run.jsonl"]
    assert end.reported == [f"otel_torch: 6 records in {end.recording}"]


# ranks


def torchrun(folder: Path, code: str, **variables: str) -> Ended:
    (folder / "program.py").write_text(MODEL + textwrap.dedent(code))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "program.py",
    ]
    done = subprocess.run(
        command,
        env=environment(folder, **variables),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Ended(folder, done.returncode, done.stdout, done.stderr)


def test_each_rank_of_torchrun_has_its_own_recording(tmp_path: Path) -> None:
    end = torchrun(tmp_path, "run(2)")
    assert end.status == 0, end.stderr
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == [
        "run.rank0.jsonl",
        "run.rank1.jsonl",
    ]
    metadata_by_rank = [metadata(tmp_path / f"run.rank{rank}.jsonl") for rank in range(2)]
    assert [by_step(tmp_path / f"run.rank{rank}.jsonl") for rank in range(2)] == [
        whole_steps(0, 1)
    ] * 2
    assert [
        (meta["rank"], meta["world_size"], meta["ended_cleanly"]) for meta in metadata_by_rank
    ] == [
        (0, 2, True),
        (1, 2, True),
    ]
    (run_id,) = {meta["run_id"] for meta in metadata_by_rank}
    assert run_id.endswith(".0") and not run_id.startswith(("none", "run-"))
    assert len({meta["trace_id"] for meta in metadata_by_rank}) == 1


def test_a_rank_that_is_killed_because_another_failed_is_flushed_and_one_that_writes_nothing_has_no_hook(
    tmp_path: Path,
) -> None:
    code = """
        def wait_for_the_end():
            open("in_the_forward", "w").close()
            threading.Event().wait(60)

        run(2)
        if os.environ["RANK"] == "0":
            Between.action = wait_for_the_end
            run(1)
        else:
            print("hooks", sum(len(module._forward_hooks) for module in model.modules()), flush=True)
            deadline = time.monotonic() + 60
            while not os.path.exists("in_the_forward") and time.monotonic() < deadline:
                time.sleep(0.01)
            raise ValueError("mine")
    """
    end = torchrun(tmp_path, code, OTEL_TORCH_JSONL_RANKS="0")
    assert end.status == 1
    assert "hooks 0" in end.stdout
    assert [path.name for path in tmp_path.glob("*.jsonl")] == ["run.rank0.jsonl"]
    assert by_step(tmp_path / "run.rank0.jsonl") == whole_steps(0, 1) | {2: WHOLE_STEP[:1]}
    assert metadata(tmp_path / "run.rank0.jsonl")["ended_cleanly"]


# who a process is


MADE = "run-0123456789ab"


@pytest.mark.parametrize(
    ("environ", "run_id"),
    [
        ({"OTEL_TORCH_RUN_ID": "mine"}, "mine"),
        ({"OTEL_TORCH_RUN_ID": "mine/../x y"}, "mine_.._x_y"),
        ({"OTEL_TORCH_RUN_ID": "mine", "SLURM_JOB_ID": "7"}, "mine"),
        ({"OTEL_TORCH_RUN_ID": MADE}, MADE),
        (
            {
                "OTEL_TORCH_RUN_ID": MADE,
                "TORCHELASTIC_RUN_ID": "none",
                "TORCHELASTIC_RESTART_COUNT": "0",
            },
            MADE,
        ),
        (
            {
                "OTEL_TORCH_RUN_ID": MADE,
                "TORCHELASTIC_RUN_ID": "none",
                "TORCHELASTIC_RESTART_COUNT": "2",
            },
            f"{MADE}.2",
        ),
        (
            {
                "OTEL_TORCH_RUN_ID": f"{MADE}.2",
                "TORCHELASTIC_RUN_ID": "none",
                "TORCHELASTIC_RESTART_COUNT": "2",
            },
            f"{MADE}.2",
        ),
        (
            {
                "OTEL_TORCH_RUN_ID": MADE,
                "TORCHELASTIC_RUN_ID": "job",
                "TORCHELASTIC_RESTART_COUNT": "1",
            },
            "job.1",
        ),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "3"}, "7.3"),
        ({"SLURM_JOB_ID": "7"}, "7.0"),
        (
            {"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"},
            "7.0",
        ),
        (
            {"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "1"},
            "job.1",
        ),
    ],
    ids=str,
)
def test_the_run_is_named_by_the_program_then_the_launcher(
    environ: dict[str, str], run_id: str
) -> None:
    assert name_run(environ) == run_id


def test_a_run_without_a_name_is_given_one_of_its_own() -> None:
    first, second = name_run({}), name_run({})
    assert first != second and name_run({"OTEL_TORCH_RUN_ID": first, "SLURM_JOB_ID": "7"}) == "7.0"


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, (0, 0, 1)),
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}, (3, 1, 4)),
        ({"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8"}, (5, 1, 8)),
        (
            {
                "RANK": "3",
                "LOCAL_RANK": "1",
                "WORLD_SIZE": "4",
                "SLURM_PROCID": "0",
                "SLURM_NTASKS": "2",
            },
            (3, 1, 4),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "OMPI_COMM_WORLD_SIZE": "4",
            },
            (2, 0, 4),
        ),
        ({"RANK": "²", "WORLD_SIZE": "many"}, (0, 0, 1)),
    ],
    ids=str,
)
def test_the_launcher_says_which_rank_a_process_is(
    environ: dict[str, str], place: tuple[int, int, int]
) -> None:
    job: Job = this_job(environ)
    assert (job.rank, job.local_rank, job.world_size, job.pid) == (*place, os.getpid())


# two runs


def test_two_identical_runs_write_identical_bytes_and_the_named_path_holds_the_newer(
    tmp_path: Path,
) -> None:
    code = """
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(6):
            optimizer.zero_grad()
            x = torch.randn(8, 4)
            model(x / (step != 3)).mean().backward()
            optimizer.step()
    """
    variables = {
        "OTEL_TORCH_CAPTURE": "outputs,inputs,gradients,parameters",
        "OTEL_TORCH_STATS": "abs_mean,sum,min,max,mean,std,rms,shape",
    }
    # one of them in a fresh interpreter, so that they hash strings differently
    first = execute(tmp_path, code, fresh=True, **variables)
    second = execute(tmp_path, code, **variables)
    assert first.status == second.status == 0, second.stderr
    earlier = tmp_path / "run.1.jsonl"
    assert (
        second.reported[0]
        == f"otel_torch: {second.recording} is from an earlier run; renamed to run.1.jsonl"
    )
    assert earlier.read_bytes() == second.recording.read_bytes()
    assert metadata(earlier)["run_id"] != metadata(second.recording)["run_id"]
    rows = lines(second.recording)
    values = {
        row["step"]: row["mean"]
        for row in rows
        if (row["module"], row["tensor"], row["phase"]) == ("2", "out", "forward")
    }
    assert all(isinstance(values[step], float) for step in (0, 1, 2))
    assert [values[step] for step in (3, 4, 5)] == ["NaN"] * 3
    assert {"in[0]", "out", "grad", "param.weight", "param_grad.weight"} <= {
        row["tensor"] for row in rows
    }
    read = load_recording(second.recording)
    assert len(read.rows) == len(rows) and not read.warnings
