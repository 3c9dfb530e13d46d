"""The table of attacks. Each is a function of an arena, whose random numbers decide what it does; it
raises `BrokenPromise`.
"""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos import promises
from tests.chaos.arena import ROOT, Arena, Plan, Run, read_told
from tests.chaos.odd import ODD
from tests.chaos.promises import require
from tests.e2e.ports import free_port
from tests.hostile_server import ANSWERS, HostileServer, silent
from tests.otlp_receiver import Receiver
from tests.support import PROGRAMS, environment

CAPTURES = ("outputs", "inputs,outputs", "outputs,gradients", "parity")
SIGNALS = ("spans,log_events,metrics", "spans,span_events,log_events,metrics", "spans,span_events")
# how a program ends: whether it can leave everything in order, and its status
ENDS = {
    "SIGTERM": (True, -signal.SIGTERM),
    "SIGINT": (True, -signal.SIGINT),
    "SIGKILL": (False, -signal.SIGKILL),
    "SIGQUIT": (False, -signal.SIGQUIT),
    "SIGHUP": (False, -signal.SIGHUP),
    "os._exit": (True, 3),
    "raise": (True, 1),
}


def kill(arena: Arena) -> None:
    """End a program at any moment, in any way; half of them send to a silent receiver."""
    end = arena.rng.choice(list(ENDS))
    after_s = None if end == "raise" else arena.rng.uniform(0.0, 0.8)
    handler = end == "SIGINT" and arena.rng.random() < 0.5
    plan = Plan(seed=arena.rng.randrange(5), steps=60, end=end, after_s=after_s, handler=handler)
    capture = {"OTEL_TORCH_CAPTURE": arena.rng.choice(CAPTURES)}
    bare = arena.run(plan.undisturbed, recorded=False)
    calm = arena.run(plan.undisturbed, **capture)
    with HostileServer(silent) as server:
        sends = server.environment if arena.rng.random() < 0.5 else {}
        run = arena.run(plan, **capture, **sends)
    in_order, status = ENDS[end]
    require(run.status == (4 if handler else status), f"the status after {end} is {run.status}")
    promises.outputs_are_those_of(bare, run, whole=end == "raise")
    promises.exit_is_in_time(bare, run)
    promises.messages_are_clear(run.stderr, interrupted=end == "SIGINT")
    path = run.folder / "run.jsonl"
    rows = promises.recording_is_whole(path, may_be_cut=not in_order)
    promises.is_start_of(path, calm.folder / "run.jsonl")
    promises.counts_are_true(path, rows, cleanly=in_order)
    all_rows = promises.recording_is_whole(calm.folder / "run.jsonl")
    promises.steps_are_recorded(rows, all_rows, len(run.told.get("main", [])))


