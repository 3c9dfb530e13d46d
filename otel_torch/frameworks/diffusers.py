"""Support for diffusers: schedulers give the number of denoise steps, pipelines surround the loop.

A program may define its own schedulers and pipelines, so the methods of all subclasses are wrapped,
wherever they are defined.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from otel_torch.frameworks.patches import Patches
from otel_torch.process.console import say_once
from otel_torch.sources.steps import step_clocks as steps

_Method = Callable[..., Any]

# whether this thread is in a scheduler's method
_in_scheduler = threading.local()

_patches = Patches()
uninstall = _patches.restore


def _then(after: Callable[[steps.StepTracker, Any], None]) -> Callable[[_Method], _Method]:
    """Return a wrapper that calls `after` when a scheduler's method returns.

    Calls from within another method of a scheduler are not reported.
    """

    def wrapper(method: _Method) -> _Method:
        def call(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(_in_scheduler, "value", False):
                return method(scheduler, *args, **kwargs)
            _in_scheduler.value = True
            try:
                result = method(scheduler, *args, **kwargs)
            finally:
                _in_scheduler.value = False
            step_tracker = steps.current_step_tracker()
            if step_tracker is not None:
                try:
                    after(step_tracker, scheduler)
                except Exception as error:
                    name, reason = type(scheduler).__name__, f"{type(error).__name__}: {error}"
                    say_once(f"the steps of {name} are not counted: {reason}")
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
    # image-to-image skips timesteps (`set_begin_index`) and makes fewer steps than there are;
    # `step_index` is the position in the timesteps
    index, length = getattr(scheduler, "step_index", None), _length(scheduler)
    is_last = isinstance(index, int) and length is not None and index >= length
    step_tracker.schedule_stepped(scheduler, last=is_last)


def _pipeline_call(method: _Method) -> _Method:
    def call(pipeline: Any, *args: Any, **kwargs: Any) -> Any:
        step_tracker = steps.current_step_tracker()
        if step_tracker is None:
            return method(pipeline, *args, **kwargs)
        step_tracker.denoising.start_pipeline()
        try:
            result = method(pipeline, *args, **kwargs)
        except BaseException as error:
            step_tracker.end_pending_forward()
            step_tracker.denoising.end_pipeline(error)
            raise
        step_tracker.end_pending_forward()
        step_tracker.denoising.end_pipeline()
        return result

    return call


def _wrap_schedulers(module: ModuleType) -> None:
    wrappers = {"set_timesteps": _then(_schedule_set), "step": _then(_schedule_stepped)}
    _patches.replace_in_subclasses(module.SchedulerMixin, wrappers)


def _wrap_pipelines(module: ModuleType) -> None:
    _patches.replace_in_subclasses(module.DiffusionPipeline, {"__call__": _pipeline_call})


HOOKS = {
    "diffusers.schedulers.scheduling_utils": _wrap_schedulers,
    "diffusers.pipelines.pipeline_utils": _wrap_pipelines,
}
