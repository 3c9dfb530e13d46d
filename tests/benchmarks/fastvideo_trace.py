"""The cost of a record in the real FastVideo with a tiny model: in its own trace and in ours.

Tensors are tiny, so that arithmetic does not matter. Three generators (bare, with FastVideo's trace,
with ours) run in their own processes and take turns. The CPU time of their workers is compared.
Needs FastVideo, which `make test-fastvideo` installs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.figures import ROOT, Figure, Size, command, environment, module_command
from tests.benchmarks.pairing import BARE, CONTROL, Rounds

FASTVIDEO, OURS = "FastVideo's trace, 2 statistics", "ours, by default"
# every hook runs, and no tensor is looked at: what is left of a record's cost when its numbers,
# name and line cost nothing
FLOOR = "ours, no step recorded"
NAME = "real FastVideo, all layers: cost of a record over its own trace's"
_SHIMS = ROOT / "tests" / "fastvideo"

# FastVideo attaches to the transformer alone, so ours is told to as well
_OURS = {
    "OTEL_TORCH_ENABLED": "1",
    "OTEL_TORCH_MODELS": "^WanTransformer3DModel$",
    "OTEL_TORCH_JSONL": "trace.jsonl",
}
SIDES = {
    BARE: {},
    FASTVIDEO: {"FASTVIDEO_TRACE_ACTIVATIONS": "1", "FASTVIDEO_TRACE_OUTPUT": "trace.jsonl"},
    OURS: _OURS,
    FLOOR: _OURS | {"OTEL_TORCH_STEPS": "1000000"},
}


# -- in a process of its own


def serve(steps: int) -> None:
    """Generate a video for each input line; print the worker's CPU seconds and the wall seconds."""
    import multiprocessing

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # FastVideo prints
    from fastvideo import VideoGenerator

    generator = VideoGenerator.from_pretrained(
        "model", num_gpus=1, use_fsdp_inference=False, dit_cpu_offload=False, vae_cpu_offload=False,
        text_encoder_cpu_offload=False, pin_cpu_memory=False,
    )  # fmt: skip
    clocks = [
        _clock_of(process.pid) for process in multiprocessing.active_children() if process.pid
    ]
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        start = sum(map(time.clock_gettime, clocks)), time.perf_counter()
        generator.generate_video(
            "a lion on the savanna", output_path="videos", save_video=False, height=64, width=64, num_frames=5,
            num_inference_steps=steps, guidance_scale=3.0, seed=1024,
        )  # fmt: skip
        end = sum(map(time.clock_gettime, clocks)), time.perf_counter()
        print(json.dumps([end[0] - start[0], end[1] - start[1]]), file=answers, flush=True)
    generator.shutdown()


def _clock_of(pid: int) -> int:
    # what clock_getcpuclockid(3) answers for a process on Linux: all its threads' processor time
    return ~pid << 3 | 2


# -- beside it


class Generator:
    """A process that runs `serve`."""

    def __init__(self, folder: Path, model: Path, steps: int, variables: dict[str, str]) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "model").symlink_to(model)
        shims = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        environ = environment(**shims, **variables)
        environ["PYTHONPATH"] = os.pathsep.join([str(_SHIMS / "cpu"), environ["PYTHONPATH"]])
        pipe = subprocess.PIPE
        words = module_command("fastvideo_trace", "--serve", str(steps))
        with open(folder / "log.txt", "w") as log:
            self.process = subprocess.Popen(
                words, cwd=folder, env=environ, stdin=pipe, stdout=pipe, stderr=log, text=True
            )

    def answer(self) -> str:
        """Return the next line of output. Raises RuntimeError if the process has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            last = (self.folder / "log.txt").read_text().strip().splitlines()[-1:]
            raise RuntimeError(f"FastVideo ended with {self.process.wait()}: {last}")
        return line

    def generate(self) -> tuple[float, float]:
        """Generate one video; return CPU seconds and wall seconds."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        cpu, wall = json.loads(self.answer())
        return cpu, wall

    def records(self) -> int:
        """Return the number of records written."""
        path = self.folder / "trace.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def close(self) -> None:
        """End the process in the normal way."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def generators(steps: int) -> Iterator[dict[str, Generator]]:
    """Start a process for each side, one after the other, and generate a first video with each."""
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        making = "from pathlib import Path; import tiny_wan; tiny_wan.make_model(Path('model'))"
        environ = environment() | {"PYTHONPATH": str(_SHIMS)}
        subprocess.run(
            [sys.executable, "-c", making], cwd=folder, env=environ, check=True, capture_output=True
        )
        made = {}
        for index, (name, variables) in enumerate(SIDES.items()):
            made[name] = Generator(folder / str(index), folder / "model", steps, variables)
            stack.callback(made[name].close)
        for generator in made.values():
            generator.answer()
            generator.generate()
        yield made


def measure(size: Size) -> list[Figure]:
    """Measure the cost of our record as a share of that in FastVideo's trace."""
    if importlib.util.find_spec("fastvideo") is None:
        return [
            Figure(NAME, None, 1 / 4, "FastVideo is not installed here; `make test-fastvideo` does")
        ]
    order = random.Random(0)
    names = [*SIDES, CONTROL]
    cpu: dict[str, list[float]] = {name: [] for name in names}
    wall: dict[str, list[float]] = {name: [] for name in names}
    rounds = size.count(11)
    with generators(size.of(30, 2)) as made:
        before = {name: generator.records() for name, generator in made.items()}
        for _ in range(rounds):
            for name in order.sample(names, len(names)):
                spent = made[BARE if name == CONTROL else name].generate()
                cpu[name].append(spent[0])
                wall[name].append(spent[1])
        records: dict[str, Any] = {
            name: (made[name].records() - before[name]) / rounds for name in (FASTVIDEO, OURS)
        }
    records[FLOOR] = records[OURS]  # as many calls
    found, by_wall = Rounds(cpu), Rounds(wall)
    share = found.cost_share(OURS, FASTVIDEO, records)
    sides = "; ".join(
        f"{name}: {1e6 * found.surplus(name) / count:.1f} µs a record, {found.overhead(name)} of a video"
        for name, count in records.items()
    )
    control = f"bare beside bare {found.overhead(CONTROL)}"
    detail = (
        f"{share}; {sides}; {control}; on the wall {by_wall.cost_share(OURS, FASTVIDEO, records)}"
    )
    return [Figure.estimated(NAME, share, 1 / 4, detail)]


def main(argv: Sequence[str]) -> int:
    """Measure and print the figures."""
    if argv[:1] == ["--serve"]:
        serve(int(argv[1]))
        return 0
    return command(__doc__, measure, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
