"""What passes the modules of a model, kept in a list: tensor_tracker's `track`, on the one way to
attach to a module.

tensor_tracker hooks a module's backward with a node of its own, which makes in-place successors
fail and sees no dicts; what its user's function raises reaches the forward. Here gradients are
asked of the tensors, and a function that fails is counted and said.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from otel_torch import torch_private
from otel_torch.capture.dataframe import Statistics, frame_of_recording, frame_of_stashes
from otel_torch.capture.structure import flat_value, replace_leaves, rmap_tensor
from otel_torch.console import say_once
from otel_torch.sources import compiled
from otel_torch.sources.hooks import ForwardHook, ModuleHookManager, remove_hook
from otel_torch.sources.module_names import first_names

if TYPE_CHECKING:
    import pandas


@dataclass
class Event:
    """Something passed a module. name: the module's, canonical. type: its class. value: what it
    returned; or, with `grad`, the tuple of the gradients of its outputs, None for one that was not
    used. args, kwargs: what it was called with, empty with `grad`. recompute: whether this is a
    checkpoint's second forward.
    """

    name: str
    type: type[nn.Module]
    grad: bool
    value: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    recompute: bool = False


@dataclass
class Stash:
    """What is kept of an event; the fields are the event's."""

    name: str
    type: type[nn.Module]
    grad: bool
    value: Any
    recompute: bool = False

    @property
    def first_value(self) -> Any:
        """The first element of the first element … of `value`, as long as that is a tuple or a list
        with any.
        """
        value = self.value
        while isinstance(value, (tuple, list)) and value:
            value = value[0]
        return value


StashFn = Callable[[Event], Stash]
StashValueFn = Callable[[Tensor], Any]
NamePattern = None | re.Pattern[str] | str


def default_stash_value(tensor: Tensor) -> Tensor:
    """A copy of the tensor on the CPU, without its graph."""
    return tensor.detach().cpu().clone()


def default_stash(event: Event, stash_value: StashValueFn) -> Stash:
    """The event with `stash_value(tensor)` in the place of every tensor of its value."""
    return Stash(
        event.name, event.type, event.grad, rmap_tensor(event.value, stash_value), event.recompute
    )


def get_stash_fn(stash_value: StashValueFn | None = None, stash: StashFn | None = None) -> StashFn:
    """`stash`, or the default one with `stash_value`. Raises ValueError where both are given."""
    if stash_value and stash:
        raise ValueError("give stash_value or stash, not both")
    return stash or partial(default_stash, stash_value=stash_value or default_stash_value)


