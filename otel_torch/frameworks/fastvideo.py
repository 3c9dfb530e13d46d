"""Support for FastVideo: spans of its stages, step and guidance branch of its denoising loops.

FastVideo's own activation trace sees one model, and for most model families neither step nor
branch, so its recordings cannot be aligned. While a session runs, our trace and profiler replace
FastVideo's. Everything that depends on FastVideo's code is in this file.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from otel_torch import session
from otel_torch.frameworks.patches import Patches
from otel_torch.process.console import say_once
from otel_torch.records import Scope
from otel_torch.regions import entry, nvtx, profiler, registry
from otel_torch.sources.steps import forwards, trace_step
from otel_torch.sources.steps import step_clocks as steps
from otel_torch.sources.training import gradient_clipping

# fields of a request on its pipeline's span: numbers that determine the work, no prompts or paths
_REQUEST_FIELDS = ("height", "width", "num_frames", "num_inference_steps", "guidance_scale", "seed")
# when a worker's forward raises, FastVideo kills the parent and with it the worker: the time to
# send what was recorded before that
_DRAIN_S = 1.0
_DENOISING_STAGE = re.compile(r"(?<!Before)DenoisingStage$")
_SETS_BRANCH = re.compile(r"\.is_cfg_negative\s*=(?!=|\s*False\b)")


# -- replacing and restoring

_patches = Patches()
uninstall = _patches.restore


def _replace_function(module: ModuleType, name: str, new: Any) -> None:
    """Replace a function in all modules of FastVideo that have imported it, until `uninstall`."""
    old = getattr(module, name)

    def swap(current: Any, replacement: Any) -> None:
        for module_name, importer in list(sys.modules.items()):
            is_of_fastvideo = module_name.partition(".")[0] == "fastvideo"
            if is_of_fastvideo and vars(importer).get(name) is current:
                setattr(importer, name, replacement)

    swap(old, new)
    _patches.on_restore(lambda: swap(new, old))


def _guarded(install: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """Return an import hook that calls `install` while a session runs.

    If this version of FastVideo differs from what `install` expects, its module stays unchanged.
    """

    @functools.wraps(install)
    def hook(module: ModuleType) -> None:
        if session.current() is None:
            return
        try:
            install(module)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            say_once(f"{module.__name__} is not as expected and stays unchanged: {reason}")

    return hook


# -- the state of a generation


class _StepCounter:
    """Counts the steps of a denoising stage by the forward context's `current_timestep`.

    Most stages put the loop's index there, some the timestep or its sigma (Flux, LTX-2,
    Matrix-Game 3). An index starts with 0, and timesteps end there: values that start otherwise
    are not used, but their changes are counted.

    >>> index, timestep = _StepCounter(), _StepCounter()
    >>> [index.step(value) for value in (0, 0, 2)]
    [0, 0, 2]
    >>> [timestep.step(value) for value in (999, 999, 500)]
    [0, 0, 1]
    """

    def __init__(self) -> None:
        self._last: Any = None
        self._changes = -1
        self._is_index = False

    def step(self, value: Any) -> int:
        """Return the step, from 0. Tensors are compared by identity: they may be on a device."""
        if self._changes < 0:
            self._is_index = isinstance(value, int) and value == 0
        if value is not self._last and not (isinstance(value, int | float) and value == self._last):
            self._last = value
            self._changes += 1
        return value if self._is_index and isinstance(value, int) else self._changes


class _Generation:
    """One outermost forward of a pipeline, with its number in this process."""

    def __init__(self, number: int, pipeline: Any) -> None:
        self.number = number
        self.pipeline = pipeline
        # whether it has started the natural regions; None before the first stage
        self._has_regions: bool | None = None

    def start_stage(self, step_tracker: steps.StepTracker) -> None:
        """Start the natural regions before the first stage, if the pipeline has a denoising one.

        Stages are made in the first forward, so it is too early to ask before.
        """
        if self._has_regions is None:
            self._has_regions = any(map(_is_denoising, self.pipeline.stages))
            if self._has_regions:
                step_tracker.denoising.start_pipeline()

    def end(self, step_tracker: steps.StepTracker, error: BaseException | None) -> None:
        """End the generation's last step and its natural regions."""
        step_tracker.end_pending_forward()
        if self._has_regions:
            step_tracker.denoising.end_pipeline(error)


