"""The sides that record: re-created hooks of other tools, and this package by its public API.

A side attaches to a model when it is entered and is removed when it exits, so that all sides take
turns on one model.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import otel_torch
from tests.benchmarks.pairing import BARE, CONTROL, Side, plainly

SIX = ("abs_mean", "sum", "min", "max", "mean", "std")


class Sides:
    """Sides that run the same body on the same model, with their numbers of records per call."""

    def __init__(self, model: nn.Module, body: Callable[[], object], folder: Path) -> None:
        self.model, self.body, self.folder = model, body, folder
        self.records: dict[str, float] = {}
        self._made = 0

    def bare(self) -> dict[str, Side]:
        """Add the bare program twice: as the baseline, and as the control."""
        return {BARE: plainly(self.body), CONTROL: plainly(self.body)}

    def empty_hooks(self) -> Side:
        """Add empty hooks, the lower bound of any recorder with hooks."""
        return self._entered(lambda: _handles(self.model, lambda module, arguments, output: None))

    def cloning(self) -> Side:
        """Add copies of every output, kept until the body is done, as tensor_tracker does."""
        return self._entered(self._clones)

    def fastvideo(self, name: str, statistics: tuple[str, ...]) -> Side:
        """Add FastVideo's activation trace, on all modules but the root."""
        return self._writing(name, lambda path: _fastvideo_trace(self.model, statistics, path))

    def ours(self, name: str, **settings: str) -> Side:
        """Add this package with the given settings and no exporter."""
        return self._writing(name, lambda path: session(path, settings))

    def _entered(self, attached: Callable[[], AbstractContextManager[object]]) -> Side:
        @contextmanager
        def side() -> Iterator[Callable[[], object]]:
            with attached():
                yield self.body

        return side

    def _writing(
        self, name: str, attached: Callable[[Path], AbstractContextManager[object]]
    ) -> Side:
        """Count the records of the first call; the file is not needed afterwards."""

        @contextmanager
        def side() -> Iterator[Callable[[], object]]:
            self._made += 1
            path = self.folder / f"{self._made}.jsonl"
            calls = 0

            def counted() -> None:
                nonlocal calls
                calls += 1
                self.body()

            with attached(path):
                yield counted
            if name not in self.records:
                # what is read once, before the first call, is no cost of a call
                phases = [json.loads(line).get("phase") for line in path.read_text().splitlines()]
                self.records[name] = sum(phase != "attach" for phase in phases) / calls
            for written in self.folder.glob(f"{self._made}.*"):
                written.unlink()

        return side

    @contextmanager
    def _clones(self) -> Iterator[None]:
        stashes: list[Any] = []

        def stash(module: nn.Module, arguments: Any, output: Any) -> None:
            if (
                module is self.model
            ):  # the last one: what the next call keeps takes the place of this one's
                stashes.clear()
            else:
                stashes.extend(
                    tensor.detach().cpu().clone() for _, tensor in _tensors(output, "out")
                )

        with _handles(self.model, stash):
            yield


@contextmanager
def _handles(model: nn.Module, hook: Callable[[nn.Module, Any, Any], None]) -> Iterator[None]:
    handles = [module.register_forward_hook(hook) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def session(path: Path, settings: Mapping[str, str]) -> Iterator[None]:
    if not otel_torch.start(jsonl=str(path), **settings):
        raise RuntimeError(f"no session with {settings}")
    try:
        yield
    finally:
        otel_torch.stop()


# -- FastVideo's trace
# Its costs, one by one: `forward` replaced by a partial that walks the module's hooks, each
# statistic by its own reduction of its own fp32 copy and its own read, and a locked, line-buffered
# write of json.dumps.

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "abs_mean": lambda values: values.abs().mean(),
    "sum": Tensor.sum,
    "min": Tensor.min,
    "max": Tensor.max,
    "mean": Tensor.mean,
    "std": Tensor.std,
}


def _read(reduction: Callable[[Tensor], Tensor], tensor: Tensor) -> float:
    return float(reduction(tensor.detach().float()).item())


def _tensors(value: Any, label: str) -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(label, value)]
    if isinstance(value, dict):
        return [found for key, item in value.items() for found in _tensors(item, f"{label}.{key}")]
    if isinstance(value, tuple | list):
        return [
            found for at, item in enumerate(value) for found in _tensors(item, f"{label}[{at}]")
        ]
    return []


class _TraceHook:
    def __init__(
        self,
        module: str,
        reductions: list[tuple[str, Callable[[Tensor], Tensor]]],
        write: Callable[[Any], None],
    ):
        self.module, self.reductions, self.write = module, reductions, write

    def before(
        self, module: nn.Module, *arguments: Any, **named: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return arguments, named

    def after(self, module: nn.Module, output: Any) -> Any:
        for label, tensor in _tensors(output, "out"):
            record: dict[str, Any] = {"module": self.module, "tensor": label, "step": None}
            for name, reduction in self.reductions:
                try:
                    record[name] = _read(reduction, tensor)
                except Exception as error:
                    record[name] = f"<error: {error!r}>"
            self.write(record)
        return output


def _hooked_forward(
    module: nn.Module, hooks: dict[str, _TraceHook], forward: Any, *arguments: Any, **named: Any
) -> Any:
    for hook in hooks.values():
        arguments, named = hook.before(module, *arguments, **named)
    output = forward(*arguments, **named)
    for hook in reversed(hooks.values()):
        output = hook.after(module, output)
    return output


@contextmanager
def _fastvideo_trace(model: nn.Module, statistics: tuple[str, ...], path: Path) -> Iterator[None]:
    reductions = [(name, _REDUCTIONS[name]) for name in statistics]
    pattern, lock = re.compile(".*"), threading.Lock()
    with open(path, "a", buffering=1) as file:

        def write(record: dict[str, Any]) -> None:
            line = json.dumps(record, default=str) + "\n"
            with lock:
                file.write(line)

        hooked = [
            (name, module)
            for name, module in model.named_modules()
            if name and pattern.search(name)
        ]
        for name, module in hooked:
            hooks = {"statistics": _TraceHook(name, reductions, write)}
            module.forward = functools.partial(_hooked_forward, module, hooks, module.forward)
        try:
            yield
        finally:
            for _, module in hooked:
                del module.forward


def one_thread() -> None:
    """Use one thread: with more, times on a shared machine are bimodal."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
