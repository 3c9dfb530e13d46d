"""Sees what a program computes past torch's dispatcher: Triton's kernels and replayed CUDA graphs.

Nothing else shows these writes on a device: torch does not count them, and reading the numbers back
would make the program wait.

Only Triton's compiler knows which tensors a kernel writes to, so each one counts as read and
written. A tensor that the kernel has left alone still equals what it was. A CUDA graph says
nothing of what it computes: all that the recorder knows is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from otel_torch import torch_private
from otel_torch.process.console import say_once
from otel_torch.process.import_hooks import after_import
from otel_torch.sources.operations.dispatch_mode import GraphMode
from otel_torch.sources.operations.operation_kinds import OperationKind
from otel_torch.sources.replacements import Replacements

_TRITON = "triton.runtime.jit"


def follow_kernels(replacements: Replacements) -> None:
    """Show the kernels that are launched to the mode that is active then."""

    def follow_triton(module: Any) -> None:
        launcher = getattr(module, "KernelInterface", None)
        if hasattr(launcher, "__getitem__"):
            replacements.replace(launcher, "__getitem__", _recorded_launches)

    replacements.on_restore(after_import(_TRITON, follow_triton))
    if hasattr(torch.cuda.CUDAGraph, "replay"):
        replacements.replace(torch.cuda.CUDAGraph, "replay", _seen_replay)


def _recorded_launches(get_launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `kernel[grid]`, by which programs launch kernels; while it tunes one Triton does not."""

    def get_recorded(kernel: Any, grid: Any) -> Any:
        launch = get_launcher(kernel, grid)
        mode = torch_private.lowest_dispatch_mode()
        if not isinstance(mode, GraphMode) or not mode.is_on:
            return launch  # so are those of an operation that is recorded as a whole

        def recorded(*args: Any, **kwargs: Any) -> Any:
            return mode.launch(_kind_of(kernel, args, kwargs), launch, args, kwargs)

        return recorded

    return get_recorded


def _kind_of(kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OperationKind:
    while not hasattr(kernel, "__name__") and hasattr(kernel, "fn"):
        kernel = kernel.fn  # of one that is tuned
    written: dict[int, int | str] = {}
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in places:
        if isinstance(value, torch.Tensor):
            written.setdefault(id(value), place)
    return OperationKind(
        name=f"triton.{getattr(kernel, '__name__', type(kernel).__name__)}",
        written=tuple(place for place in written.values() if isinstance(place, int)),
        written_names=tuple(place for place in written.values() if isinstance(place, str)),
    )


def _seen_replay(replay: Callable[..., Any]) -> Callable[..., Any]:
    def replay_unseen(graph: Any) -> Any:
        result = replay(graph)
        mode = torch_private.lowest_dispatch_mode()
        if isinstance(mode, GraphMode) and mode.is_on:
            say_once(
                "the graph of operations does not show what a CUDA graph computes when it is "
                "replayed: no operation has made what is read after it"
            )
            mode.forget()
        return result

    return replay_unseen
