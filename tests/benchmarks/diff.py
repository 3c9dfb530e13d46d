"""Measures `diff` on two recordings of a million records, relative to reading both with the
fastest JSON readers, in turns: on the wall, and by the processor's time of all threads.

    python -m tests.benchmarks.diff [--records 1000000] [--folder FOLDER] [--linear] [--json -]

A tiny Llama of 28 layers is recorded twice, by its eager attention and by another kernel; the rows
of its forward are then written again and again, each time with new numbers, until both files have
as many records as asked for. Prints ratios of one run on one machine; nothing here passes or fails.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from tests.benchmarks.figures import Figure, environment, module_command, tell
from tests.benchmarks.pairing import Rounds

LAYERS = 28
SCALED = ("abs_mean", "sum", "min", "max", "mean", "std", "rms", "l2")


def record(kernel: str) -> None:
    """Run the recorded program: one forward pass of a small language model with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=64, attn_implementation=kernel,
    )  # fmt: skip
    with torch.no_grad():
        LlamaForCausalLM(config).eval()(torch.arange(24).reshape(2, 12), use_cache=False)


def recorded(kernel: str, path: Path, **settings: str) -> Path:
    """Record that program in a child process."""
    asked = {
        "OTEL_TORCH_ENABLED": "1",
        "OTEL_TORCH_CAPTURE": "parity",
        "OTEL_TORCH_JSONL": str(path),
        **settings,
    }
    subprocess.run(
        module_command("diff", "--record", kernel),
        env=environment(**asked),
        check=True,
        capture_output=True,
    )
    return path


def lengthen(short: Path, long: Path, steps: int) -> None:
    """Repeat the rows of a recording's forward pass as further steps with different numbers."""
    rows = [json.loads(line) for line in short.read_text().splitlines()]
    attached = [row for row in rows if row["phase"] == "attach"]
    forward = [row for row in rows if row["phase"] != "attach"]
    sketches = {
        index: np.frombuffer(base64.b64decode(row["sketch"]), "<f4")
        for index, row in enumerate(forward)
        if "sketch" in row
    }
    ahead = {name: 1 + max(row[name] for row in rows) for name in ("value", "storage")}
    events = 1 + max(max(row["order"]) for row in forward)
    with open(long, "w", encoding="utf-8") as file:
        for row in attached:
            file.write(json.dumps(row) + "\n")
        for step in range(steps):
            scale = 1 - 0.25 * abs(math.sin(1 + step))
            for index, row in enumerate(forward):
                new = dict(row, step=step)
                for name in SCALED:
                    if name in new:
                        new[name] *= scale
                for name, count in ahead.items():
                    new[name] += step * count
                new["order"] = [number + step * events for number in row["order"]]
                if row["parent"] is not None:
                    new["parent"] = row["parent"] + step * events
                if index in sketches:
                    new["sketch"] = base64.b64encode(
                        (sketches[index] * np.float32(scale)).tobytes()
                    ).decode()
                file.write(json.dumps(new) + "\n")
    source, target = (
        path.with_name(path.name.removesuffix(".jsonl") + ".meta.json") for path in (short, long)
    )
    meta = json.loads(source.read_text())
    for facts in meta["models"].values():
        facts["forwards"] = steps
    target.write_text(json.dumps(meta))


# -- what is measured


def _orjson_lines(path: Path) -> None:
    import orjson

    with open(path, "rb") as file:
        for line in file:
            orjson.loads(line)


def _blocks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        rest = b""
        while block := file.read(1 << 20):
            block = rest + block
            end = block.rfind(b"\n") + 1
            yield block[:end]
            rest = block[end:]


def _orjson_blocks(path: Path) -> None:
    import orjson

    for block in _blocks(path):
        orjson.loads(b"[" + block[:-1].replace(b"\n", b",") + b"]")


def _msgspec_blocks(path: Path) -> None:
    import msgspec

    decoder = msgspec.json.Decoder()
    for block in _blocks(path):
        decoder.decode_lines(block)


def _standard_library(path: Path) -> None:
    with open(path, "rb") as file:
        for line in file:
            json.loads(line)


_DIFF = "diff"
READERS: dict[str, Callable[[Path], None]] = {
    "orjson, lines": _orjson_lines,
    "orjson, blocks": _orjson_blocks,
    "msgspec, blocks": _msgspec_blocks,
}

_MEASURED_DIFF = """
import json, resource, sys, time
from otel_torch.parity.compare import compare
first = time.perf_counter(), time.process_time()
report = compare(*sys.argv[1:3])
wall, spent = time.perf_counter() - first[0], time.process_time() - first[1]
readers = resource.getrusage(resource.RUSAGE_CHILDREN)
spent += readers.ru_utime + readers.ru_stime
peaks = [usage.ru_maxrss / 1024 for usage in (resource.getrusage(resource.RUSAGE_SELF), readers)]
print(json.dumps([wall, spent, *peaks, report.verdict, report.pairs]))
"""


class _Spent(NamedTuple):
    """Seconds on the wall, and of the processor in all threads and processes."""

    wall: float
    cpu: float


