"""Read, replace and compare values in the middle of a model's forward, in plain Python.

nnsight's tracer takes the source code of a `with` block and runs it elsewhere: such a block cannot
be written on one line, and debuggers do not find it. Here the body runs where it is written, and
the model in another thread; `interleaved_run` shows how they take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from otel_torch.capture.cache import Cache
from otel_torch.capture.cache_dict import CacheDict
from otel_torch.capture.interleaving.bodies import Barrier
from otel_torch.capture.interleaving.interleaved_model import InterleavedModel
from otel_torch.capture.interleaving.interleaved_run import InterleavedRun
from otel_torch.capture.interleaving.invocation import Invocation


class Interleaver:
    """Start runs of a model in turns with bodies; see `interleave`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._shared = InterleavedModel(model)

    @property
    def result(self) -> Any:
        """The return value of the last run's forward."""
        return self._shared.last_result

    def invoke(self, *args: Any, **kwargs: Any) -> Invocation:
        """Call the model with these arguments: `with it.invoke(x) as run:`."""
        return self.execute(self.model, *args, **kwargs)

    def execute(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Invocation:
        """Call a function that calls the model, such as `model.generate` or a training step."""
        return Invocation(InterleavedRun(self._shared, function, args, kwargs), "")

    def compile(self, body: Callable[[Invocation], Any]) -> Callable[..., Any]:
        """Return a function of the model's arguments that runs `body(run)` and returns its result.

        The first call finds out which modules the body asks for; later calls hook only these.
        """
        allowed: frozenset[str] | None = None

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal allowed
            self._shared.start_requests(allowed)
            try:
                with self.invoke(*args, **kwargs) as invocation:
                    result = body(invocation)
                allowed = self._shared.requested_modules()
                return result
            finally:
                self._shared.stop_requests()

        return run

    def cache(self, *args: Any, **kwargs: Any) -> CacheDict:
        """Cache values during all runs from now on, as the bodies leave them. The arguments are
        those of `Cache`.
        """
        cache = Cache(*args, **kwargs)
        self._shared.add_cache(cache)
        return cache.cache

    def barrier(self, count: int) -> Barrier:
        """Return a barrier for `count` bodies that run by `Invocation.do`: each calls `barrier()`
        and waits for the others.
        """
        return self._shared.bodies.make_barrier(count)


def interleave(model: nn.Module) -> Interleaver:
    """Run a model's forward in turns with a body that reads and replaces values on the way.

        it = interleave(model)
        with it.invoke(tokens) as run:
            hidden = run.transformer.h[0].output[0]      # the model runs up to here and waits
            run.transformer.h[1].mlp.output = 0 * run.transformer.h[1].mlp.output
            logits = run.result.logits                   # ... and to its end

    Exactly one of the two runs at a time. Ask in the order of the forward. `with it.invoke(x) as a,
    it.invoke(y) as b:` interleaves two runs in the order in which the body asks. All hooks are
    removed afterwards, even after an exception.

    Examples:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
        >>> with interleave(model).invoke(torch.ones(1, 2)) as run:
        ...     run[0].output = torch.full((1, 2), -1.0)
        ...     zero = run[1].output
        >>> zero
        tensor([[0., 0.]])
    """
    return Interleaver(model)
