"""FastVideo: its stages become spans, its denoise loop names step and branch, its own trace and
profiler give way to ours.

FastVideo's own trace sees one model, and with most families neither step nor guidance branch, so
its recordings do not line up. Everything that has to be known about FastVideo in order to do better
is here; its files stay as they are.
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
from otel_torch.console import say_once
from otel_torch.records import Scope
from otel_torch.regions import entry, nvtx, profiler, registry
from otel_torch.sources import steps

# what of a request goes on its pipeline's span: numbers that decide what is computed, never a
# prompt or a path
_REQUEST = ("height", "width", "num_frames", "num_inference_steps", "guidance_scale", "seed")
# a worker whose forward raised has its parent killed, and dies with it: what it may take to send
# what it has before that
_LAST_WORDS_S = 1.0
_DENOISING = re.compile(r"(?<!Before)DenoisingStage$")
_SAYS_BRANCH = re.compile(r"\.is_cfg_negative\s*=(?!=|\s*False\b)")


# -- replacing and restoring
# ---------------------------------------------------------------------------------------------

_undo: list[Callable[[], None]] = []
_installed: set[str] = set()


def _replace(owner: Any, name: str, new: Any) -> None:
    """Put `new` in place of a class's own attribute until `uninstall`."""
    old = vars(owner)[name]
    setattr(owner, name, new)

    def restore() -> None:
        if vars(owner).get(name) is new:
            setattr(owner, name, old)

    _undo.append(restore)


def _replace_function(module: ModuleType, name: str, new: Any) -> None:
    """Put `new` in place of a module's function until `uninstall`, also where FastVideo has
    imported it by name.
    """
    old = getattr(module, name)

    def swap(here: Any, there: Any) -> None:
        for holder_name, holder in list(sys.modules.items()):
            if holder_name.partition(".")[0] == "fastvideo" and vars(holder).get(name) is here:
                setattr(holder, name, there)

    swap(old, new)
    _undo.append(lambda: swap(new, old))


def uninstall() -> None:
    """Restore every class and function that was replaced. Safe to call twice."""
    while _undo:
        _undo.pop()()
    _installed.clear()
    if _hint in steps.hint_providers:
        steps.hint_providers.remove(_hint)


