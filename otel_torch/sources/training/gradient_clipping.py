"""Watches how a program clips gradients by their norm, so that nobody computes that norm twice.

`clip_grad_norm_` is imported by name in many programs. All of its copies call one function of its
module with the norm, which is also what programs call that compute the norm themselves.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode

from otel_torch import torch_private
from otel_torch.process.console import say_once
from otel_torch.sources.program_lines import ProgramLine, current_line
from otel_torch.sources.replacements import Replacements
from otel_torch.sources.tensors.parameter_data import gradient_state
from otel_torch.statistics.norms import whole_values

# A CPU adds up float32 squares in float32: the norm of so many elements has an error below 1e-4.
_MOST_ON_CPU = 2**22
# how often a clip writes to a gradient: by its norm, and by the limits of its values
_WRITES = {False: 1, True: 2}
# clips of parameters with which no optimizer may ever step
_MOST_EARLY = 1024


Probe = tuple[weakref.ref[Tensor], tuple[int, int | None]] | None


@dataclass(slots=True, eq=False)
class Clip:
    """One call that has clipped gradients.

    parameter_ids: `id` of each parameter. norm: their norm before, shape (); None if only all ranks
    together know it. is_l2: whether it is an L2 norm. max_norm: what it was clipped to. scale: by
    what the gradients were still multiplied. is_recorded: whether a row has the norm. is_used:
    whether an optimizer has stepped with them. by_value: whether each value was clipped by itself.
    probe: a parameter, and the state of its gradient before. line: of the call.
    """

    parameter_ids: frozenset[int]
    norm: Tensor | None
    is_l2: bool
    max_norm: float
    scale: Tensor | None
    is_recorded: bool = False
    is_used: bool = False
    by_value: bool = False
    probe: Probe = None
    line: ProgramLine | None = None
    each: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @torch_private.unseen_by_function_modes
    def is_kept(self) -> bool:
        """Return whether the gradients are still there, written to by this clip alone."""
        if self.probe is None:
            return True
        parameter, (number, written) = self.probe
        state = gradient_state(parameter())
        if state is None or state[0] != number:
            return False
        now = state[1]
        return written is None or now is None or now <= written + _WRITES[self.by_value]

    def factor(self) -> Tensor | None:
        """Return by what the gradients were multiplied, shape ()."""
        if self.norm is None:
            return None
        return (self.max_norm / (self.norm + 1e-6)).clamp(max=1.0)


class _NormsOfEach(TorchFunctionMode):
    """Keeps the norms of single gradients from which torch computes the norm of all.

    each: by `id` of the gradient, that gradient and its norm before clipping; those with few
    digits, which are of half precision or added up from too many elements, are left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.each: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if torch_private.computes_norms_of_each(function):
            self.each |= {
                id(gradient): (gradient, norm)
                for gradient, norm in zip(args[0], result, strict=True)
                if norm.dtype is torch.float32
                and (not norm.is_cpu or gradient.numel() <= _MOST_ON_CPU)
            }
        return result


@torch_private.unseen_by_function_modes
def _probe(parameters: list[Tensor]) -> Probe:
    """Return the first parameter with a gradient, and what that is before it is clipped."""
    for parameter in parameters:
        if (state := gradient_state(parameter)) is not None:
            return weakref.ref(parameter), state
    return None


# Asked for parameters that are about to be updated, where no function of torch has clipped them: a
# framework's clip of them by code of its own, with the norm of all ranks.
clip_sources: list[Callable[[frozenset[int]], Clip | None]] = []
# of the sessions that are running
_watches: list[ClipWatch] = []


def note_clip(parameters: Any, max_norm: float, total_norm: Tensor) -> Any:
    """Note that a program is about to clip the gradients of parameters to `max_norm`.

    Returns the parameters, since the caller may pass an iterator. Never raises.
    """
    try:
        if not isinstance(parameters, Tensor):
            parameters = list(parameters)
        clipped = [parameters] if isinstance(parameters, Tensor) else parameters
        ids, norm = frozenset(map(id, clipped)), whole_values(total_norm)
        for watch in _watches:
            watch.add(ids, norm, float(max_norm), _probe(clipped))
    except Exception as error:
        say_once(f"a gradient norm is not recorded: {type(error).__name__}: {error}")
    return parameters


