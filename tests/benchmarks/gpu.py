"""The cost of recording on a GPU: how often a forward waits for the device, and its time.

Each statistic that FastVideo reads by `.item()` stops the host until the device is done: 882 times
in a forward of a 12-layer Llama. torch counts these waits. The programs are as large as in use, in
bf16: eager, with compiled blocks, and with compiled blocks in CUDA graphs. Then Triton's kernel and
torch's reductions are compared with one read of the memory. Takes some minutes. Without a GPU there
are no figures; the smallest size runs on a CPU.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import otel_torch
from otel_torch.process.gc_pause import gc_paused
from otel_torch.statistics import cpu_kernel
from otel_torch.statistics.measure import measure as measure_tensor
from otel_torch.statistics.measure import prepare_devices
from tests.benchmarks.bandwidth import SUMS
from tests.benchmarks.figures import Figure, Size, command
from tests.benchmarks.graph import LATER, take_turns
from tests.benchmarks.pairing import BARE, CONTROL, Rounds, Side, interleave, plainly
from tests.benchmarks.sides import SIX, Sides, session
from tests.benchmarks.six_statistics import FASTVIDEO

DEFAULT, INPUTS, PARITY = "by default", "inputs too", "parity"
SETTINGS: Mapping[str, Mapping[str, str]] = {
    DEFAULT: {},
    INPUTS: {"stats": ",".join(SIX), "capture": "inputs,outputs"},
    PARITY: {"stats": ",".join(SIX), "capture": "parity"},
}
# the modes of torch.compile
COMPILED = {"compiled": "default", "in CUDA graphs": "reduce-overhead"}
KERNELS = {"torch": "torch", "Triton": "auto"}
NO_GPU = "no GPU here"


@dataclass(frozen=True)
class Program:
    """A model, those of its modules that are compiled one by one, and a forward without gradients."""

    model: nn.Module
    blocks: Sequence[nn.Module]
    forward: Callable[[], object]


def device() -> torch.device:
    """Return the GPU; without one, at the smallest size, the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait() -> None:
    """Wait until the device is done."""
    if device().type == "cuda":
        torch.cuda.synchronize()


def llama(size: Size) -> Program:
    """Make a Llama: 1.1 billion parameters, 22 layers, 1 × 1,024 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=size.of(2048, 64), intermediate_size=size.of(5632, 96), num_hidden_layers=size.of(22, 2),
        num_attention_heads=size.of(32, 4), num_key_value_heads=4, vocab_size=size.of(32_000, 128),
    )  # fmt: skip
    with device():
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
        tokens = torch.randint(config.vocab_size, (1, size.of(1024, 16)))

    def forward() -> None:
        with torch.no_grad():
            model(tokens, use_cache=False)

    return Program(model, model.model.layers, forward)


def wan(size: Size) -> Program:
    """Make a Wan transformer of one block: width 1,536, 81 frames of 480 × 832 as 32,760 tokens."""
    from diffusers import WanTransformer3DModel

    with device():
        model = WanTransformer3DModel(
            num_attention_heads=size.of(12, 2), attention_head_dim=size.of(128, 12), ffn_dim=size.of(8960, 64),
            text_dim=size.of(4096, 32), num_layers=1,
        ).to(torch.bfloat16).eval()  # fmt: skip
        latents = torch.randn(1, 16, size.of(21, 2), size.of(60, 4), size.of(104, 4)).bfloat16()
        text = torch.randn(1, size.of(512, 8), model.config.text_dim).bfloat16()
        step = torch.tensor([500])

    def forward() -> None:
        with torch.no_grad():
            model(latents, step, text)

    return Program(model, model.blocks, forward)


PROGRAMS: Mapping[str, Callable[[Size], Program]] = {
    "a Llama of 1.1 B parameters": llama,
    "a Wan block": wan,
}


def synchronisations(side: Side, forward: Callable[[], object]) -> tuple[int, int]:
    """Count a side's waits for the device during one forward, and after it in the same step."""
    with side() as body:
        body()  # attaches, and compiles kernels
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as all_warnings:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                with otel_torch.trace_step(1):
                    forward()
                    within = len(all_warnings)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    waits = ["synchroniz" in str(warning.message) for warning in all_warnings]
    return sum(waits[:within]), sum(waits[within:])


