"""Runs programs in child processes as a user would, and sessions in this process that record into a
list.
"""

from __future__ import annotations

import gc
import json
import os
import pty
import re
import subprocess
import sys
import termios
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

from otel_torch import session
from otel_torch.process.job import Job, name_run, this_job
from otel_torch.recorder import Recorder, Sink
from otel_torch.records import Batch, Losses, Record, Scope
from otel_torch.settings import Settings
from tests.interpreters import TORCH, command_of_tests, run_group, run_script

# the programs that tests run: one file each
PROGRAMS = Path(__file__).with_name("programs")
TURNS_NAN = PROGRAMS / "training/weights_turn_nan.py"


class Arrived:
    """Pending records that are on the host; `arrived` is what `ready` returns."""

    def __init__(self, pending: list[Any], arrived: bool = True) -> None:
        self.pending, self.arrived = pending, arrived

    def ready(self) -> bool:
        return self.arrived

    def records(self) -> list[Record]:
        return self.pending


class ListSink(Sink):
    """Keeps all scopes and records in lists."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.opened: list[Scope] = []
        self.closed: list[Scope] = []
        self.batches: list[Batch] = []

    def open(self, scope: Scope) -> None:
        self.opened.append(scope)

    def close(self, scope: Scope) -> None:
        self.closed.append(scope)

    def write(self, batch: Batch) -> None:
        self.batches.append(batch)
        self.records += batch.records

    @property
    def names(self) -> list[str]:
        """The names of the scopes in the order in which they closed."""
        return [scope.name for scope in self.closed]

    def rows(self, *fields: str, **conditions: Any) -> list[Any]:
        """Return the named fields of the records that have all given values: tuples, or bare values
        for one field.
        """
        get = attrgetter(*fields)
        return [
            get(record)
            for record in self.records
            if all(getattr(record, name) == value for name, value in conditions.items())
        ]


# Ends a rank's script with the functions of `atexit` and without finalizing the interpreter. A
# thread of gloo may free its last collective, a Python object, while the interpreter finalizes, and
# then torch aborts: without this package too, in about 1 of 50 runs on busy cores.
EXIT_RANK = """
import atexit, os, sys
atexit._run_exitfuncs()
sys.stdout.flush()
os._exit(0)
"""


@contextmanager
def recording(**settings: str) -> Iterator[ListSink]:
    """Run a session in this process that records into a list; stop it and remove it at the end."""
    from otel_torch import bootstrap

    assert session.current() is None, "a session of an earlier test is still running"
    sink = ListSink()
    assert bootstrap.start(**({"jsonl": "off"} | settings))
    current = session.current()
    assert current is not None
    current.recorder.add_sink(sink)
    try:
        yield sink
    finally:
        bootstrap.stop()


def bare_session(sink: Sink | None = None, **environ: str) -> ListSink:
    """Start a session without sources, with these variables of ours and no others; return its sink.

    A test that starts one ends it by `session.become(None)`.
    """
    seen, losses = sink or ListSink(), Losses()
    settings = Settings.from_env({f"OTEL_TORCH_{name}": value for name, value in environ.items()})
    recorder = Recorder(Arrived, lambda: [seen], losses)
    session.become(session.Session(this_job({}), settings, recorder, losses))
    return cast(ListSink, seen)


@contextmanager
def recording_to(
    path: Path, capture: str = "parity", grad: bool = False, **settings: str
) -> Iterator[Path]:
    """Record what runs in the block into a file, without gradients unless `grad`."""
    import torch

    from otel_torch import bootstrap

    assert bootstrap.start(jsonl=str(path), capture=capture, **settings)
    try:
        with torch.set_grad_enabled(grad):
            yield path
    finally:
        bootstrap.stop()


def work_of(run: Callable[[], Any]) -> Counter[str]:
    """Return how often each function of Python or C is called. The garbage collector waits: what
    it frees calls finalizers, which are no work of `run`.
    """
    calls: Counter[str] = Counter()

    def count(frame: Any, event: str, function: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            calls[function.__qualname__] += 1

    enabled = gc.isenabled()
    gc.disable()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
        if enabled:
            gc.enable()
    return calls


def clean_environment() -> dict[str, str]:
    """Return this process's environment without any variable of ours or OpenTelemetry's."""
    inherited = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("OTEL_", "FASTVIDEO_", "RANK", "WORLD_SIZE", "TRACEPARENT"))
    }
    return inherited | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def environment(tmp_path: Path, **variables: str) -> dict[str, str]:
    """Return a clean environment that switches recording on."""
    recording = {"OTEL_TORCH_ENABLED": "1", "OTEL_TORCH_JSONL": str(tmp_path / "run.jsonl")}
    return clean_environment() | recording | variables


def run_command(
    *words: str | Path, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run an `otel-torch` command in a clean environment."""
    command = [command_of_tests("otel-torch"), *map(str, words)]
    environ = clean_environment() | variables
    return subprocess.run(
        command, env=environ, cwd=cwd, capture_output=True, text=True, timeout=240
    )


