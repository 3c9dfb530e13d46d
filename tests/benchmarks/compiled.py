"""The cost of recording a compiled program: hooks must not undo what compiling gains.

    python -m tests.benchmarks.compiled [--rounds N] [--json FILE] [--smallest]

A small Llama (12 layers: RoPE, SDPA, SwiGLU) runs on one thread, in several processes per side:
processes of one program differ by some percent, because each has its own layout of memory. The
sides take turns, in a new random order each round, and each round is of other processes than the
one before. One side is the bare program again: the distance of its ratio from 1 is the resolution
of the machine. The same is done with almost no arithmetic, where
each microsecond of a record shows.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.figures import Figure, Size, command, environment, module_command
from tests.benchmarks.pairing import BARE, CONTROL, Measured, Rounds

GOAL = 1.05
_BLOCKS = {"modules": r"^layers\.\d+$"}
_UNRECORDED = {"steps": "1000000000"}
_WARM_UP = 5


@dataclass(frozen=True)
class Work:
    """The width of a model, its inputs, and the number of forwards per turn."""

    width: int
    batch: int
    tokens: int
    forwards: int


@dataclass(frozen=True)
class Side:
    """How the program is compiled (`whole`, `regional`, `eager`) and the settings, None to not record."""

    how: str
    settings: Mapping[str, str] | None = None
    beside: str = BARE


# arithmetic as in real use: a forward takes 50 ms and more, and the next one follows it
REAL = Work(256, 4, 64, 4)
REAL_SIDES = {
    BARE: Side("whole"),
    CONTROL: Side("whole"),
    "blocks": Side("whole", _BLOCKS),
    "blocks, inputs too": Side("whole", _BLOCKS | {"capture": "inputs,outputs"}),
    "every module": Side("whole", {}),
    "regional, bare": Side("regional", beside="regional, bare"),
    "regional, blocks": Side("regional", _BLOCKS, "regional, bare"),
}
# the cost of a record and not of its arithmetic
TINY = Work(32, 1, 16, 20)
TINY_SIDES = {
    BARE: Side("whole"),
    CONTROL: Side("whole"),
    "every module": Side("whole", {}),
    "no step recorded": Side("whole", _UNRECORDED),
    "eager, bare": Side("eager", beside="eager, bare"),
    "eager, every module": Side("eager", {}, "eager, bare"),
    "eager, no step recorded": Side("eager", _UNRECORDED, "eager, bare"),
}


# -- the program, which knows nothing of recording


def llama(width: int, layers: int = 12) -> Any:
    """Make a Llama with random weights."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = 4
            self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

        def forward(self, x: Any, rotation: Any) -> Any:
            q, k, v = (
                part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for part in (self.q, self.k, self.v)
            )
            q, k = (
                torch.cat((-h.chunk(2, -1)[1], h.chunk(2, -1)[0]), -1) * rotation[1]
                + h * rotation[0]
                for h in (q, k)
            )
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.o(mixed.transpose(1, 2).flatten(2))

    class FeedForward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
            self.down = nn.Linear(3 * width, width, bias=False)

        def forward(self, x: Any) -> Any:
            return self.down(functional.silu(self.gate(x)) * self.up(x))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
            self.attention, self.feed_forward = Attention(), FeedForward()

        def forward(self, x: Any, rotation: Any) -> Any:
            x = x + self.attention(self.before(x), rotation)
            return x + self.feed_forward(self.between(x))

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(128, width)
            self.layers = nn.ModuleList(Layer() for _ in range(layers))
            self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 128, bias=False)

        def forward(self, ids: Any) -> Any:
            x, half = self.embedding(ids), width // 8
            angles = torch.outer(
                torch.arange(ids.shape[1]), 10000.0 ** (-torch.arange(half) / half)
            ).repeat(1, 2)
            rotation = angles.cos(), angles.sin()
            for layer in self.layers:
                x = layer(x, rotation)
            return self.head(self.norm(x))

    torch.manual_seed(0)
    return Llama().eval()


def serve(how: str, width: int, batch: int, tokens: int, forwards: int, layers: int) -> None:
    """For each input line run one turn; print its seconds (CPU, wall) and the number of graphs."""
    import torch
    from torch._dynamo.utils import counters

    torch.set_num_threads(1)
    model: Any = llama(width, layers)
    ids = torch.arange(batch * tokens).reshape(batch, tokens) % 128
    call = torch.compile(model, fullgraph=True) if how == "whole" else model
    if how == "regional":
        for layer in model.layers:
            layer.compile(fullgraph=True)
    with torch.no_grad():
        for _ in range(_WARM_UP):
            call(ids)
        print("ready", flush=True)
        for _ in sys.stdin:
            began = time.process_time(), time.perf_counter()
            for _ in range(forwards):
                call(ids)
            took = time.process_time() - began[0], time.perf_counter() - began[1]
            print(json.dumps([*took, counters["stats"]["unique_graphs"]]), flush=True)


# -- taking turns


