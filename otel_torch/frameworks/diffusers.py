"""What is special about diffusers: schedulers that say how many steps there are, and pipelines
around the loop.

Programs that bring a scheduler of their own derive it from diffusers' mixin too, so the class's
subclasses are watched, wherever they are defined.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from otel_torch.console import say_once
from otel_torch.sources import steps

_busy = threading.local()
_wrapped: list[tuple[type, str, Any]] = []


def _watch_subclasses(
    base: Any, wrappers: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]
) -> None:
    """Wrap methods of every subclass of `base` that defines them, of those to come as well."""
    own = vars(base).get("__init_subclass__")

    def init_subclass(cls: Any, /, **kwargs: Any) -> None:
        if own is not None:
            own.__func__(cls, **kwargs)
        else:
            super(base, cls).__init_subclass__(**kwargs)
        wrap(cls)

    def wrap(cls: Any) -> None:
        for name, wrapper in wrappers.items():
            method = vars(cls).get(name)
            if callable(method):
                _wrapped.append((cls, name, method))
                setattr(cls, name, wrapper(method))

    def wrap_all(cls: Any) -> None:
        for subclass in cls.__subclasses__():
            wrap(subclass)
            wrap_all(subclass)

    wrap_all(base)
    _wrapped.append((base, "__init_subclass__", own))
    base.__init_subclass__ = classmethod(init_subclass)


def uninstall() -> None:
    """Give every wrapped method back."""
    while _wrapped:
        cls, name, method = _wrapped.pop()
        if method is None:
            delattr(cls, name)
        else:
            setattr(cls, name, method)


def _told(
    tell: Callable[[steps.StepTracker, Any], None],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A wrapper that tells the step_tracker when a scheduler's method has returned; a call from within
    another says nothing.
    """

    def wrapper(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(_busy, "on", False):
                return method(scheduler, *args, **kwargs)
            _busy.on = True
            try:
                result = method(scheduler, *args, **kwargs)
            finally:
                _busy.on = False
            if (step_tracker := steps.current_step_tracker()) is not None:
                try:
                    tell(step_tracker, scheduler)
                except Exception as error:
                    say_once(
                        f"the steps of {type(scheduler).__name__} are not counted: {type(error).__name__}: {error}"
                    )
            return result

        return call

    return wrapper


def _schedule_set(step_tracker: steps.StepTracker, scheduler: Any) -> None:
    step_tracker.schedule_set(scheduler, _length(scheduler) or 0)


def _length(scheduler: Any) -> int | None:
    try:
        return len(scheduler.timesteps)
    except (AttributeError, TypeError):
        return None


def _schedule_stepped(step_tracker: steps.StepTracker, scheduler: Any) -> None:
    # image to image begins half-way (`set_begin_index`): fewer steps than timesteps, which
    # `step_index` counts
    index, length = getattr(scheduler, "step_index", None), _length(scheduler)
    step_tracker.schedule_stepped(
        scheduler, last=isinstance(index, int) and length is not None and index >= length
    )


def _pipeline_call(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(pipeline: Any, *args: Any, **kwargs: Any) -> Any:
        step_tracker = steps.current_step_tracker()
        if step_tracker is None:
            return method(pipeline, *args, **kwargs)
        step_tracker.denoising.pipeline_entered()
        try:
            result = method(pipeline, *args, **kwargs)
        except BaseException as error:
            step_tracker.end_pending_forward()
            step_tracker.denoising.pipeline_left(error)
            raise
        step_tracker.end_pending_forward()
        step_tracker.denoising.pipeline_left()
        return result

    return call


def _watch_schedulers(module: ModuleType) -> None:
    _watch_subclasses(
        module.SchedulerMixin,
        {"set_timesteps": _told(_schedule_set), "step": _told(_schedule_stepped)},
    )


def _watch_pipelines(module: ModuleType) -> None:
    _watch_subclasses(module.DiffusionPipeline, {"__call__": _pipeline_call})


HOOKS = {
    "diffusers.schedulers.scheduling_utils": _watch_schedulers,
    "diffusers.pipelines.pipeline_utils": _watch_pipelines,
}
