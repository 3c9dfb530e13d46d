"""The module calls that each thread is in."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from otel_torch import torch_private

if TYPE_CHECKING:
    from otel_torch.sources.models.model import Model, ModuleSite
    from otel_torch.sources.steps.forwards import ForwardContext
    from otel_torch.sources.tensors.identity import Identity
    from otel_torch.sources.tensors.tensor_reader import RecordedCall


class ThreadState(threading.local):
    """The calls that a thread is in, and whether it ignores modules that are unknown.

    entered: of these calls the recorded ones, if inputs are recorded.
    """

    def __init__(self) -> None:
        self.ignores_new_models = False
        self.stack: list[ModuleSite] = []
        self.entered: list[EnteredCall] = []


# by the clock of calls: when a call was entered and left, and when its parent was entered
CallTimes = list[int | None]


class EnteredCall(NamedTuple):
    """A call whose inputs were recorded. `observer.c` makes the same: native_layout.py.

    depth: length of the thread's call stack. call: what Python recorded, or else its number.
    context: the forward of a call that has only a number. times: None outside of parity recordings.
    inputs: identities of its tensors, of a call with a number.
    """

    site: ModuleSite
    depth: int
    call: RecordedCall | int
    context: ForwardContext | None
    times: CallTimes | None
    inputs: tuple[Identity, ...]


thread_state = ThreadState()


def current() -> list[ModuleSite]:
    """Return the module calls that this thread is in, outermost first. Not a copy."""
    return thread_state.stack


def is_in_call(module: nn.Module) -> bool:
    """Return whether the innermost call that this thread is in is that of a module.

    It has come to forward then, or forward to that of a base class.
    """
    innermost = thread_state.stack[-1:]  # a replay refuses to be asked for the stack's length
    return bool(innermost) and innermost[0].key == id(module)


torch_private.keep_out_of_frames(is_in_call)


@torch_private.keep_out_of_frames
def is_running(model: Model) -> bool:
    for enclosing in thread_state.stack:  # noqa: SIM110 - a generator takes longer than the search
        if enclosing.model is model:
            return True
    return False


# of the functions that take the place of `nn.Module.__call__`
call_codes: set[CodeType] = set()


def running_calls() -> Iterator[tuple[ModuleSite, tuple[Any, ...], dict[str, Any]]]:
    """Yield the site, args and kwargs of each module call that this thread is in, innermost first.

    They are read from the frames of the calls, so that keeping them costs a call nothing.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in call_codes:
            variables = frame.f_locals
            site: ModuleSite | None = variables.get("site")
            if site is not None and site.names:
                yield site, variables["args"], variables["kwargs"]
        frame = frame.f_back


@contextmanager
def unwatched() -> Iterator[None]:
    """Ignore models that this thread calls for the first time in the block, such as `scan`'s."""
    before, thread_state.ignores_new_models = thread_state.ignores_new_models, True
    try:
        yield
    finally:
        thread_state.ignores_new_models = before


class CallRefused(Exception):
    """A module of a model was called in a block of `refused_calls`."""


class _ClosedStack(list["ModuleSite"]):
    """A call stack that nothing can be put on: every call of a known module asks for its length."""

    def __len__(self) -> int:
        raise CallRefused


@contextmanager
def refused_calls() -> Iterator[None]:
    """Raise `CallRefused` in calls of the modules of models, and ignore other modules.

    A replay may call what it has copied, but nothing that the program has.
    """
    before, thread_state.stack = thread_state.stack, _ClosedStack()
    try:
        with unwatched():
            yield
    finally:
        thread_state.stack = before