def _once(install: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """A hook that installs once, and that lets FastVideo run on unrecorded where its version does
    not look as expected.
    """

    @functools.wraps(install)
    def hook(module: ModuleType) -> None:
        if module.__name__ in _installed or session.current() is None:
            return
        _installed.add(module.__name__)
        try:
            install(module)
        except Exception as error:
            say_once(
                f"{module.__name__} does not look as expected and is left alone: {type(error).__name__}: {error}"
            )

    return hook


# -- where a generation is
# -------------------------------------------------------------------------------------------------


class _Steps:
    """Which step a denoising stage is at, told from the forward context's `current_timestep`.

    Most stages put the loop's index there, some the timestep itself or its sigma (Flux, LTX-2,
    Matrix-Game 3). An index begins with 0, where a timestep ends: what begins with anything else is
    not believed, but its changes are counted.
    """

    def __init__(self) -> None:
        self._last: Any = None
        self._changes = -1
        self._indexed = False

    def at(self, current: Any) -> int:
        """The step, from 0. `current` is compared by identity if it is a tensor: its value may be
        on a device.
        """
        if self._changes < 0:
            self._indexed = isinstance(current, int) and current == 0
        if current is not self._last and not (
            isinstance(current, int | float) and current == self._last
        ):
            self._last = current
            self._changes += 1
        return current if self._indexed and isinstance(current, int) else self._changes


class _Generation:
    """One outermost forward of a pipeline: its number in this process, and whether the natural
    regions know of it.
    """

    def __init__(self, number: int, pipeline: Any) -> None:
        self.number = number
        self.pipeline = pipeline
        self._entered: bool | None = None

    def stage_begins(self, step_tracker: steps.StepTracker) -> None:
        """Before its first stage, for stages are made in the first forward: a pipeline that
        denoises is entered.
        """
        if self._entered is None:
            self._entered = any(map(_is_denoising, self.pipeline.stages))
            if self._entered:
                step_tracker.denoising.pipeline_entered()

    def end(self, step_tracker: steps.StepTracker, error: BaseException | None) -> None:
        """The forward is over."""
        step_tracker.end_pending_forward()
        if self._entered:
            step_tracker.denoising.pipeline_left(error)


class _Here(threading.local):
    """What this thread's pipeline is doing."""

    generation: _Generation | None = None
    denoising: Any = None  # the denoising stage that runs
    steps: _Steps | None = None


_here = _Here()
_generations = 0


def _is_denoising(stage: Any) -> bool:
    return any(_DENOISING.search(base.__name__) for base in type(stage).__mro__)


@functools.cache
def _says_branch(forward: Any) -> bool:
    """Whether a stage's `forward` sets `is_cfg_negative` for negative prompts: where it never does,
    False says nothing.
    """
    try:
        return bool(_SAYS_BRANCH.search(inspect.getsource(forward)))
    except (OSError, TypeError):
        return False


def _forward_context() -> Any:
    """FastVideo's forward context, None outside of one."""
    try:
        return sys.modules["fastvideo.forward_context"].get_forward_context()
    except (KeyError, AssertionError):
        return None


def _hint() -> steps.Hint | None:
    """Step, loop and guidance branch of the forward that is about to run, as far as FastVideo says
    them.

    In training there is no pipeline forward around it: None, and the optimizer's steps count.
    """
    generation, stage = _here.generation, _here.denoising
    if generation is None and stage is None:
        return None
    loop = generation.number if generation else None
    context = _forward_context()
    batch = getattr(context, "forward_batch", None)
    if stage is None or batch is None or _here.steps is None:
        return steps.Hint(loop=loop)
    negative = getattr(batch, "is_cfg_negative", False)
    branch = "uncond" if negative else "cond" if _says_branch(type(stage).forward) else None
    return steps.Hint(_here.steps.at(context.current_timestep), loop, branch)


# -- spans
# --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _scope(name: str, attributes: dict[str, Any]) -> Iterator[None]:
    """A `stage` scope around the block; nothing where nothing is recorded."""
    running = session.current()
    if running is None:
        yield
        return
    scope = Scope("stage", name, attributes=attributes)
    running.recorder.open(scope)
    try:
        yield
    except BaseException as error:
        running.recorder.close(scope, error)
        raise
    running.recorder.close(scope)


@contextlib.contextmanager
def _generating(pipeline: Any) -> Iterator[None]:
    """Count a generation; a pipeline inside another one's forward is part of it."""
    global _generations
    step_tracker = steps.current_step_tracker()
    if step_tracker is None or _here.generation is not None:
        yield
        return
    _here.generation = generation = _Generation(_generations, pipeline)
    _generations += 1
    failed: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failed = error
        raise
    finally:
        generation.end(step_tracker, failed)
        _here.generation = None


@contextlib.contextmanager
def _staging(stage: Any) -> Iterator[None]:
    """Say that a stage runs: to the natural regions, and to `_hint` if it is a denoising one."""
    step_tracker, denoising = steps.current_step_tracker(), _is_denoising(stage)
    if step_tracker is not None and _here.generation is not None:
        _here.generation.stage_begins(step_tracker)
    if step_tracker is None or not denoising:
        yield
        return
    outer = _here.denoising, _here.steps
    _here.denoising, _here.steps = stage, _Steps()
    step_tracker.denoising.step_begins()
    try:
        yield
    finally:
        _here.denoising, _here.steps = outer
        step_tracker.end_pending_forward()
        step_tracker.end_framework_step()
        step_tracker.denoising.schedule_used_up()


def _record_forward(pipeline_class: Any) -> None:
    """Make a pipeline class's own `forward` a span."""
    forward = vars(pipeline_class)["forward"]

    @functools.wraps(forward)
    def recorded(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if session.current() is None:
            return forward(self, batch, *args, **kwargs)
        values = {name: getattr(batch, name, None) for name in _REQUEST}
        request = {
            f"fastvideo.{name}": value
            for name, value in values.items()
            if isinstance(value, int | float)
        }
        try:
            with _scope(f"fastvideo.pipeline::{type(self).__name__}", request), _generating(self):
                return forward(self, batch, *args, **kwargs)
        except BaseException:
            if (running := session.current()) is not None:
                running.recorder.drain(_LAST_WORDS_S)
            raise

    _replace(pipeline_class, "forward", recorded)


@_once
def _watch_pipelines(module: ModuleType) -> None:
    base = module.ComposedPipelineBase

    def with_subclasses(cls: Any) -> Iterator[Any]:
        yield cls
        for subclass in cls.__subclasses__():
            yield from with_subclasses(subclass)

    for cls in dict.fromkeys(with_subclasses(base)):
        if "forward" in vars(cls):
            _record_forward(cls)

    def subclass_made(cls: Any, /, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        if "forward" in vars(cls):
            _record_forward(cls)

    base.__init_subclass__ = classmethod(subclass_made)
    _undo.append(lambda: delattr(base, "__init_subclass__"))


@_once
def _watch_stages(module: ModuleType) -> None:
    call = module.PipelineStage.__call__

    @functools.wraps(call)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if session.current() is None:
            return call(self, *args, **kwargs)
        key = getattr(self, "_pipeline_stage_name", None)
        attributes = {"fastvideo.stage": key} if isinstance(key, str) else {}
        with _staging(self), _scope(f"fastvideo.stage::{type(self).__name__}", attributes):
            return call(self, *args, **kwargs)

    _replace(module.PipelineStage, "__call__", recorded)


@_once
def _watch_generator(module: ModuleType) -> None:
    # the parent has no model: its part of a video (the prompt, the pipe, the file) is one span
    name = (
        "_generate_single_video"
        if hasattr(module.VideoGenerator, "_generate_single_video")
        else "generate_video"
    )
    generate = vars(module.VideoGenerator)[name]

    @functools.wraps(generate)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _scope("fastvideo.generate", {}):
            return generate(self, *args, **kwargs)

    _replace(module.VideoGenerator, name, recorded)


@_once
def _believe_steps(module: ModuleType) -> None:
    if _hint not in steps.hint_providers:
        steps.hint_providers.append(_hint)


# -- what FastVideo has of its own and we take over
# ----------------------------------------------------------------------

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
        pass  # known to us already: FastVideo's documents name more regions than its code registers


@_once
def _take_over_profiler(module: ModuleType) -> None:
    theirs = module.register_profiler_region

    @functools.wraps(theirs)
    def register_profiler_region(name: str, description: str) -> None:
        theirs(name, description)
        _register(name, description)

    for known in module.list_profiler_regions():
        _register(known.name, known.description)
    _replace_function(module, "register_profiler_region", register_profiler_region)
    # a pipeline that was built before we started holds a controller of FastVideo's
    _replace(
        module.TorchProfilerController, "region", _with_span(module.TorchProfilerController.region)
    )
    for name, ours in _PROFILER.items():
        _replace_function(module, name, ours)


def _with_span(enter: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(enter)
    @contextlib.contextmanager
    def region(self: Any, region: str) -> Iterator[None]:
        with entry.region(region), enter(self, region):
            yield

    return region


def _no_trace(model: Any) -> None:
    """Instead of FastVideo's `attach_activation_trace`: everything it would record is recorded
    already.
    """


@_once
def _take_over_trace(module: ModuleType) -> None:
    _replace_function(module, "trace_step", steps.trace_step)
    _replace_function(module, "current_step_idx", steps.current_step_idx)
    _replace_function(module, "attach_activation_trace", _no_trace)


HOOKS: dict[str, Callable[[ModuleType], None]] = {
    "fastvideo.profiler": _take_over_profiler,
    "fastvideo.hooks.activation_trace": _take_over_trace,
    "fastvideo.forward_context": _believe_steps,
    "fastvideo.pipelines.stages.base": _watch_stages,
    "fastvideo.pipelines.composed_pipeline_base": _watch_pipelines,
    "fastvideo.entrypoints.video_generator": _watch_generator,
}
