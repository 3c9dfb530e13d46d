"""Support for vLLM: one engine step is one step, whatever runs in it, and its tokens are known.

The model's forward, its logits and the sampler are separate calls, which would count for
themselves. Dummy runs, which measure memory and compile, have the phase `warmup`. The packed batch
of a step is described by the runner: which tokens of which requests it holds.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from otel_torch.frameworks.patches import Patches
from otel_torch.sources.steps import forwards
from otel_torch.sources.steps import step_clocks as steps
from otel_torch.sources.steps.warm_ups import is_warming_up, warming_up
from otel_torch.sources.tensors.tokens import Tokens, token_sources

_patches = Patches()


class _Engine(threading.local):
    """The engine of this thread.

    steps: those begun so far. hint: what the next forward is part of. runner: whose step it is.
    ids: of all tokens of the step, on their device. requests: the number of each live request.
    """

    def __init__(self) -> None:
        self.steps = self.next_request = 0
        self.hint: forwards.Hint | None = None
        self.runner: Any = None
        self.ids: Tensor | None = None
        self.requests: dict[str, int] = {}

    def number(self, live: Any, names: list[str]) -> list[int]:
        """Return the numbers of the named requests, in order of first use; forget what ended."""
        self.requests = {name: i for name, i in self.requests.items() if name in live}
        for name in names:
            if name not in self.requests:
                self.requests[name] = self.next_request
                self.next_request += 1
        return [self.requests[name] for name in names]


_engine = _Engine()


def _hint() -> forwards.Hint | None:
    return _engine.hint


@contextmanager
def _executing(runner: Any) -> Iterator[None]:
    """Begin an engine step. It goes on after the block if the tokens are sampled later."""
    if is_warming_up():
        yield
        return
    _engine.hint = forwards.Hint(_engine.steps, bounded=False)
    _engine.runner = runner
    _engine.steps += 1
    try:
        yield
    finally:
        if getattr(runner, "execute_model_state", None) is None:
            _end_step()


@contextmanager
def _sampling(runner: Any) -> Iterator[None]:
    try:
        yield
    finally:
        if not is_warming_up():
            _end_step()


def _end_step() -> None:
    _engine.hint = _engine.runner = _engine.ids = None
    tracker = steps.current_step_tracker()
    if tracker is not None:
        tracker.end_pending_forward()
        tracker.end_framework_step()


def _warming_up(runner: Any) -> AbstractContextManager[None]:
    return warming_up()


def _packed_batch(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tokens | None:
    """Return the tokens of the model's forward; of the logits and the sampler, each request's last.

    Positions and requests are those of the scheduler, and not what the model is called with. None
    if the runner does not describe its batch, as versions do that this one does not know.
    """
    if is_warming_up() or _engine.runner is None:
        return None
    runner = _engine.runner
    batch = getattr(runner, "input_batch", None)
    starts = getattr(getattr(runner, "query_start_loc", None), "np", None)
    if batch is None or starts is None:
        return None
    names = batch.req_ids
    ends = [int(end) for end in starts[: len(names) + 1]]
    counts = [end - start for start, end in pairwise(ends)]
    computed = [int(count) for count in batch.num_computed_tokens_cpu[: len(names)]]
    numbers = _engine.number(runner.requests, names)
    model = runner.get_model()
    if module is model:
        _engine.ids = kwargs.get("input_ids")
        requests = [number for number, n in zip(numbers, counts, strict=True) for _ in range(n)]
        positions = [first + i for first, n in zip(computed, counts, strict=True) for i in range(n)]
        padding = [-1] * (_rows((), kwargs) - len(positions))
        return Tokens(_engine.ids, positions + padding, requests + padding)
    samplers = getattr(model, "logits_processor", None), getattr(runner, "sampler", None)
    if not any(module is sampler for sampler in samplers) or _rows(args, kwargs) != len(names):
        return None
    ids = None if _engine.ids is None else _engine.ids[[end - 1 for end in ends[1:]]]
    return Tokens(ids, [c + n - 1 for c, n in zip(computed, counts, strict=True)], numbers)


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the length of the first tensor that a module is called with."""
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    return next((len(tensor) for tensor in tensors if tensor.dim()), 0)


_METHODS = {
    "execute_model": _executing,
    "sample_tokens": _sampling,
    "profile_run": _warming_up,
    "capture_model": _warming_up,
    "_dummy_run": _warming_up,
    "_dummy_sampler_run": _warming_up,
    "_dummy_pooler_run": _warming_up,
}


def _watch_runner(module: ModuleType) -> None:
    _patches.add(forwards.hint_providers, _hint)
    _patches.add(token_sources, _packed_batch, first=True)
    for name, surround in _METHODS.items():
        if name in vars(module.GPUModelRunner):
            _patches.around(module.GPUModelRunner, name, surround)


uninstall = _patches.restore

HOOKS = {
    "vllm.v1.worker.gpu_model_runner": _watch_runner,
    "vllm.v1.worker.gpu.model_runner": _watch_runner,
}