def run_python(
    tmp_path: Path,
    code: str | Path,
    *arguments: str,
    check: bool = True,
    timeout: float = 240,
    fresh: bool = False,
    is_taken_apart: bool = False,
    modules: tuple[str, ...] = TORCH,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a script, or code written to one, in a child process with nothing but environment
    variables set.

    Args:
        check: raise where the exit status is not 0.
        fresh: start a new interpreter (see `tests/interpreters.py`).
        is_taken_apart: take all modules apart at the end, as a new interpreter does.
        modules: what a forked program may have imported before it starts.
    """
    script = code
    if isinstance(code, str):
        script = tmp_path / "program.py"
        script.write_text(code)
    done = run_script(
        [str(script), *arguments],
        environment(tmp_path, **variables),
        tmp_path,
        timeout,
        modules,
        fresh=fresh,
        is_taken_apart=is_taken_apart,
    )
    return checked(done) if check else done


def checked(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """Return what ran if its exit status is 0."""
    if done.returncode:
        raise AssertionError(f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def run_ranks(
    tmp_path: Path,
    code: str | Path,
    *arguments: str,
    ranks: int = 2,
    fresh: bool = False,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a script, or code, that takes part in a gloo group, in one process per rank.

    Args:
        fresh: start the ranks with torchrun; otherwise they are forked (`tests/interpreters.py`).
    """
    script = tmp_path / "ranks.py"
    if isinstance(code, Path):
        code = f"import runpy\nrunpy.run_path({str(code)!r}, run_name='__main__')\n"
    script.write_text(code + EXIT_RANK)
    argv, env = [str(script), *arguments], environment(tmp_path, **variables)
    run_id = {"OTEL_TORCH_RUN_ID": name_run(env)}
    done = None if fresh else run_group(argv, env | run_id, tmp_path, timeout=240, ranks=ranks)
    if done is None:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        done = run_script([*launch, *argv], env, tmp_path, timeout=240, fresh=True)
    return checked(done)


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a recording.

    Raises: ValueError, where a line is not strict JSON.
    """

    def refuse(token: str) -> Any:
        raise ValueError(f"{token} is not strict JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of a recording."""
    path = path.with_name(path.name.removesuffix(".jsonl") + ".meta.json")
    contents: dict[str, Any] = json.loads(path.read_text())
    return contents


JOB = Job("run-test", rank=0, local_rank=0, world_size=1, host="host", pid=1)


_TERMINAL_SIZE = ("COLUMNS", "LINES")  # variables that would override the terminal's own


def read_terminal(leader: int) -> str:
    """Return what is written to a terminal until nobody holds its other end, and close it."""
    shown = b""
    try:
        while piece := os.read(leader, 4096):
            shown += piece
    except OSError:  # nobody holds the other end any more
        pass
    os.close(leader)
    return shown.decode()


def in_terminal(columns: int, lines: int, *words: str, status: int = 0) -> list[str]:
    """Return what an `otel-torch` command prints in a terminal of that size, without its colors."""
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (lines, columns))
    environ = {name: value for name, value in os.environ.items() if name not in _TERMINAL_SIZE}
    process = subprocess.Popen(
        [command_of_tests("otel-torch"), *words],
        stdout=follower,
        stderr=subprocess.DEVNULL,
        env={**environ, "TERM": "xterm"},
    )
    os.close(follower)
    shown = read_terminal(leader)
    assert process.wait(60) == status, shown
    return re.sub(r"\x1b\[\d*m", "", shown).splitlines()


def progress_in_terminal(*words: str) -> tuple[str, str]:
    """Run an `otel-torch` command whose stderr is a terminal; return its stdout, and what it draws
    there.
    """
    leader, follower = pty.openpty()
    done = subprocess.run(
        [command_of_tests("otel-torch"), *words],
        stdout=subprocess.PIPE,
        stderr=follower,
        env={**os.environ, "TERM": "xterm"},
        timeout=120,
        check=True,
    )
    os.close(follower)
    return done.stdout.decode(), read_terminal(leader)
