"""Measures what comparing the ranks of two runs costs, from eight ranks to more, and computes a
thousand of them from the line through what was measured.

    python -m tests.benchmarks.ranks [--ranks 8,16,32,64,128] [--page docs/cluster.md] [--json -]

A tiny Llama is recorded once for each side of `A/ B/`, whose ranks are links to that recording with
metadata of their own; ranks beside one process are recorded on a row of its batch each.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.benchmarks.__main__ import machine, rewritten
from tests.benchmarks.diff import recorded
from tests.benchmarks.figures import Figure, environment, module_command, tell

RANKS = 8, 16, 32, 64, 128
COMPUTED_RANKS = 1024
_LOOK_EVERY_S = 0.05
_STARTS = 5
_HEADER = (
    "| compared | ranks | | on the wall, s | of the processor, s | most memory, MB |\n"
    "|---|--:|---|--:|--:|--:|"
)


class Spent(NamedTuple):
    """Seconds on the wall and of the processor, and the most memory, of a tree of processes."""

    wall: float
    cpu: float
    memory: float


# -- recordings


def record_parts(folder: Path, ranks: int) -> None:
    """Record a small language model on a batch, and on each row of it as one of the ranks does."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import otel_torch

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=28, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=64, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    batch = torch.randint(64, (ranks, 12))
    runs = {folder / "one.jsonl": batch}
    runs |= {folder / "ranks" / f"run.rank{rank}.jsonl": batch[rank, None] for rank in range(ranks)}
    for rank, (path, tokens) in enumerate(runs.items(), -1):
        otel_torch.start(jsonl=str(path), capture="parity")
        with torch.no_grad():
            model(tokens, use_cache=False)
        otel_torch.stop()
        if rank >= 0:
            _name_rank(path, path, rank, ranks)


def parts(folder: Path, ranks: int) -> tuple[Path, Path]:
    """Return the recording of one process and the folder of its ranks, made in another process."""
    (folder / "ranks").mkdir(parents=True)
    command = module_command("ranks", "--record", str(folder), "--ranks", str(ranks))
    subprocess.run(command, env=environment(), check=True, capture_output=True)
    return folder / "one.jsonl", folder / "ranks"


def copies(recording: Path, folder: Path, ranks: int) -> Path:
    """Return a folder in which each rank has the rows of this recording."""
    folder.mkdir(parents=True)
    for rank in range(ranks):
        path = folder / f"run.rank{rank}.jsonl"
        os.link(recording, path)
        _name_rank(recording, path, rank, ranks)
    return folder


def _name_rank(recording: Path, path: Path, rank: int, ranks: int) -> None:
    """Write the metadata of a recording as that of a rank."""
    meta = json.loads(recording.with_suffix(".meta.json").read_text())
    meta |= {"rank": rank, "world_size": ranks}
    path.with_suffix(".meta.json").write_text(json.dumps(meta))


# -- measuring


class _Watch(threading.Thread):
    """Looks at a process and all that it starts. Of one that has ended, the last look counts."""

    def __init__(self, process: int) -> None:
        import psutil

        super().__init__(daemon=True)
        self._gone = psutil.Error
        self._root = psutil.Process(process)
        self._seconds: dict[int, float] = {}
        self._ended = threading.Event()
        self.memory = 0.0

    def run(self) -> None:
        while not self._ended.wait(_LOOK_EVERY_S):
            self._look()

    def _look(self) -> None:
        memory = 0
        try:
            tree = [self._root, *self._root.children(recursive=True)]
        except self._gone:
            return
        for process in tree:
            try:
                times = process.cpu_times()
                memory += process.memory_full_info().pss
            except self._gone:
                continue
            self._seconds[process.pid] = times.user + times.system
        self.memory = max(self.memory, memory / 1e6)

    def end(self) -> float:
        """Stop looking; return the seconds of the processor that the tree took."""
        self._ended.set()
        self.join()
        return sum(self._seconds.values())


def measured_diff(reference: Path, port: Path, *options: str) -> Spent:
    """Measure the command that compares two folders, with all processes that it starts."""
    command = [sys.executable, "-m", "otel_torch", "diff", str(reference), str(port), *options]
    start = time.perf_counter()
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    watch = _Watch(process.pid)
    watch.start()
    _, errors = process.communicate()
    wall = time.perf_counter() - start
    cpu = watch.end()
    if process.returncode not in (0, 1):
        raise RuntimeError(errors.strip().splitlines()[-1])
    return Spent(wall, cpu, watch.memory)