class _Compared(NamedTuple):
    """A comparison: peaks in MB, of itself and of the largest of its child processes."""

    spent: _Spent
    peak: float
    child_peak: float
    verdict: str
    pairs: int


def measured_diff(reference: Path, port: Path) -> _Compared:
    """Measure a comparison in a child process."""
    command = [sys.executable, "-c", _MEASURED_DIFF, str(reference), str(port)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    wall, cpu, peak, child_peak, verdict, pairs = json.loads(done.stdout)
    return _Compared(_Spent(wall, cpu), peak, child_peak, verdict, pairs)


def measured_reading(reader: Callable[[Path], None], *paths: Path) -> _Spent:
    """Measure the reading of the files."""
    start = time.perf_counter(), time.process_time()
    for path in paths:
        reader(path)
    return _Spent(time.perf_counter() - start[0], time.process_time() - start[1])


def run(
    folder: Path, short: tuple[Path, Path], records: int, rounds: int
) -> tuple[list[Figure], float]:
    """Write two recordings of that length; return the figures of `diff` and the readers, and the
    processor's seconds a record of `diff`.
    """
    paths = folder / f"ref.{records}.jsonl", folder / f"port.{records}.jsonl"
    fewest = min(
        sum(json.loads(line)["phase"] == "forward" for line in path.read_text().splitlines())
        for path in short
    )
    for recording, path in zip(short, paths, strict=True):
        if not path.exists():
            lengthen(recording, path, -(-records // fewest))
    size = sum(path.stat().st_size for path in paths)
    order = random.Random(0)
    spent: dict[str, list[_Spent]] = {name: [] for name in (_DIFF, *READERS)}
    compared: list[_Compared] = []
    for _ in range(rounds):
        for name in order.sample(list(spent), len(spent)):
            if name == _DIFF:
                compared.append(measured_diff(*paths))
                spent[name].append(compared[-1].spent)
            else:
                spent[name].append(measured_reading(READERS[name], *paths))
    wall = Rounds({name: [part.wall for part in parts] for name, parts in spent.items()})
    cpu = Rounds({name: [part.cpu for part in parts] for name, parts in spent.items()})
    medians = {name: median(seconds) for name, seconds in cpu.seconds.items()}
    fastest = min(READERS, key=lambda name: medians[name])
    shown = "; ".join(f"{name} {seconds:.1f} s" for name, seconds in medians.items())
    label = f"`diff` of 2 × {records:,} records"
    by_wall, by_cpu = (measured.ratio(_DIFF, fastest) for measured in (wall, cpu))
    last = compared[-1]
    detail = (
        f"{size / 1e6:,.0f} MB, {last.verdict}, {last.pairs:,} pairs; {by_wall} on the wall "
        f"({median(wall.seconds[_DIFF]):.1f} s), of the processor {by_cpu}: {shown}"
    )
    child_peak = max(comparison.child_peak for comparison in compared)
    return [
        Figure.estimated(
            f"{label}, time over reading both by the fastest reader", by_wall, 1.5, detail
        ),
        Figure.estimated(
            f"{label}, processor's time over reading both by the fastest reader",
            by_cpu,
            1.5,
            f"{by_cpu}; all threads and processes",
        ),
        Figure(
            f"{label}, most memory, MB",
            max(comparison.peak for comparison in compared),
            100,
            "the largest resident size of the process that compares"
            + (f"; of one that it starts {child_peak:.0f}" if child_peak else ""),
        ),
    ], medians[_DIFF] / records


def linearity(spent: dict[int, float]) -> Figure:
    """Return the growth of the time a record with the length; 1 is none."""
    few, many = min(spent), max(spent)
    shown = "; ".join(f"{records:,}: {1e6 * seconds:.1f} µs" for records, seconds in spent.items())
    return Figure(
        f"`diff`, processor's time a record at {many:,} records over {few:,}",
        spent[many] / spent[few],
        1.2,
        shown,
    )


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", help=argparse.SUPPRESS)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument(
        "--folder", type=Path, help="keeps the recordings there instead of in a temporary folder"
    )
    parser.add_argument(
        "--linear", action="store_true", help="a quarter and a half of the records, too"
    )
    parser.add_argument(
        "--json",
        help="write {'figures': […]} to this file, or print it (-), instead of lines for people",
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often each side is measured")
    parser.add_argument("--smallest", action="store_true", help="only show that it runs")
    arguments = parser.parse_args(argv)
    if arguments.record:
        record(arguments.record)
        return 0
    most = 1_000 if arguments.smallest else arguments.records
    rounds = 2 if arguments.smallest else arguments.rounds
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        short = (
            recorded("eager", folder / "ref.short.jsonl"),
            recorded("sdpa", folder / "port.short.jsonl"),
        )
        runs = {
            most // part: run(folder, short, most // part, rounds)
            for part in ((4, 2, 1) if arguments.linear else (1,))
        }
    figures = [figure for measured, _ in runs.values() for figure in measured]
    if arguments.linear:
        figures.append(linearity({records: spent for records, (_, spent) in runs.items()}))
    tell(figures, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
