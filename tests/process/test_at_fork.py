"""Callbacks around a fork: one order, whatever was imported first, and no callback of a dead object."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

import pytest

from otel_torch.process import at_fork
from otel_torch.process.at_fork import ForkOrder
from tests.support import run_python

PACKAGE = Path(at_fork.__file__).parent

FORKED = """
import os, sys
from otel_torch.process import at_fork
from otel_torch.process.at_fork import ForkOrder

calls = []
for order in reversed(ForkOrder):
    at_fork.register(
        order,
        before=lambda order=order: calls.append(f"before {order}"),
        in_parent=lambda order=order: calls.append(f"parent {order}"),
        in_child=lambda order=order: calls.append(f"child {order}"),
    )
at_fork.register(ForkOrder.PROFILER, in_child=lambda: 1 / 0)
child = os.fork()
if child == 0:
    print(*calls, sep="\\n", flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(*calls, sep="\\n")
"""

RECORDED = """
from otel_torch.telemetry import ids  # before the rooms that come first in a child
from otel_torch.telemetry.otlp import export_queue
import otel_torch, torch
from otel_torch.process import at_fork

for _ in range(2):
    with otel_torch.region("training_step"):
        pass
otel_torch.get_or_create_profiler("profiles")
for callback in at_fork.child_callbacks():
    print(callback.__module__.removeprefix("otel_torch."))
"""


def test_callbacks_run_in_their_order_and_one_that_fails_stops_none(tmp_path: Path) -> None:
    done = run_python(tmp_path, FORKED, is_taken_apart=True)
    count = len(ForkOrder)
    before = [f"before {n}" for n in range(count, 0, -1)]
    child = [f"child {n}" for n in range(1, count + 1)]
    parent = [f"parent {n}" for n in range(1, count + 1)]
    assert done.stdout.split("\n")[:-1] == before + child + before + parent
    assert "<lambda> failed around a fork: ZeroDivisionError" in done.stderr


def test_what_a_recorded_process_resets_in_a_child_comes_in_one_order(tmp_path: Path) -> None:
    done = run_python(
        tmp_path, RECORDED, is_taken_apart=True, OTEL_EXPORTER_OTLP_ENDPOINT="http://localhost:1"
    )
    assert list(dict.fromkeys(done.stdout.split())) == [
        "regions.device_time",
        "regions.closer",
        "regions.entry",
        "regions.profiler",
        "bootstrap",
        "telemetry.otlp.export_queue",
        "telemetry.ids",
    ]


def test_a_method_is_forgotten_with_its_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_fork, "_in_child", {order: [] for order in ForkOrder})
    calls: list[str] = []

    class Owner:
        def reset(self) -> None:
            calls.append("reset")

    owner = Owner()
    at_fork.register(ForkOrder.SESSION, in_child=owner.reset)
    [callback] = at_fork.child_callbacks()
    callback()
    del owner, callback
    gc.collect()
    assert calls == ["reset"] and list(at_fork.child_callbacks()) == []
    at_fork.register(ForkOrder.SESSION, in_child=gc.collect)
    assert len(at_fork._in_child[ForkOrder.SESSION]) == 1


def test_nothing_else_registers_with_the_interpreter() -> None:
    users = [
        path.name
        for path in PACKAGE.rglob("*.py")
        if re.search(r"os\.register_at_fork", path.read_text())
    ]
    assert users == ["at_fork.py"] and hasattr(os, "register_at_fork")


FORK_DURING_AN_IMPORT = """
import os, signal, sys, threading
from otel_torch.process import at_fork

sys.path.insert(0, os.getcwd())
begun = threading.Event()

def importing():
    with at_fork.no_fork():
        begun.set()
        import slow

thread = threading.Thread(target=importing)
thread.start()
begun.wait()
child = os.fork()
if not child:
    signal.alarm(60)  # without the wait this import never ends
    import slow
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""


def test_a_fork_waits_for_the_imports_of_another_thread(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(1)\n")
    assert run_python(tmp_path, FORK_DURING_AN_IMPORT, fresh=True).stdout == "0\n"
