"""Runs a forward that gave NaN or Inf again at once, and says which of its operations made it.

The hook behind the call still has its inputs. A copy of the module (`replica.py`) runs on copies of
them, without gradients and hooks, until an operation gives what the call gave. Random states are
restored. What could have an effect on the program anyway is refused before it happens.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from otel_torch import torch_private
from otel_torch.sources.modules.call_stack import CallRefused, refused_calls, running_calls
from otel_torch.sources.nonfinite.evidence import EnclosingCall, examine
from otel_torch.sources.nonfinite.global_state import preserved_global_state
from otel_torch.sources.nonfinite.replica import NotReplayable, copy_of_arguments, replica_of
from otel_torch.sources.nonfinite.report import Origin, number
from otel_torch.sources.tensors.operations import UNRECORDED_OPERATIONS
from otel_torch.sources.tensors.values import walk
from otel_torch.statistics.measure import measure
from otel_torch.statistics.row_layout import MAX, MIN, RANGE, nonfinite_kind

_LIBRARIES = tuple(
    str(folder) + os.sep for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])
)


Row = Sequence[float]


class Replay(NamedTuple):
    """What a replay has shown, in words. `is_found`: whether these are the operations."""

    text: str
    is_found: bool


class Replays:
    """The replays of one session, by the call that gave a NaN or Inf first."""

    def __init__(self) -> None:
        self._replays: dict[Hashable, Replay] = {}
        self._modules: list[EnclosingCall] = []

    def clear(self) -> None:
        """Forget the calls of a step that is over."""
        self._replays.clear()
        self._modules.clear()

    @torch_private.unseen_by_function_modes
    def add(
        self, key: Hashable, calls: Sequence[EnclosingCall], tensors: Iterable[tuple[str, Tensor]]
    ) -> None:
        """Replay the innermost running call whose inputs are finite.

        Args:
            calls: the running calls, innermost first.
            tensors: of the innermost one, by label; one has a NaN or Inf.
        """
        level = next((i for i, call in enumerate(calls) if call.bad_input is None), None)
        if level is None or any(_contains(calls[level], other) for other in self._modules):
            return  # what an inner module gave goes through the modules around it
        call, inner = calls[level], calls[level - 1].bad_input if level else None
        kinds = [examine(*tensor).kind for tensor in tensors] if inner is None else [inner.kind]
        kind = next((kind for kind in ("NaN", "Inf") if kind in kinds), None)
        if kind is None:
            return
        self._modules.append(call)
        site, args, kwargs = next(islice(running_calls(), level, None))
        module = site.module()
        if not call.is_known:
            self._replays[key] = Replay("not replayed: it changes its input in place", False)
        elif module is not None:
            self._replays[key] = replay(module, args, kwargs, kind)

    def explain(self, origin: Origin, key: Hashable) -> Origin:
        """Return an origin with what the replay of its call has shown."""
        found = self._replays.get(key)
        if found is None:
            return origin
        if found.is_found:
            return replace(origin, operation=found.text)
        return replace(origin, details=(*origin.details, found.text))


def _contains(outer: EnclosingCall, inner: EnclosingCall) -> bool:
    prefix = f"{outer.module}." if outer.module else ""
    return outer.model == inner.model and inner.module.startswith(prefix)


class _Reached(Exception):
    """Ends a replay at the operation that was looked for."""


def replay(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], kind: str) -> Replay:
    """Run the forward of a module again; the inputs are as they were before its call.

    Args:
        kind: what the call gave, `NaN` or `Inf`.

    Never raises, and changes nothing of the program.
    """
    try:
        return _replay(module, args, kwargs, kind)
    except NotReplayable as reason:
        return Replay(f"not replayed: {reason}", False)
    except CallRefused:
        return Replay("not replayed: it calls modules that it does not contain", False)
    except Exception as error:
        return Replay(f"not replayed: {type(error).__name__}: {error}", False)


def _replay(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], kind: str) -> Replay:
    if torch_private.has_other_ranks():
        raise NotReplayable("other ranks would have to run it, too")
    if torch_private.has_dispatch_modes() or torch_private.is_traced():
        raise NotReplayable("the program observes each operation")
    if torch_private.has_global_hooks():
        raise NotReplayable("the program has hooks on all modules")
    copies: dict[int, Tensor] = {}
    own_args = copy_of_arguments(tuple(args), copies)
    own_kwargs = copy_of_arguments(dict(kwargs), copies)
    replica = replica_of(module)
    watch = _ReplayMode(kind, [*copies.values(), *replica.buffers()])
    cache = torch.is_autocast_cache_enabled()
    with preserved_global_state(), refused_calls(), torch.no_grad():
        # a weight that is cast without gradients must not be used by the program
        torch.set_autocast_cache_enabled(False)
        try:
            with watch:
                replica.forward(*own_args, **own_kwargs)
        except _Reached:
            return Replay(", ".join(watch.events), True)
        finally:
            torch.set_autocast_cache_enabled(cache)
    return Replay(
        f"replayed: its {watch.count} operations gave no {kind} this time"
        + ", with other random numbers" * watch.is_random,
        False,
    )


class _ReplayMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # as torch has it
    """Looks at each operation of a replay, and ends it at the first whose result is `kind`.

    Attributes:
        events: the operations that made a NaN or Inf of values that were not, in words.
        count: of operations that have run.
    """

    def __init__(self, kind: str, own: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[str] = []
        self.count = 0
        self.is_random = False
        self._kind = kind
        self._own = set(map(_memory, own))  # what the replay may write to

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep compiled parts compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = [tensor for _, tensor in walk((*args, *kwargs.values()), "in")]
        self._refuse_effects(func, args, kwargs)
        rows = [row for row in map(_row_of, operands) if row is not None]
        result = func(*args, **kwargs)
        self.count += 1
        self.is_random |= torch.Tag.nondeterministic_seeded in func.tags
        self._own |= {_memory(tensor) for _, tensor in walk(result, "out")} - set(
            map(_memory, operands)
        )
        self._look(func, result, rows)
        return result

    def _refuse_effects(self, func: Any, args: Any, kwargs: Any) -> None:
        if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
            raise NotReplayable("it draws from a random generator of its own")
        for tensor in _written(func, args, kwargs):
            if _memory(tensor) not in self._own:
                raise NotReplayable(f"its {_name(func)} changes a tensor in place")

    def _look(self, func: Any, result: Any, operands: Sequence[Row]) -> None:
        """Note an operation that gave NaN or Inf; `operands` are their rows before it."""
        if _name(func) in UNRECORDED_OPERATIONS:
            return
        kinds = {nonfinite_kind(row) for row in operands}
        for _, tensor in walk(result, "out"):
            row = _row_of(tensor)
            kind = None if row is None else nonfinite_kind(row)
            if kind in ("NaN", "Inf") and kind not in kinds:
                of = f" of {' and '.join(map(_span, operands))}" if operands else ""
                self.events.append(f"{_name(func)} made {kind}{of}{_place()}")
            if kind == self._kind:
                raise _Reached


def _name(func: Any) -> str:
    """Return an operation without its overload: `aten.sqrt`."""
    return str(func).rpartition(".")[0] or str(func)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the tensors that an operation changes."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (tensor for _, tensor in walk(value, ""))


@torch_private.unobserved
def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@torch_private.unobserved
def _row_of(tensor: Tensor) -> Row | None:
    if not (tensor.is_cpu and tensor.is_floating_point() and tensor.numel()):
        return None
    row = measure(tensor, RANGE).row
    return None if row is None or isinstance(row, Tensor) else row


def _span(row: Row) -> str:
    """Return the least and the largest value of a tensor."""
    low, high = number(row[MIN]), number(row[MAX])
    return low if low == high else f"{low} to {high}"


def _place() -> str:
    """Return the line of the program that has called the operation, if one has."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _replay.__code__:
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            return f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
