"""Runs the tests' programs in child processes: forked from an interpreter that has imported torch and
this package, or in fresh interpreters.

A forked program takes a tenth of a second; importing torch takes two, and the SDK of OpenTelemetry a
third of one. With `FRESH_INTERPRETERS=1` every program gets a fresh interpreter, and all results
must be the same; variables that are read while Python or torch loads have the same effect for one
program. Commands that start programs find a `python` of forked programs (`folder_of_commands`).

Fresh in any case (`fresh=True`, or a command that starts `sys.executable`):
- start-up files, the switch, `-m`, `-c`, standard input, and most commands (test_startup,
  test_processes, tests/cli);
- spawned and forked children, workers of the compiler, torchrun (test_processes);
- an end of each kind: normal, Ctrl-C, SIGTERM, a daemon thread (test_processes);
- programs that import this package before torch, and a run from end to end (test_end_to_end);
- equal bytes of two runs, because strings hash differently in each interpreter (test_processes,
  test_parity_capture, test_noise);
- a run of the torch profiler (test_profiler), a pair of recordings (corpora/test_small), and
  FastVideo (tests/fastvideo).

Forked, but taken apart at the end as a fresh interpreter is (`is_taken_apart=True`): all other ends
(test_processes, test_endings, test_at_fork).
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from tests.e2e.ports import free_port
from tests.programs.forked_python import added_folders, loads_alike, read_at_load

SERVER = Path(__file__).with_name("warm_interpreter.py")
STAND_IN = Path(__file__).with_name("programs") / "forked_python.py"
# what a warm interpreter imports, each hidden from the program until the program imports it too; not grpc, which reads
# once what it may log
OPENTELEMETRY = (
    "opentelemetry.sdk.trace",
    "opentelemetry.sdk.metrics",
    "opentelemetry.sdk._logs",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    "opentelemetry.exporter.otlp.proto.http._log_exporter",
)
TORCH = (
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    *OPENTELEMETRY,
)


class WarmInterpreter:
    """A process of `warm_interpreter.py`, which ends with this one."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._environment = {k: v for k, v in environment.items() if not k.startswith("OTEL_")}
        self._control, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind("")  # to an abstract address that the kernel chooses
        self._address = listener.getsockname()[1:].decode()
        listener.listen()
        with remote, listener:
            self._process = subprocess.Popen(
                [sys.executable, SERVER, str(listener.fileno()), *modules],
                env=self._environment, stdin=remote, stdout=subprocess.DEVNULL, pass_fds=[listener.fileno()],
            )  # fmt: skip
        atexit.register(self.close)

    def can_fork(self, environment: Mapping[str, str]) -> bool:
        """Return whether Python and torch would load identically in this environment."""
        return loads_alike(environment, self._environment)

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str | Path,
        is_taken_apart: bool = False,
    ) -> Program:
        """Start `argv[0]`, a script, with pipes as its standard output and error."""
        out, err, null = os.pipe(), os.pipe(), os.open(os.devnull, os.O_RDONLY)
        reply, remote = socket.socketpair()
        request = {
            "argv": list(argv), "env": dict(env), "cwd": str(cwd), "is_taken_apart": is_taken_apart,
            "executable": sys.executable, "added_folders": added_folders(env, self._environment),
        }  # fmt: skip
        passed = [null, out[1], err[1], remote.fileno()]
        try:
            socket.send_fds(self._control, [json.dumps(request).encode()], passed)
        finally:
            for descriptor in (null, out[1], err[1]):
                os.close(descriptor)
            remote.close()
        return Program(argv, reply, out[0], err[0])

    def write_python(self, command: Path, python: Path, folders: Sequence[Path] = ()) -> None:
        """Write a command that forks programs, with more folders on their path, and leaves the rest to `python`."""
        words = [
            sys.executable, "-IS", str(STAND_IN), str(python), self._address,
            json.dumps(read_at_load(self._environment)), str(command), os.pathsep.join(map(str, folders)),
        ]  # fmt: skip
        command.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        command.chmod(0o755)

    def close(self) -> None:
        self._control.close()
        self._process.wait()


class Program:
    """A program that a warm interpreter runs: the part of `subprocess.Popen` that tests use."""

    def __init__(self, argv: Sequence[str], reply: socket.socket, out: int, err: int) -> None:
        self.args = list(argv)
        with reply:
            self._reply = reply.makefile("rb")
        self._streams = {out: bytearray(), err: bytearray()}
        pid = self._reply.readline()
        if not pid:
            raise RuntimeError(f"{SERVER.name} has ended; its error is in the output of the tests")
        self.pid = int(pid)

    def kill(self) -> None:
        """Kill the program unless it has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def communicate(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """Wait for the exit status and for the end of the standard output and error.

        Raises: subprocess.TimeoutExpired, after killing the program, with a note of what it printed and where its
            threads were.
        """
        deadline = time.monotonic() + timeout
        status = b""
        with selectors.DefaultSelector() as selector, self._reply:
            for descriptor in (*self._streams, self._reply):
                selector.register(descriptor, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(deadline - time.monotonic())
                if not ready and time.monotonic() >= deadline:
                    raise self._timed_out(timeout)
                for key, _ in ready:
                    if key.fileobj is self._reply:
                        status = self._reply.readline()
                        selector.unregister(self._reply)
                    elif data := os.read(key.fd, 1 << 16):
                        self._streams[key.fd] += data
                    else:
                        selector.unregister(key.fd)
                        os.close(key.fd)
        out, err = (content.decode() for content in self._streams.values())
        return subprocess.CompletedProcess(self.args, int(status), out, err)

    def _timed_out(self, timeout: float) -> subprocess.TimeoutExpired:
        """Kill the program; return the error, with a note of what it printed and where its threads were."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR2)
            time.sleep(1)  # it writes its stacks
        self.kill()
        error = subprocess.TimeoutExpired(self.args, timeout)
        for descriptor, content in self._streams.items():
            with suppress(OSError):  # closed at its end
                os.set_blocking(descriptor, False)
                content += os.read(descriptor, 1 << 20)
            error.add_note(content.decode(errors="replace"))
        return error