class _GenerationState(threading.local):
    """The generation and the denoising stage that run in this thread."""

    generation: _Generation | None = None
    denoising_stage: Any = None
    step_counter: _StepCounter | None = None


_state = _GenerationState()
_generations = 0


def _is_denoising(stage: Any) -> bool:
    return any(_DENOISING_STAGE.search(base.__name__) for base in type(stage).__mro__)


@functools.cache
def _sets_branch(forward: Any) -> bool:
    """Return whether a stage's `forward` ever sets `is_cfg_negative` to a true value.

    If it never does, False does not mean the conditional branch.
    """
    try:
        return bool(_SETS_BRANCH.search(inspect.getsource(forward)))
    except (OSError, TypeError):
        return False


def _forward_context() -> Any:
    """Return FastVideo's forward context, or None outside of one."""
    try:
        return sys.modules["fastvideo.forward_context"].get_forward_context()
    except (KeyError, AssertionError):
        return None


def _hint() -> forwards.Hint | None:
    """Return step, loop and guidance branch of the next forward, as far as FastVideo knows them.

    None in training, where no pipeline runs and the optimizer's steps count.
    """
    generation, stage = _state.generation, _state.denoising_stage
    if generation is None and stage is None:
        return None
    loop = generation.number if generation else None
    context = _forward_context()
    batch = getattr(context, "forward_batch", None)
    if stage is None or batch is None or _state.step_counter is None:
        return forwards.Hint(loop=loop)
    branch = None
    if getattr(batch, "is_cfg_negative", False):
        branch = "uncond"
    elif _sets_branch(type(stage).forward):
        branch = "cond"
    return forwards.Hint(_state.step_counter.step(context.current_timestep), loop, branch)


# -- spans


@contextlib.contextmanager
def _scope(name: str, attributes: dict[str, Any]) -> Iterator[None]:
    """Open a `stage` scope around the block if a session runs."""
    current = session.current()
    if current is None:
        yield
        return
    scope = Scope("stage", name, attributes=attributes)
    current.recorder.open(scope)
    try:
        yield
    except BaseException as error:
        current.recorder.close(scope, error)
        raise
    current.recorder.close(scope)


@contextlib.contextmanager
def _generating(pipeline: Any) -> Iterator[None]:
    """Count a generation; a pipeline in the forward of another one is part of that."""
    global _generations
    step_tracker = steps.current_step_tracker()
    if step_tracker is None or _state.generation is not None:
        yield
        return
    _state.generation = generation = _Generation(_generations, pipeline)
    _generations += 1
    failed: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failed = error
        raise
    finally:
        generation.end(step_tracker, failed)
        _state.generation = None


@contextlib.contextmanager
def _staging(stage: Any) -> Iterator[None]:
    """Track a running stage for the natural regions, and for `_hint` if it is a denoising one."""
    step_tracker, is_denoising = steps.current_step_tracker(), _is_denoising(stage)
    if step_tracker is not None and _state.generation is not None:
        _state.generation.start_stage(step_tracker)
    if step_tracker is None or not is_denoising:
        yield
        return
    outer = _state.denoising_stage, _state.step_counter
    _state.denoising_stage, _state.step_counter = stage, _StepCounter()
    step_tracker.denoising.start_denoising()
    try:
        yield
    finally:
        _state.denoising_stage, _state.step_counter = outer
        step_tracker.end_pending_forward()
        step_tracker.end_framework_step()
        step_tracker.denoising.end_denoising()