def _tried(*arguments: Path | str) -> Spent:
    """Measure; again if a busy machine did not start Ray in the half minute that Ray waits."""
    for _ in range(_STARTS):
        try:
            return measured_diff(*arguments)  # type: ignore[arg-type]
        except RuntimeError as error:
            if "timed out during startup" not in str(error):
                raise
    return measured_diff(*arguments)  # type: ignore[arg-type]


def measure(ranks: Sequence[int], folder: Path) -> dict[str, dict[int, Spent]]:
    """Return what comparing takes, by what is compared and the number of ranks."""
    one = [recorded(kernel, folder / f"{kernel}.jsonl") for kernel in ("eager", "sdpa")]
    ways: dict[str, list[str]] = {"`diff A/ B/`": []}
    if importlib.util.find_spec("ray"):
        ways["`diff A/ B/ --on ray`"] = ["--on", "ray"]
    spent: dict[str, dict[int, Spent]] = {}
    for count in ranks:
        sides = [copies(path, folder / str(count) / path.stem, count) for path in one]
        for words, options in ways.items():
            spent.setdefault(words, {})[count] = _tried(*sides, *options)
        spent.setdefault("`diff one.jsonl B/`", {})[count] = measured_diff(
            *parts(folder / str(count) / "parts", count)
        )
    return spent


# -- computing


def computed(measured: dict[int, Spent], ranks: int) -> Spent:
    """Return what so many ranks take, by the line through the two largest numbers of ranks.

    >>> computed({4: Spent(9, 9, 9), 8: Spent(2, 3, 100), 16: Spent(3, 5, 100)}, 32)
    Spent(wall=5.0, cpu=9.0, memory=100.0)
    """
    few, many = sorted(measured)[-2:]
    turns = (ranks - many) / (many - few)
    pairs = zip(measured[few], measured[many], strict=True)
    return Spent(*(last + turns * (last - before) for before, last in pairs))


def growth(measured: dict[int, Spent]) -> float:
    """Return the processor's time a rank, of the most ranks over that of the next fewer ones.

    >>> growth({8: Spent(0, 9, 0), 16: Spent(0, 5, 0), 32: Spent(0, 10, 0)})
    1.0
    """
    before, most = sorted(measured)[-2:]
    return (measured[most].cpu / most) / (measured[before].cpu / before)


def comparing_table(spent: dict[str, dict[int, Spent]]) -> str:
    """Return what was measured and what follows from the numbers as they are shown, as Markdown."""
    lines = [_HEADER]
    for words, exact in spent.items():
        measured = {
            count: Spent(round(wall, 1), round(cpu, 1), round(memory))
            for count, (wall, cpu, memory) in exact.items()
        }
        rows = [(count, "measured", numbers) for count, numbers in measured.items()]
        rows.append((COMPUTED_RANKS, "computed", computed(measured, COMPUTED_RANKS)))
        lines += [
            f"| {words} | {count:,} | {how} | {wall:.1f} | {cpu:.1f} | {memory:,.0f} |"
            for count, how, (wall, cpu, memory) in rows
        ]
    return "\n".join(lines)


def figures_of(spent: dict[str, dict[int, Spent]]) -> list[Figure]:
    """Return the lines for the table of all benchmarks."""
    found = []
    for words, measured in spent.items():
        before, most = sorted(measured)[-2:]
        detail = "; ".join(
            f"{count} ranks {numbers.cpu:.1f} s" for count, numbers in measured.items()
        )
        name = f"{words}, processor's time a rank, {most} ranks over {before}"
        found.append(Figure(name, growth(measured), 1.2, detail))
    return found


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)), help="comma list")
    parser.add_argument("--page", type=Path, help="page to write the table into")
    parser.add_argument(
        "--json",
        help="write {'figures': […]} to this file, or print it (-), instead of lines for people",
    )
    parser.add_argument("--rounds", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--smallest", action="store_true", help="only show that it runs")
    options = parser.parse_args(argv)
    ranks = [2, 3, 4] if options.smallest else [int(count) for count in options.ranks.split(",")]
    if options.record:
        record_parts(options.record, ranks[0])
        return 0
    with tempfile.TemporaryDirectory() as folder:
        spent = measure(ranks, Path(folder))
    table = comparing_table(spent)
    if options.page:
        options.page.write_text(
            rewritten(options.page.read_text(), comparing=table, comparing_machine=machine())
        )
    print(table, file=sys.stderr)
    tell(figures_of(spent), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