_warm: dict[tuple[str, ...], WarmInterpreter] = {}
_lock = threading.Lock()


def heed_signals() -> None:
    """Heed what this process was started to ignore: child processes would ignore it, too.

    `nohup` ignores SIGHUP, and a shell ignores SIGINT and SIGQUIT in what it runs in the background.
    """
    defaults = {
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGINT: signal.default_int_handler,
        signal.SIGQUIT: signal.SIG_DFL,
    }
    for number, handler in defaults.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def warm_interpreter(
    modules: tuple[str, ...], environment: Mapping[str, str]
) -> WarmInterpreter | None:
    """Return the interpreter that has imported `modules`, or None where a fresh one is needed."""
    if os.environ.get("FRESH_INTERPRETERS") or not hasattr(os, "pidfd_open"):
        return None
    with _lock:
        if modules not in _warm:
            _warm[modules] = WarmInterpreter(modules, environment)
    interpreter = _warm[modules]
    return interpreter if interpreter.can_fork(environment) else None


@functools.cache
def folder_of_commands() -> Path:
    """Return a folder with `python` and `otel-torch`, whose programs are forked where that is possible: for commands
    that start programs.
    """
    warm = warm_interpreter(TORCH, os.environ)
    if warm is None:
        return Path(sys.executable).parent
    folder = tempfile.TemporaryDirectory(prefix="python-of-tests-")
    atexit.register(folder.cleanup)
    warm.write_python(Path(folder.name, "python"), Path(sys.executable))
    command = Path(folder.name, "otel-torch")
    command.write_text('#!/bin/sh\nexec "${0%/*}/python" -m otel_torch "$@"\n')
    command.chmod(0o755)
    return Path(folder.name)


def command_of_tests(name: str) -> str:
    """Return the path of `python` or `otel-torch` in `folder_of_commands`."""
    return str(folder_of_commands() / name)


def fork_programs_of(python: Path, folders: Sequence[Path]) -> None:
    """Have the programs of an environment forked where that is possible, with these folders on their path."""
    if (warm := warm_interpreter(TORCH, os.environ)) is not None:
        warm.write_python(python, python.rename(python.with_name("fresh-python")), folders)


def run_script(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str | Path,
    timeout: float,
    modules: tuple[str, ...] = TORCH,
    fresh: bool = False,
    is_taken_apart: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `argv[0]`, a script, as `python argv[0] …` would.

    Args:
        modules: what the interpreter may have imported before the program starts.
        fresh: start a new interpreter.
        is_taken_apart: take all modules apart at the end, as a new interpreter does.
    """
    warm = None if fresh else warm_interpreter(modules, env)
    if warm is None:
        return subprocess.run(
            [sys.executable, *argv],
            env=env, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
    return warm.start(argv, env, cwd, is_taken_apart).communicate(timeout)


def run_group(
    argv: Sequence[str], env: Mapping[str, str], cwd: str | Path, timeout: float, ranks: int
) -> subprocess.CompletedProcess[str] | None:
    """Run a script once for each rank of a group, with torchrun's variables but without torchrun.

    A rank that fails ends the others.

    Returns:
        The output of all ranks, and the status of the first rank that failed or 0. None if fresh
        interpreters are needed.

    Raises: BaseExceptionGroup of what `Program.communicate` raises.
    """
    warm = warm_interpreter(TORCH, env)
    if warm is None:
        return None
    shared = dict(env) | {
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
    }  # fmt: skip
    programs = [
        warm.start(argv, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd)
        for rank in range(ranks)
    ]
    failed: list[int] = []

    def wait(program: Program) -> subprocess.CompletedProcess[str]:
        done = program.communicate(timeout)
        if done.returncode and not failed:
            failed.append(done.returncode)
            for peer in programs:
                if peer is not program:
                    peer.kill()
        return done

    with ThreadPoolExecutor(ranks) as pool:
        waiting = [pool.submit(wait, program) for program in programs]
    if errors := [error for each in waiting if (error := each.exception())]:
        raise BaseExceptionGroup("a rank has not ended", errors)
    done = [each.result() for each in waiting]
    out, err = "".join(each.stdout for each in done), "".join(each.stderr for each in done)
    return subprocess.CompletedProcess(list(argv), failed[0] if failed else 0, out, err)
