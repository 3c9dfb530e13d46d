"""Track the outputs and gradients of modules in a list, with tensor_tracker's interface.

In tensor_tracker, an exception in the user's function ends the forward; here it is counted and
logged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload
from weakref import ref

import torch
from torch import Tensor, nn

from otel_torch import torch_private
from otel_torch.capture.dataframe import Statistics, frame_of_recording, frame_of_stashes
from otel_torch.capture.gradient_watch import GradientWatch
from otel_torch.capture.hook_names import unique_hook_name
from otel_torch.capture.stash import Event, NamePattern, Stash, StashFn, StashValueFn, get_stash_fn
from otel_torch.capture.tensor_structure import join_tensors
from otel_torch.process.console import say_once
from otel_torch.rendering.near_name import near_name
from otel_torch.rendering.notebook import MAX_ROWS, notebook_html
from otel_torch.sources.modules.hooks import ForwardHook, ModuleHookManager, remove_hook
from otel_torch.sources.modules.module_names import first_names
from otel_torch.sources.tensors import compiled

if TYPE_CHECKING:
    import pandas


class Tracker(compiled.Observer):
    """A sequence of the stashes of all registered modules, in the order of their events.

    As a context manager, it unregisters on exit; a backward pass that runs later still adds its
    gradients. An exception in `stash` does not reach the program: it is counted in `lost` and
    logged once.
    """

    def __init__(self, stash: StashFn | None = None) -> None:
        self.stashes: list[Stash] = []
        self.lost = 0
        self._stash = stash or get_stash_fn()
        self._hooks: list[tuple[nn.Module, _TrackHook]] = []
        self._handles: list[Any] = []
        self._gradients = GradientWatch()
        self._stop_guarding: Callable[[], None] = lambda: None

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *error: object) -> None:
        self.unregister()

    # -- registering

    def register(
        self, module: nn.Module, name: str = "", grad: bool = True, *, parameters: bool = False
    ) -> None:
        """Track one module under `name`.

        Args:
            grad: Whether to track gradients too.
            parameters: Whether to track the module's direct parameters as `<name>.<parameter>`:
                their values now and, with `grad`, each gradient once it has been accumulated.
        """
        if not self._hooks:
            self._stop_guarding = compiled.guard_hooks()
        hook = _TrackHook(self, name, grad)
        ModuleHookManager.get_from_or_default(module).append_forward_hook(hook)
        self._hooks.append((module, hook))
        if parameters:
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    full_name = f"{name}.{key}" if name else key
                    self._register_parameter(full_name, type(module), parameter, grad)

    def _register_parameter(
        self, name: str, module_class: type[nn.Module], parameter: nn.Parameter, grad: bool
    ) -> None:
        self.take(Event(name, module_class, False, parameter, (), {}))
        if grad and parameter.requires_grad:
            callback = partial(self._add_parameter_gradient, name, module_class)
            handle = parameter.register_post_accumulate_grad_hook(callback)  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def register_all(
        self,
        module: nn.Module,
        grad: bool = True,
        include: NamePattern = None,
        exclude: NamePattern = None,
        *,
        parameters: bool = False,
    ) -> None:
        """Track `module` and all its submodules whose names match `include` (`re.search`; None for
        all) and do not match `exclude`.

        Names are canonical: those of wrappers (`module.`, `_orig_mod.`) are left out. A shared
        module is tracked once, under its first name. If nothing matches, one line is logged.
        """
        included, excluded = _compile_pattern(include), _compile_pattern(exclude)
        named = first_names(module)
        matches = 0
        for name, submodule in named:
            if included is not None and not included.search(name):
                continue
            if excluded is not None and excluded.search(name):
                continue
            matches += 1
            self.register(submodule, name, grad, parameters=parameters)
        if not matches:
            names = [name for name, _ in named if name]
            hint = near_name(included.pattern, names) if included is not None else ""
            say_once(
                f"track: no module of {type(module).__name__} matches "
                f"({len(named)} modules, for example {names[0] if names else ''!r}){hint}"
            )

    def unregister(self) -> None:
        """Remove all hooks. The stashes remain."""
        for module, hook in self._hooks:
            remove_hook(module, hook.name())
        for handle in self._handles:
            handle.remove()
        self._hooks.clear()
        self._handles.clear()
        self._stop_guarding()
        self._stop_guarding = lambda: None

    def clear(self) -> None:
        """Delete all stashes."""
        self.stashes.clear()

    # -- events

    def take(self, event: Event) -> None:
        """Stash an event. Never raises."""
        try:
            self.stashes.append(self._stash(event))
        except Exception as error:
            self.lost += 1
            say_once(
                f"track: stash failed for {event.name!r}, other events may be missing too: "
                f"{type(error).__name__}: {error}"
            )

    def watch_gradients(self, name: str, module_class: type[nn.Module], output: Any) -> None:
        """Stash the gradients of a module's output once a backward pass has them. Never raises."""
        # weak: the graph holds the callback, and a stash may hold the graph
        reference = ref(self)

        def add_gradients(gradients: Any) -> None:
            tracker = reference()
            if tracker is not None:
                tracker.take(Event(name, module_class, True, gradients, (), {}))

        try:
            self._gradients.watch(output, add_gradients)
        except Exception as error:
            self.lost += 1
            say_once(f"track: no gradients of {name!r}: {type(error).__name__}: {error}")

    def _add_parameter_gradient(
        self, name: str, module_class: type[nn.Module], parameter: Tensor
    ) -> None:
        self.take(Event(name, module_class, True, (parameter.grad,), (), {}))

    def on_compiled_tensors(
        self,
        place: _TrackHook,
        tensors: list[tuple[str, Tensor]],
        *,
        entering: bool,
        differentiable: bool,
    ) -> None:
        """Stash the outputs of a call inside a compiled graph."""
        if place.module_class is not None:
            value, recompute = join_tensors(tensors), torch_private.graph_task_id() != -1
            self.take(Event(place.title, place.module_class, False, value, (), {}, recompute))
        if differentiable and place.grad:
            say_once(
                "track: gradients inside compiled code are not tracked; "
                "run it eagerly with TORCHDYNAMO_DISABLE=1"
            )

    # -- reading

    def __repr__(self) -> str:
        handles = sum(1 + hook.grad for _, hook in self._hooks) + len(self._handles)
        return f"Tracker(stashes={len(self)}, tracking={handles})"

    def _repr_html_(self) -> str:
        rows = [stash.cells() for stash in self.stashes[:MAX_ROWS]]
        lines = [repr(self), "to_frame() has the statistics of each stash"]
        return notebook_html(lines, ("module", "type", "what", "value"), rows, count=len(self))

    def __iter__(self) -> Iterator[Stash]:
        return iter(self.stashes)

    @overload
    def __getitem__(self, index: int) -> Stash: ...
    @overload
    def __getitem__(self, index: slice) -> list[Stash]: ...
    def __getitem__(self, index: int | slice) -> Stash | list[Stash]:
        return self.stashes[index]

    def __len__(self) -> int:
        return len(self.stashes)

    def to_frame(
        self, stat: Statistics = torch.std, stat_name: str | None = None
    ) -> pandas.DataFrame:
        """Return a DataFrame with one row per stash: `name`, `type`, `grad` and statistics of its
        first value, None if that is not a tensor.

        A column `recompute` is added if a forward was recomputed. Raises ModuleNotFoundError
        without pandas.

        Args:
            stat: A function of a tensor, the name of a built-in statistic, a list of both, or a
                mapping from column names to both.
            stat_name: The column name of a single function, by default its `__name__`.
        """
        return frame_of_stashes(self.stashes, stat, stat_name)