class Tracker:
    """The stashes of everything that passed the registered modules, in order; a sequence of them.

    As a context manager it unregisters at the end. `lost` counts the events of which `stash`
    failed, which is also said once; nothing that it raises reaches the program. A backward pass
    that runs later still adds its gradients.
    """

    def __init__(self, stash: StashFn | None = None) -> None:
        self.stashes: list[Stash] = []
        self.lost = 0
        self._stash = stash or get_stash_fn()
        self._hooks: list[tuple[nn.Module, _TrackHook]] = []
        self._handles: list[Any] = []
        self._gradients: Any = (
            WeakIdKeyDictionary()
        )  # tensor -> (its version, who wants its gradient)
        self._unguard: Callable[[], None] = lambda: None

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.unregister()

    # -- registering
    # ----------------------------------------------------------------------------------------------

    def register(
        self, module: nn.Module, name: str = "", grad: bool = True, *, parameters: bool = False
    ) -> None:
        """Track one module under `name`; `grad`: its gradients too. `parameters`: those that it
        holds itself, as `<name>.<parameter>`: their values now, and with `grad` each gradient once
        it has been accumulated.
        """
        if not self._hooks:
            self._unguard = compiled.guard_hooks()
        hook = _TrackHook(self, name, grad)
        ModuleHookManager.get_from_or_default(module).append_forward_hook(hook)
        self._hooks.append((module, hook))
        if not parameters:
            return
        for key, parameter in module._parameters.items():
            if parameter is not None:
                full = f"{name}.{key}" if name else key
                self.take(Event(full, type(module), False, parameter, (), {}))
                if grad and parameter.requires_grad:
                    told = partial(self._accumulated, full, type(module))
                    self._handles.append(parameter.register_post_accumulate_grad_hook(told))  # type: ignore[no-untyped-call]

    def register_all(
        self,
        module: nn.Module,
        grad: bool = True,
        include: NamePattern = None,
        exclude: NamePattern = None,
        *,
        parameters: bool = False,
    ) -> None:
        """Track `module` and all below it whose names match `include` (`re.search`, None for all)
        and not `exclude`.

        Names are canonical, those of wrappers (`module.`, `_orig_mod.`) left out; a shared module
        is tracked once, by its first name. Where nothing matches, one line says so.
        """
        wanted, unwanted = (
            re.compile(one) if isinstance(one, str) else one for one in (include, exclude)
        )
        found = first_names(module)
        chosen = [
            (name, one)
            for name, one in found
            if (wanted is None or wanted.search(name))
            and not (unwanted is not None and unwanted.search(name))
        ]
        for name, one in chosen:
            self.register(one, name, grad, parameters=parameters)
        if not chosen:
            example = next((name for name, _ in found if name), "")
            say_once(
                f"no module of {type(module).__name__} is tracked ({len(found)} modules, for example {example!r})"
            )

    def unregister(self) -> None:
        """Remove every hook from the modules; what was stashed stays."""
        for module, hook in self._hooks:
            remove_hook(module, hook.name())
        for handle in self._handles:
            handle.remove()
        self._hooks.clear()
        self._handles.clear()
        self._unguard()
        self._unguard = lambda: None

    def clear(self) -> None:
        """Forget the stashes."""
        self.stashes.clear()

    # -- events
    # ----------------------------------------------------------------------------------------------

    def take(self, event: Event) -> None:
        """Stash an event. Never raises."""
        try:
            self.stashes.append(self._stash(event))
        except Exception as error:
            self.lost += 1
            say_once(
                f"track: stash failed for {event.name!r} and others may be missing: {type(error).__name__}: {error}"
            )

    def watch(self, output: Any, told: Callable[[Any], None]) -> None:
        """Call `told` with the gradients of `output`'s tensors once a backward pass has them, None
        for what it did not use: a tuple for a tensor or a tuple, as torch's own backward hooks have
        it; else as `output` is structured.
        """
        tensors: list[Tensor] = []

        def leave_a_place(tensor: Tensor) -> Any:
            if not tensor.requires_grad:
                return None
            tensors.append(tensor)
            return _Place(len(tensors) - 1)

        places = replace_leaves(output, Tensor, leave_a_place)
        if isinstance(output, Tensor):
            places = (places,)

        def arrived(gradients: Sequence[Tensor | None]) -> None:
            told(replace_leaves(places, _Place, lambda place: gradients[place.index]))

        if len(tensors) == 1:
            self._watch_one(tensors[0], arrived)
        elif tensors:
            torch.autograd.graph.register_multi_grad_hook(tensors, arrived)

    def _watch_one(self, tensor: Tensor, arrived: Callable[[Sequence[Tensor]], None]) -> None:
        # a module that returns what a module inside it returned has its gradient first
        version, waiting = self._gradients.get(tensor, (None, []))
        if version == tensor._version:
            waiting.insert(0, arrived)
            return
        waiting = [arrived]
        self._gradients[tensor] = tensor._version, waiting

        def fire(gradient: Tensor) -> None:
            for one in waiting:
                one([gradient])

        tensor.register_hook(fire)  # type: ignore[no-untyped-call]

    def _accumulated(self, name: str, kind: type[nn.Module], parameter: Tensor) -> None:
        self.take(Event(name, kind, True, (parameter.grad,), (), {}))

    def seen(
        self,
        place: _TrackHook,
        tensors: list[tuple[str, Tensor]],
        *,
        entering: bool,
        differentiable: bool,
    ) -> None:
        """A compiled program hands over what a module returned: a tensor, or a list of all tensors
        in it.
        """
        module = place.module
        if module is not None:
            self.take(
                Event(
                    place.title,
                    module,
                    False,
                    flat_value(tensors),
                    (),
                    {},
                    torch_private.graph_task_id() != -1,
                )
            )
        if differentiable and place.grad:
            say_once(
                "track: gradients inside compiled code are not seen; TORCHDYNAMO_DISABLE=1 runs it eagerly"
            )

    # -- reading
    # ----------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        handles = sum(1 + hook.grad for _, hook in self._hooks) + len(self._handles)
        return f"Tracker(stashes={len(self)}, tracking={handles})"

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
        """A row for each stash: `name`, `type`, `grad`, and statistics of its first value, None
        where that is no tensor.

        stat: a function of a tensor; the name of one of our statistics; or several, as a list of
        both or a mapping from column names. stat_name: the column of a single function, by default
        its `__name__`. Where a forward was recomputed there is a column `recompute` as well. Needs
        pandas: raises ModuleNotFoundError without.
        """
        return frame_of_stashes(self.stashes, stat, stat_name)