def eager(name: str, make: Callable[[Size], Program], size: Size) -> list[Figure]:
    """Compare recording with FastVideo's hook, and Triton's kernel with torch's reductions."""
    program = make(size)

    def finished() -> None:
        program.forward()
        wait()

    with tempfile.TemporaryDirectory() as folder:
        sides = Sides(program.model, finished, Path(folder))
        recorders = {FASTVIDEO: sides.fastvideo(FASTVIDEO, SIX)}
        for kernel, choice in KERNELS.items():
            for what, settings in SETTINGS.items():
                side = f"{what}, {kernel}"
                recorders[side] = sides.ours(side, **settings, kernel=choice)
        waits = {}
        if device().type == "cuda":
            for side, entered in recorders.items():
                waits[side] = synchronisations(entered, program.forward)
        # the wall's clock: while the host waits for the device it may sleep
        timings = interleave(sides.bare() | recorders, size.count(5), times=3, warm_up=2).wall
    counts = "; ".join(
        f"{side} {within}, behind it {behind}" for side, (within, behind) in waits.items()
    )
    over = "; ".join(f"{side} {timings.overhead(side)}" for side in (CONTROL, *recorders))
    most = max((within for side, (within, _) in waits.items() if side != FASTVIDEO), default=None)
    share = timings.share(f"{INPUTS}, Triton", FASTVIDEO)
    faster = timings.ratio(f"{INPUTS}, Triton", f"{INPUTS}, torch")
    took = f"{1e3 * min(timings.seconds[BARE]):.1f} ms a forward"
    return [
        Figure(f"{name}: device synchronisations in a forward", most, 0, counts or NO_GPU),
        Figure.estimated(
            f"{name}, six statistics, inputs and outputs: overhead over FastVideo's",
            share, 1 / 4, f"{share}; {took}; over bare: {over}",
        ),
        Figure.estimated(f"{name}, inputs too: forward with Triton over with torch", faster, None, f"{faster}"),
    ]  # fmt: skip


def _forward(program: Program) -> None:
    torch.compiler.cudagraph_mark_step_begin()  # the graphs of all blocks belong together
    program.forward()


def _times(
    program: Program, mode: str, settings: Mapping[str, str] | None, size: Size
) -> list[float]:
    """Return the seconds of forwards whose blocks are compiled, recorded with `settings` if any."""
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder, "run.jsonl")
        with nullcontext() if settings is None else session(recording, settings):
            for block in program.blocks:
                block.compile(mode=mode)
            for _ in range(5):  # compiles, and captures graphs
                _forward(program)
            wait()
            seconds = []
            with gc_paused():
                for _ in range(size.count(30)):
                    start = time.perf_counter()
                    _forward(program)
                    wait()
                    seconds.append(time.perf_counter() - start)
        first = next(
            name for name, module in program.model.named_modules() if module is program.blocks[0]
        )
        if settings is not None and f'"module":"{first}.' not in recording.read_text():
            raise RuntimeError(f"nothing was recorded in {first}")
    return seconds


def compiled(name: str, make: Callable[[Size], Program], way: str, size: Size) -> list[Figure]:
    """Compare forwards with compiled blocks, each side with a model of its own, one after the other."""
    sides: Mapping[str, Mapping[str, str] | None] = {BARE: None, **SETTINGS, CONTROL: None}
    rounds = Rounds(
        {
            side: _times(make(size), COMPILED[way], settings, size)
            for side, settings in sides.items()
        }
    )
    over = "; ".join(f"{side} {rounds.overhead(side)}" for side in (CONTROL, INPUTS, PARITY))
    ratio = rounds.ratio(DEFAULT)
    took = f"{1e3 * min(rounds.seconds[BARE]):.1f} ms a forward"
    return [
        Figure.estimated(
            f"{name}, {way}: forward with default recording over without",
            ratio, None, f"{ratio}; {took}; over bare: {over}",
        )
    ]  # fmt: skip


def attempted(name: str, body: Callable[[], list[Figure]]) -> list[Figure]:
    """Return the figures of `body`, or why it failed: the others are worth having."""
    try:
        return body()
    except Exception as error:
        return [Figure(name, None, None, f"did not run: {type(error).__name__}: {error}")]