class _TrackHook(ForwardHook):
    """Pass the calls of one module to a tracker."""

    def __init__(self, tracker: Tracker, title: str, grad: bool) -> None:
        self.tracker, self.title, self.grad = tracker, title, grad
        self.module_class: type[nn.Module] | None = None
        self._unique_name = unique_hook_name("track")
        self._number = compiled.site_tensor(self, tracker)

    def name(self) -> str:  # type: ignore[override]
        return self._unique_name

    def on_attach(self, module: nn.Module) -> None:
        self.module_class = type(module)

    def post_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if torch.compiler.is_compiling():
            compiled.observe_outputs(self._number, output)
        else:
            self._add_call(module, args, kwargs, output)

    def _add_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        module_class, recompute = type(module), torch_private.graph_task_id() != -1
        self.tracker.take(Event(self.title, module_class, False, output, args, kwargs, recompute))
        if self.grad and torch.is_grad_enabled():
            self.tracker.watch_gradients(self.title, module_class, output)


def _compile_pattern(pattern: NamePattern) -> re.Pattern[str] | None:
    return re.compile(pattern) if isinstance(pattern, str) else pattern


def track(
    module: nn.Module,
    grad: bool = True,
    include: NamePattern = None,
    exclude: NamePattern = None,
    stash_value: StashValueFn | None = None,
    stash: StashFn | None = None,
    *,
    parameters: bool = False,
) -> Tracker:
    """Track the outputs of `module` and its submodules, and their gradients, until the tracker's
    `with` ends. The interface is that of Graphcore's tensor_tracker.

    Args:
        grad: Whether to track gradients too.
        include: A pattern for names of modules to track (`re.search`). Every tensor is copied to
            the CPU, so choose few modules for a large model.
        exclude: A pattern for names of modules not to track.
        stash_value: What to keep of a tensor.
        stash: What to keep of an `Event`, in place of `stash_value`.
        parameters: Whether to track parameters too.

    Raises:
        ValueError: Both `stash_value` and `stash` are given.

    Examples:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> with track(model, stash_value=lambda tensor: tuple(tensor.shape)) as tracker:
        ...     _ = model(torch.ones(3, 2)).sum().backward()
        >>> [(stash.name, stash.grad, stash.value) for stash in tracker][:3]
        [('0', False, (3, 2)), ('1', False, (3, 2)), ('', False, (3, 2))]
    """
    tracker = Tracker(get_stash_fn(stash_value, stash))
    tracker.register_all(module, grad, include, exclude, parameters=parameters)
    return tracker


def to_frame(
    source: Tracker | str | Path, stat: Statistics = "std", stat_name: str | None = None
) -> pandas.DataFrame:
    """Return the DataFrame of a tracker (see `Tracker.to_frame`) or of a recording.

    For a recording: one row per record, with the columns `name`, `grad`, `recompute`, `tensor`,
    `step`, `call`, `loop`, `model` and the recorded statistics that `stat` names.

    Raises:
        RecordingError: The file is not a recording.
        ValueError: A statistic was not recorded, or `stat` holds a function.
        ModuleNotFoundError: pandas is not installed.
    """
    if isinstance(source, Tracker):
        return source.to_frame(stat, stat_name)
    return frame_of_recording(source, stat, stat_name)