def send_to_hostile_server(arena: Arena) -> None:
    """Send to a receiver that does anything but its work, over both protocols."""
    name = arena.rng.choice(list(ANSWERS))
    protocol = arena.rng.choice(["http/protobuf", "grpc"])
    plan = Plan(steps=arena.rng.choice([2, 30]))
    bare = arena.run(plan, recorded=False)
    with HostileServer(ANSWERS[name], reads=protocol != "grpc") as server:
        environ = server.environment | {"OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
        run = arena.run(plan, OTEL_TORCH_SIGNALS=arena.rng.choice(SIGNALS), **environ)
    check_ended_well(bare, run)
    said = "did not" in run.stderr or "the data" in run.stderr or "closed" in run.stderr
    require(said or "lost: " in run.stderr or "answers at" in name or "sends a" in name,
            f"nothing is said of a server that {name}: {run.stderr}")  # fmt: skip


def send_to_failing_collector(arena: Arena) -> None:
    """Send to a collector that refuses, rejects, is unavailable, never answers or is gone."""
    mode = arena.rng.choice(["accept", "reject", "unavailable", "refuse", "never", "gone"])
    protocol = arena.rng.choice(["http", "grpc"])
    plan = Plan(steps=arena.rng.choice([2, 30]))
    bare = arena.run(plan, recorded=False)
    with Receiver("accept" if mode == "gone" else mode) as receiver:
        environ = receiver.environment(protocol)
        if mode == "gone":
            environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{free_port()}"
        run = arena.run(plan, OTEL_TORCH_SIGNALS=arena.rng.choice(SIGNALS), **environ)
    check_ended_well(bare, run)
    require(("lost: " in run.stderr) is (mode != "accept"), f"{mode}: {run.stderr}")


def check_ended_well(bare: Run, run: Run) -> None:
    """Check a run that nothing has disturbed but what is outside of it."""
    require(run.status == bare.status, f"the status is {run.status}: {run.stderr[-2000:]}")
    promises.outputs_are_those_of(bare, run, whole=True)
    promises.exit_is_in_time(bare, run)
    promises.messages_are_clear(run.stderr)
    path = run.folder / "run.jsonl"
    promises.counts_are_true(path, promises.recording_is_whole(path), cleanly=True)


def fill_the_disk(arena: Arena) -> None:
    """Record onto a disk that is full at some point; the program must not notice."""
    plan = Plan(steps=60, pause_s=0.0)
    bare = arena.run(plan, recorded=False)
    folder = arena.make_folder()
    disk, copy = folder / "disk", folder / "copy"
    disk.mkdir()
    variables = {
        "CHAOS_PLAN": json.dumps(vars(plan)),
        "PYTHONPATH": str(ROOT),
        "OTEL_TORCH_JSONL": str(disk / "run.jsonl"),
        "OTEL_TORCH_CAPTURE": arena.rng.choice(CAPTURES),
    }
    if arena.rng.random() < 0.4:
        variables["OTEL_TORCH_OTLP_FILE"] = str(disk / "otlp")
    if arena.rng.random() < 0.3:
        variables["OTEL_TORCH_TENSORS"] = str(disk / "tensors")
    kilobytes = int(2 ** arena.rng.uniform(5, 10))
    command = (
        f"mount -t tmpfs -o size={kilobytes}k tmpfs disk && "
        f"{shlex.quote(sys.executable)} {shlex.quote(str(PROGRAMS / 'chaos.py'))}; "
        "status=$?; cp -r disk copy; exit $status"
    )
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", command],
        env=environment(folder, **variables),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    told, _ = read_told(folder)
    run = Run(folder, done.returncode, done.stderr, told, bare.exit_s)
    require(run.status == 0, f"the status is {run.status}: {run.stderr[-2000:]}")
    promises.outputs_are_those_of(bare, run, whole=True)
    promises.messages_are_clear(run.stderr)
    path = copy / "run.jsonl"
    rows = promises.recording_is_whole(path)
    metadata = promises.counts_are_true(path, rows, cleanly=True)
    if "the recording ends here" in run.stderr:
        require(metadata["writing_ended"] == "disk", f"the metadata says {metadata}")
        lost = {entry["reason"] for entry in metadata["lost"] if entry["what"] == "record"}
        require(lost == {"disk"}, f"the metadata has {metadata['lost']} as lost")


def fork_and_thread(arena: Arena) -> None:
    """Train in threads and forked children at once: each process is recorded once."""
    plan = Plan(
        steps=15, threads=arena.rng.choice([0, 0, 3]), forks=arena.rng.randrange(4), pause_s=0.002
    )
    bare = arena.run(plan, recorded=False)
    with Receiver() as receiver:
        sends = receiver.environment("http") if arena.rng.random() < 0.3 else {}
        run = arena.run(plan, **sends)
    require(run.status == bare.status, f"the status is {run.status}: {run.stderr[-2000:]}")
    promises.outputs_are_those_of(bare, run, whole=True)
    promises.exit_is_in_time(bare, run)
    promises.messages_are_clear(run.stderr)
    paths = list(run.folder.glob("*.jsonl"))
    require(len(paths) == 1 + plan.forks, f"{1 + plan.forks} processes, {len(paths)} recordings")
    for path in paths:
        promises.counts_are_true(path, promises.recording_is_whole(path), cleanly=True)


def return_odd_things(arena: Arena) -> None:
    """Return what no hook expects, with every capture, whole tensors now and then."""
    plan = Plan(steps=3, odd=arena.rng.choice(list(ODD)))
    variables = {"OTEL_TORCH_CAPTURE": arena.rng.choice(CAPTURES)}
    bare = arena.run(plan, recorded=False)
    if arena.rng.random() < 0.5:
        variables["OTEL_TORCH_TENSORS"] = str(arena.folder / "tensors")
    check_ended_well(bare, arena.run(plan, **variables))


# what is put in place of a part of a line
_ODD_VALUES = ("null", "true", "1e999", "-1", "[]", "{}", '"\\u0000"', "[" * 2000, '{"a":' * 50,
               "1" * 400, '"' + "x" * 100_000 + '"', "NaN", "\\", "\xff")  # fmt: skip


def damage(arena: Arena, data: bytes) -> bytes:
    """Return a damaged copy of a file of JSON lines."""
    rng = arena.rng
    for _ in range(rng.choice([1, 1, 2, 20])):
        how = rng.randrange(7)
        start = rng.randrange(max(1, len(data)))
        lines = data.split(b"\n")
        if how == 0:
            data = data[:start]
        elif how == 1:
            data = data[:start] + rng.randbytes(rng.randrange(1, 20)) + data[start + 5 :]
        elif how == 2:
            data = data + rng.choice(lines) * rng.choice([1, 2])
        elif how == 3:
            rng.shuffle(lines)
            data = b"\n".join(lines)
        elif how == 4:
            data = data[:start] + b"\0" * rng.choice([1, 100_000]) + data[start:]
        else:
            number = rng.randrange(len(lines))
            lines[number] = replace_value(arena, lines[number])
            data = b"\n".join(lines)
    return data


def replace_value(arena: Arena, line: bytes) -> bytes:
    """Return a line in which a value, or a key, is something else."""
    parts = line.split(b":")
    number = arena.rng.randrange(len(parts))
    value = arena.rng.choice(_ODD_VALUES).encode("latin-1")
    rest = parts[number].partition(b",")
    parts[number] = value + rest[1] + rest[2]
    return b":".join(parts)


def damage_recordings(arena: Arena) -> None:
    """Give damaged recordings and metadata to the commands that read them."""
    capture = arena.rng.choice(["outputs", "parity"])
    run = arena.run(Plan(steps=4), OTEL_TORCH_CAPTURE=capture)
    whole = run.folder / "run.jsonl"
    damaged = arena.folder / "damaged.jsonl"
    damaged.write_bytes(damage(arena, whole.read_bytes()))
    metadata = whole.with_name("run.meta.json").read_bytes()
    if arena.rng.random() < 0.5:
        metadata = damage(arena, metadata)
    damaged.with_name("damaged.meta.json").write_bytes(metadata)
    for arguments in (("show", damaged), ("diff", whole, damaged), ("diff", damaged, whole)):
        done = arena.command(*arguments)
        promises.command_is_clear(arguments[0], done.returncode, done.stderr, (0, 1, 2))


def damage_otlp_files(arena: Arena) -> None:
    """Give damaged OTLP files to `send`, whose receiver may be hostile."""
    run = arena.run(Plan(steps=4), OTEL_TORCH_OTLP_FILE="otlp", OTEL_TORCH_SIGNALS=SIGNALS[1])
    for path in (run.folder / "otlp").glob("*.jsonl"):
        path.write_bytes(damage(arena, path.read_bytes()))
    quick = {"OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    name = arena.rng.choice(list(ANSWERS))
    with Receiver() as receiver, HostileServer(ANSWERS[name]) as server:
        hostile = arena.rng.random() < 0.5
        environ = server.environment if hostile else receiver.environment("http")
        done = arena.command("send", run.folder / "otlp", "--give-up", "2", **quick, **environ)
    promises.command_is_clear("send", done.returncode, done.stderr, (0, 1, 2))


def read_huge_files(arena: Arena) -> None:
    """Give files with a huge line, or with very many lines, to the commands."""
    run = arena.run(Plan(steps=2), OTEL_TORCH_OTLP_FILE="otlp")
    huge = arena.folder / "huge.jsonl"
    lines = (run.folder / "run.jsonl").read_bytes().splitlines(keepends=True)
    if arena.rng.random() < 0.5:
        row: dict[str, Any] = json.loads(lines[0])
        row[arena.rng.choice(["module", "model", "extra"])] = "x" * arena.rng.choice([10**6, 10**8])
        data = b"".join([*lines, json.dumps(row).encode() + b"\n"])
    else:
        rows = [json.loads(line) for line in lines]
        data = "".join(
            json.dumps(row | {"step": step}) + "\n" for step in range(20_000) for row in rows
        ).encode()
    huge.write_bytes(data)
    shutil.copy(run.folder / "run.meta.json", arena.folder / "huge.meta.json")
    for arguments in (("show", huge), ("diff", run.folder / "run.jsonl", huge)):
        done = arena.command(*arguments)
        promises.command_is_clear(arguments[0], done.returncode, done.stderr, (0, 1, 2))


Attack = Callable[[Arena], None]
ATTACKS: dict[str, Attack] = {
    "kill": kill,
    "hostile-server": send_to_hostile_server,
    "failing-collector": send_to_failing_collector,
    "full-disk": fill_the_disk,
    "forks-and-threads": fork_and_thread,
    "odd-modules": return_odd_things,
    "damaged-recordings": damage_recordings,
    "damaged-otlp": damage_otlp_files,
    "huge-files": read_huge_files,
}


def folder_of(name: str, number: int, root: Path) -> Path:
    """Return the folder of an attempt."""
    return root / f"{number:04}-{name}"