def _in_span(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the `forward` of a pipeline in a span."""

    def recorded(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if session.current() is None:
            return forward(self, batch, *args, **kwargs)
        values = {name: getattr(batch, name, None) for name in _REQUEST_FIELDS}
        request = {
            f"fastvideo.{name}": value
            for name, value in values.items()
            if isinstance(value, int | float)
        }
        try:
            with _scope(f"fastvideo.pipeline::{type(self).__name__}", request), _generating(self):
                return forward(self, batch, *args, **kwargs)
        except BaseException:
            if (current := session.current()) is not None:
                current.recorder.drain(_DRAIN_S)
            raise

    return recorded


@_guarded
def _wrap_pipelines(module: ModuleType) -> None:
    _patches.replace_in_subclasses(module.ComposedPipelineBase, {"forward": _in_span})


@contextlib.contextmanager
def _running_stage(stage: Any) -> Iterator[None]:
    if session.current() is None:
        yield
        return
    key = getattr(stage, "_pipeline_stage_name", None)
    attributes = {"fastvideo.stage": key} if isinstance(key, str) else {}
    with _staging(stage), _scope(f"fastvideo.stage::{type(stage).__name__}", attributes):
        yield


@_guarded
def _wrap_stages(module: ModuleType) -> None:
    _patches.around(module.PipelineStage, "__call__", _running_stage)


@_guarded
def _wrap_generator(module: ModuleType) -> None:
    # the parent process has no model: its part of a video (prompt, pipe, file) is one span
    name = (
        "_generate_single_video"
        if hasattr(module.VideoGenerator, "_generate_single_video")
        else "generate_video"
    )
    _patches.around(module.VideoGenerator, name, lambda generator: _scope("fastvideo.generate", {}))


@_guarded
def _add_hint(module: ModuleType) -> None:
    _patches.add(forwards.hint_providers, _hint)


# -- replacements of FastVideo's trace and profiler

_PROFILER = {
    "ProfilerRegion": registry.ProfilerRegion,
    "TorchProfilerConfig": profiler.TorchProfilerConfig,
    "TorchProfilerController": profiler.TorchProfilerController,
    "get_global_controller": profiler.get_global_controller,
    "get_or_create_profiler": profiler.get_or_create_profiler,
    "list_profiler_regions": registry.list_profiler_regions,
    "nvtx_range": nvtx.nvtx_range,
    "profile_region": entry.profile_region,
    "profiler_region": entry.profiler_region,
    "resolve_profiler_region": registry.resolve_profiler_region,
    "set_global_controller": profiler.set_global_controller,
}


def _register(name: str, description: str) -> None:
    try:
        registry.register_profiler_region(name, description)
    except ValueError:
        pass  # built in: FastVideo's documentation names more regions than its code registers


@_guarded
def _replace_profiler(module: ModuleType) -> None:
    register_with_fastvideo = module.register_profiler_region

    @functools.wraps(register_with_fastvideo)
    def register_profiler_region(name: str, description: str) -> None:
        register_with_fastvideo(name, description)
        _register(name, description)

    for region in module.list_profiler_regions():
        _register(region.name, region.description)
    _replace_function(module, "register_profiler_region", register_profiler_region)
    # a pipeline that was built before the session started has a controller of FastVideo
    _patches.replace(module.TorchProfilerController, "region", _with_span)
    for name, replacement in _PROFILER.items():
        _replace_function(module, name, replacement)


def _with_span(enter: Callable[..., Any]) -> Callable[..., Any]:
    @contextlib.contextmanager
    def region(self: Any, region: str) -> Iterator[None]:
        with entry.region(region), enter(self, region):
            yield

    return region


def _attach_nothing(model: Any) -> None:
    """Replace FastVideo's `attach_activation_trace`: the session records what it would."""


@_guarded
def _replace_trace(module: ModuleType) -> None:
    _replace_function(module, "trace_step", trace_step.trace_step)
    _replace_function(module, "current_step_idx", trace_step.current_step_idx)
    _replace_function(module, "attach_activation_trace", _attach_nothing)


def _noting_clips(clip: Callable[..., None]) -> Callable[..., None]:
    def recorded(
        parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any
    ) -> None:
        parameters = gradient_clipping.note_clip(parameters, max_norm, total_norm)
        clip(parameters, max_norm, total_norm, *args, **kwargs)

    return recorded


@_guarded
def _watch_clips(module: ModuleType) -> None:
    """Watch FastVideo's own copy of torch's function that scales gradients to a norm."""
    _patches.replace(module, "_clip_grads_with_norm_", _noting_clips)


HOOKS: dict[str, Callable[[ModuleType], None]] = {
    "fastvideo.profiler": _replace_profiler,
    "fastvideo.hooks.activation_trace": _replace_trace,
    "fastvideo.forward_context": _add_hint,
    "fastvideo.pipelines.stages.base": _wrap_stages,
    "fastvideo.pipelines.composed_pipeline_base": _wrap_pipelines,
    "fastvideo.entrypoints.video_generator": _wrap_generator,
    "fastvideo.training.training_utils": _watch_clips,
}