class ClipWatch(threading.local):
    """The clips since the last backward pass of a thread.

    scale: by what a gradient scaler has multiplied the gradients, until it divides them by it.
    keeps_each: whether the norms of single gradients are of use, in the step that the thread is in.
    line: of the last clip that came too early or too late.
    """

    def __init__(self) -> None:
        self._clips: list[Clip] = []
        # parameters clipped before another backward pass, by an optimizer that steps after it
        self._early: deque[frozenset[int]] = deque(maxlen=_MOST_EARLY)
        # parameters with which an optimizer has stepped since the last backward pass
        self._stepped: frozenset[int] = frozenset()
        self._late = 0
        self._norm_type = 2.0
        self._each: dict[int, tuple[Tensor, Tensor]] = {}
        self.scale: Tensor | None = None
        self.keeps_each = False
        self.line: ProgramLine | None = None

    def install(self, replacements: Replacements) -> None:
        _watches.append(self)
        replacements.on_restore(lambda: _watches.remove(self))
        for owner, name in torch_private.clipping_functions():
            replacements.replace(owner, name, self._wrap_clip)
        for owner in (clip_grad, torch.nn.utils):
            replacements.replace(owner, "clip_grad_value_", self._wrap_clip_by_value)
        if hasattr(clip_grad, "_get_total_norm"):
            replacements.replace(clip_grad, "_get_total_norm", self._wrap_norm)

    def _wrap_norm(self, get_norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def get_total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kw: Any) -> Tensor:
            if torch.compiler.is_compiling():
                return get_norm(tensors, norm_type, *args, **kw)
            self._norm_type = float(norm_type)
            norms = _NormsOfEach() if self.keeps_each else None
            with norms or nullcontext():
                total = get_norm(tensors, norm_type, *args, **kw)
            self._each = {} if norms is None else norms.each
            return total

        return get_total_norm

    @staticmethod
    def _wrap_clip(clip: Callable[..., None]) -> Callable[..., None]:
        def clip_grads_with_norm_(
            parameters: Any, max_norm: float, total_norm: Tensor, *args: Any, **kwargs: Any
        ) -> None:
            if not torch.compiler.is_compiling():
                parameters = note_clip(parameters, max_norm, total_norm)
            return clip(parameters, max_norm, total_norm, *args, **kwargs)

        return clip_grads_with_norm_

    @staticmethod
    def _wrap_clip_by_value(clip: Callable[..., None]) -> Callable[..., None]:
        def clip_grad_value_(parameters: Any, *args: Any, **kwargs: Any) -> None:
            if not torch.compiler.is_compiling():
                if not isinstance(parameters, Tensor):
                    parameters = list(parameters)
                clipped = [parameters] if isinstance(parameters, Tensor) else parameters
                for watch in _watches:
                    watch.note_values(frozenset(map(id, clipped)), _probe(clipped))
            return clip(parameters, *args, **kwargs)

        return clip_grad_value_

    def note_values(self, parameter_ids: frozenset[int], probe: Probe) -> None:
        """Note a clip of each value of the gradients, which has no norm."""
        line = current_line()
        if self._stepped.isdisjoint(parameter_ids):
            clip = Clip(
                parameter_ids, None, False, math.inf, None, by_value=True, probe=probe, line=line
            )
            self._clips.append(clip)
        else:
            self._late, self.line = self._late + 1, line

    def add(
        self,
        parameter_ids: frozenset[int],
        norm: Tensor | None,
        max_norm: float,
        probe: Probe = None,
    ) -> None:
        """Add a clip of this thread, by the norm that it has just computed."""
        is_l2, each = self._norm_type == 2.0, self._each
        self._norm_type, self._each = 2.0, {}
        line = current_line()
        if not self._stepped.isdisjoint(parameter_ids):
            self._late, self.line = self._late + 1, line
            return
        self._clips.append(
            Clip(
                parameter_ids, norm, is_l2, max_norm, self.scale,
                each=each, probe=probe, line=line,
            )
        )  # fmt: skip

    def forget(self) -> None:
        """Forget all clips: a backward pass changes the gradients."""
        unused = [clip for clip in self._clips if not clip.is_used and clip.is_kept()]
        self._early += (clip.parameter_ids for clip in unused)
        if unused:
            self.line = unused[-1].line
        self._clips.clear()
        self._stepped = frozenset()
        self.forget_each()

    def forget_each(self) -> None:
        """Let go of the gradients whose norms are known."""
        self._each = {}
        for clip in self._clips:
            clip.each = {}

    def take_early(self, parameter_ids: frozenset[int]) -> int:
        """Return how often the gradients were clipped before all of them were added up.

        An optimizer is about to step with them, so that none of these clips counts again.
        """
        count = len(self._early)
        left = [clipped for clipped in self._early if clipped.isdisjoint(parameter_ids)]
        self._early.clear()
        self._early += left
        return count - len(left)

    def take_late(self) -> int:
        """Return how often gradients were clipped after the step that has used them."""
        count, self._late = self._late, 0
        return count

    def of(self, parameter_ids: frozenset[int]) -> list[Clip]:
        """Return the clips of any of the parameters, in order."""
        clips = [c for c in self._clips if not c.parameter_ids.isdisjoint(parameter_ids)]
        if not clips:
            said = (source(parameter_ids) for source in clip_sources)
            clips = [clip for clip in said if clip is not None]
            for clip in clips:
                clip.is_used = True  # by the optimizer that is about to step
            self._clips += clips
        return [clip for clip in clips if not clip.by_value]

    def use(self, parameter_ids: frozenset[int]) -> None:
        """Note that an optimizer steps with the gradients of parameters."""
        self._stepped |= parameter_ids
        for clip in self._clips:
            clip.is_used = clip.is_used or not clip.parameter_ids.isdisjoint(parameter_ids)