@contextmanager
def _serving(side: Side, work: Work, layers: int, folder: Path) -> Iterator[subprocess.Popen[str]]:
    variables = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    if side.settings is not None:
        variables |= {"OTEL_TORCH_ENABLED": "1", "OTEL_TORCH_JSONL": str(folder / "run.jsonl")}
        variables |= {f"OTEL_TORCH_{name.upper()}": value for name, value in side.settings.items()}
    numbers = (work.width, work.batch, work.tokens, work.forwards, layers)
    with open(folder / "said", "w", encoding="utf-8") as log:
        child = subprocess.Popen(
            module_command("compiled", "--serve", side.how, *map(str, numbers)),
            env=environment(**variables), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
        try:
            yield child
        finally:
            child.stdin.close()  # type: ignore[union-attr]
            child.wait()


def _line(child: subprocess.Popen[str], folder: Path) -> str:
    line = child.stdout.readline()  # type: ignore[union-attr]
    if not line:
        raise RuntimeError(f"a side did not run: {(folder / 'said').read_text()[-500:]}")
    return line


@dataclass(frozen=True)
class Found:
    """Seconds per turn; by side the number of graphs and of records per forward."""

    seconds: Measured
    graphs: Mapping[str, int]
    records: Mapping[str, float]


def take_turns(
    work: Work, sides: Mapping[str, Side], rounds: int, layers: int = 12, processes: int = 1
) -> Found:
    """Run every side once per round, each in its own process, never two at a time.

    Args:
        processes: Per side; they take turns from round to round.
    """
    order = random.Random(0)
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    wall: dict[str, list[float]] = {name: [] for name in sides}
    graphs: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folders = {
            name: [Path(temporary, f"{number}-{process}") for process in range(processes)]
            for number, name in enumerate(sides)
        }
        with ExitStack() as stack:
            children = defaultdict(list)
            for name, side in sides.items():  # one after the other: a compiler needs the machine
                for folder in folders[name]:
                    folder.mkdir()
                    child = stack.enter_context(_serving(side, work, layers, folder))
                    _line(child, folder)
                    children[name].append(child)
            for number in range(rounds):
                for name in order.sample(list(sides), len(sides)):
                    process = number % processes
                    child = children[name][process]
                    child.stdin.write("\n")  # type: ignore[union-attr]
                    child.stdin.flush()  # type: ignore[union-attr]
                    spent, passed, graphs[name] = json.loads(_line(child, folders[name][process]))
                    cpu[name].append(spent / work.forwards)
                    wall[name].append(passed / work.forwards)
        records = {}
        for name, side in sides.items():
            recordings = [folder / "run.jsonl" for folder in folders[name]]
            lines = sum(path.read_text().count("\n") for path in recordings if path.exists())
            records[name] = lines / (rounds * work.forwards + processes * _WARM_UP)
            if side.settings is not None and not lines and "steps" not in side.settings:
                raise RuntimeError(
                    f"{name!r} recorded nothing: {(folders[name][0] / 'said').read_text()[-500:]}"
                )
    return Found(Measured(Rounds(cpu), Rounds(wall)), graphs, records)


def _micros(found: Found, side: str, beside: str, records: float) -> float:
    return 1e6 * found.seconds.cpu.surplus(side, beside) / records


def measure(size: Size) -> list[Figure]:
    """Measure the figures of the table."""
    layers, processes = size.of(12, 1), size.of(3, 2)
    sides = (
        {name: REAL_SIDES[name] for name in (BARE, CONTROL, "blocks")}
        if size.smallest
        else REAL_SIDES
    )
    real = take_turns(TINY if size.smallest else REAL, sides, size.count(30), layers, processes)
    tiny = take_turns(TINY, TINY_SIDES, size.count(40), layers)
    took = 1e3 * min(real.seconds.wall.seconds[BARE])
    figures = []
    for name, side in sides.items():
        if side.settings is None:
            continue
        ratio = real.seconds.cpu.ratio(name, side.beside)
        how = "regional" if side.how == "regional" else "fullgraph"
        figures.append(
            Figure.estimated(
                f"hooks under torch.compile ({how}), {name.removeprefix('regional, ')}",
                ratio,
                GOAL if name != "every module" else None,
                f"processor's time to that without us {ratio:.3f}; by the wall "
                f"{real.seconds.wall.ratio(name, side.beside):.3f}; bare to itself {real.seconds.cpu.ratio(CONTROL):.3f}; "
                f"{processes} processes a side; {took:.0f} ms a forward, {real.records[name]:.0f} records; "
                f"{real.graphs[name]} graphs, without us {real.graphs[side.beside]}",
            )
        )
    records = tiny.records["every module"]
    costs = {
        name: _micros(tiny, name, side.beside, records)
        for name, side in TINY_SIDES.items()
        if side.settings is not None
    }
    figures.append(
        Figure(
            "a record in compiled code, µs of the processor",
            costs["every module"],
            15,
            f"eager {costs['eager, every module']:.1f}; a call where no step is recorded: compiled "
            f"{costs['no step recorded']:.1f}, eager {costs['eager, no step recorded']:.1f}; {records:.0f} records a forward of "
            f"{1e3 * min(tiny.seconds.wall.seconds[BARE]):.2f} ms",
        )
    )
    more = max(real.graphs[name] - real.graphs[side.beside] for name, side in sides.items())
    figures.append(
        Figure(
            "graphs more than without hooks",
            float(more),
            0,
            "blocks and every module, whole and regional",
        )
    )
    return figures


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], *(int(number) for number in sys.argv[3:]))
    else:
        sys.exit(command(__doc__, measure, sys.argv[1:]))