@contextmanager
def _kernel(choice: str) -> Iterator[None]:
    before = cpu_kernel.current_choice()
    cpu_kernel.choose(choice)
    try:
        yield
    finally:
        cpu_kernel.choose(before)


def one_read(name: str, values: Tensor, size: Size) -> list[Figure]:
    """Compare the two kernels with one `torch.sum` over the same bytes as fp32."""
    raw, repetitions = values.view(torch.float32), size.of(50, 2)

    def repeated(body: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(repetitions):
                body()
            wait()

        return run

    def by(choice: str, columns: tuple[str, ...]) -> Side:
        @contextmanager
        def side() -> Iterator[Callable[[], object]]:
            with _kernel(choice):
                prepare_devices([values], columns)
                yield repeated(lambda: measure_tensor(values, columns))

        return side

    sides = {BARE: plainly(repeated(raw.sum))}
    for kernel, choice in KERNELS.items():
        sides[kernel] = by(choice, SUMS)
        sides[f"{kernel}, with the sketch"] = by(choice, (*SUMS, "sketch"))
    timings = interleave(sides, size.count(7)).wall
    read = min(timings.seconds[BARE]) / repetitions
    ratios = "; ".join(f"{side} {timings.ratio(side).value:.2f}" for side in sides if side != BARE)
    detail = (
        f"one read {1e6 * read:.1f} µs, {values.nbytes / read / 1e9:.0f} GB/s; in reads: {ratios}"
    )
    return [
        Figure.estimated(f"{name}: Triton over one read", timings.ratio("Triton"), None, detail)
    ]


def operations(name: str, make: Callable[[Size], Program], size: Size) -> list[Figure]:
    """Compare forwards whose every operation is recorded with bare ones, in time and memory."""
    program = make(size)

    def finished() -> None:
        program.forward()
        wait()

    timings, rows = take_turns(program.model, finished, size.count(5), False)
    ratio = timings.wall.ratio(LATER)
    took = f"{1e3 * min(timings.wall.seconds[BARE]):.1f} ms a forward; {rows[LATER]:,.0f} rows"
    figures = [
        Figure.estimated(
            f"{name}: forward with a graph of operations over without", ratio, 6, f"{ratio}; {took}"
        )
    ]
    if device().type == "cuda":
        bare = _peak(program, None)
        more = (_peak(program, {"capture": "graph"}) - bare) / 1e6
        figures.append(
            Figure(
                f"{name}, graph of operations: MB of the device more",
                more,
                300,
                f"bare {bare / 1e6:.0f} MB",
            )
        )
    return figures


def _peak(program: Program, settings: Mapping[str, str] | None) -> int:
    """Return the most bytes that tensors have on the device during a forward."""
    with (
        tempfile.TemporaryDirectory() as folder,
        nullcontext() if settings is None else session(Path(folder, "run.jsonl"), settings),
    ):
        torch.cuda.reset_peak_memory_stats()
        program.forward()
        wait()
        return torch.cuda.max_memory_allocated()


def measure(size: Size) -> list[Figure]:
    """Measure all figures."""
    if not (torch.cuda.is_available() or size.smallest):
        return [Figure("device synchronisations in a forward, and overhead", None, None, NO_GPU)]
    torch.manual_seed(0)
    figures = []
    for name, make in PROGRAMS.items():
        figures += attempted(name, partial(eager, name, make, size))
        figures += attempted(name, partial(operations, name, make, size))
        for way in list(COMPILED)[: size.of(2, 1)]:
            figures += attempted(f"{name}, {way}", partial(compiled, name, make, way, size))
    for dtype in (torch.float32, torch.bfloat16):
        for numel in (2**16, 2**20, 2**24)[: size.of(3, 1)]:
            name = f"{numel:,} values, {str(dtype).removeprefix('torch.')}, on a GPU"
            values = torch.randn(numel, device=device()).to(dtype)
            figures += attempted(name, partial(one_read, name, values, size))
    return figures


def main(argv: Sequence[str]) -> int:
    """Measure and print the figures."""
    return command(__doc__, measure, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