@dataclass(frozen=True)
class _Place:
    """Where a gradient belongs in a structured value."""

    index: int


_numbers = itertools.count()


class _TrackHook(ForwardHook):
    """Tells a tracker of the calls of one module."""

    def __init__(self, tracker: Tracker, title: str, grad: bool) -> None:
        self.tracker, self.title, self.grad = tracker, title, grad
        self.module: type[nn.Module] | None = None
        self._own_name = f"otel_torch.track.{next(_numbers)}"
        self._number = compiled.number(self, tracker)

    def name(self) -> str:  # type: ignore[override]
        """A module may be tracked by several trackers, or twice by one."""
        return self._own_name

    def on_attach(self, module: nn.Module) -> None:
        self.module = type(module)

    def post_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if torch.compiler.is_compiling():
            compiled.outputs(self._number, output)
        else:
            self._call(module, args, kwargs, output)

    def _call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        tracker, title, kind = self.tracker, self.title, type(module)
        tracker.take(
            Event(title, kind, False, output, args, kwargs, torch_private.graph_task_id() != -1)
        )
        if self.grad and torch.is_grad_enabled():
            # weak, for the graph holds the hook, and a stash may hold the graph
            reference = ref(tracker)

            def arrived(value: Any) -> None:
                if (here := reference()) is not None:
                    here.take(Event(title, kind, True, value, (), {}))

            try:
                tracker.watch(output, arrived)
            except Exception as error:
                tracker.lost += 1
                say_once(f"track: no gradients of {title!r}: {type(error).__name__}: {error}")


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
    """Track what `module` and the modules in it return, and its gradients, from now until the
    tracker's `with` ends.

    Every tensor is copied to the CPU, which takes memory: `include` and `exclude` choose modules by
    name (`re.search`), `stash_value` says what to keep of a tensor, `stash` what to keep of an
    `Event`; `parameters` tracks those too. Raises ValueError where both stash functions are given.
    Its model comes from Graphcore's tensor_tracker.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> with track(model, stash_value=lambda tensor: tuple(tensor.shape)) as tracker:
    ...     _ = model(torch.ones(3, 2)).sum().backward()
    >>> [(one.name, one.grad, one.value) for one in tracker][:3]
    [('0', False, (3, 2)), ('1', False, (3, 2)), ('', False, (3, 2))]
    """
    tracker = Tracker(get_stash_fn(stash_value, stash))
    tracker.register_all(module, grad, include, exclude, parameters=parameters)
    return tracker


def to_frame(
    source: Tracker | str | Path, stat: Statistics = "std", stat_name: str | None = None
) -> pandas.DataFrame:
    """What `Tracker.to_frame` makes, of a tracker or of a recording.

    Of a recording: a row for each record; the columns `name`, `grad`, `recompute`, `tensor`,
    `step`, `call`, `loop`, `model` and the statistics named by `stat`, which must have been
    recorded. Raises RecordingError for a file that is none, ValueError for a statistic that is not
    in it or no name, ModuleNotFoundError without pandas.
    """
    if isinstance(source, Tracker):
        return source.to_frame(stat, stat_name)
    return frame_of_recording(source, stat, stat_name)
