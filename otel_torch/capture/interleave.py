"""A body of plain Python beside a model's forward: read, replace and compare what passes its
modules, while it passes.

nnsight's tracer captures the source of a `with` block and runs it elsewhere, so that a block cannot
stand on one line, debuggers are lost in it, and a name is not what it seems. Here the body runs
where it stands, and the model in a thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn

from otel_torch import torch_private
from otel_torch.capture.cache import Cache
from otel_torch.capture.cache_dict import CacheDict
from otel_torch.capture.eager import eager
from otel_torch.capture.interleaved_run import InterleaveError, Run, current
from otel_torch.capture.names import find_name, no_module
from otel_torch.capture.structure import first_argument
from otel_torch.capture.thread_state import carried
from otel_torch.console import say_once
from otel_torch.gc_pause import uncollected
from otel_torch.sources.hooks import ForwardHook, ModuleHookManager, remove_hooks
from otel_torch.sources.module_names import first_names, named_modules

_numbers = itertools.count()
_OURS = frozenset({"output", "input", "inputs", "grad", "next"})


class Interleaver:
    """Runs a model beside bodies that look at it; see `interleave`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.result: Any = None
        self.hook_name = f"otel_torch.interleave.{next(_numbers)}"
        self._cache: list[Cache] = []
        self._users = 0
        self._lock = threading.Lock()
        self._hooked: list[nn.Module] = []
        self._asked: set[str] | None = None  # while a compiled body finds out what it needs
        self._only: frozenset[str] | None = None
        self._barriers: weakref.WeakSet[Barrier] = weakref.WeakSet()
        self._began = self._bodies = 0  # that run as functions: so far, and now
        self._awaited = 0  # how often somebody waits for the end of one
        self.changed = threading.Condition()  # guards these and what stands at barriers

    # -- running
    # ----------------------------------------------------------------------------------------------

    def invoke(self, *args: Any, **kwargs: Any) -> Invocation:
        """One call of the model on these arguments: `with it.invoke(x) as run:`."""
        return self.execute(self.model, *args, **kwargs)

    def execute(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Invocation:
        """One call of anything that calls the model (`model.generate`, a training step), likewise."""
        return Invocation(Run(self, function, args, kwargs), "")

    def compile(self, body: Callable[[Invocation], Any]) -> Callable[..., Any]:
        """A function of the model's arguments that runs `body(run)` beside it and returns what the
        body returns.

        Which modules the body asks for is found out in the first call; further ones hook only
        these.
        """
        only: frozenset[str] | None = None

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal only
            self._asked, self._only = set(), only
            try:
                with self.invoke(*args, **kwargs) as invocation:
                    found = body(invocation)
                only = frozenset(self._asked)
                return found
            finally:
                self._asked = self._only = None

        return run

    def cache(self, *args: Any, **kwargs: Any) -> CacheDict:
        """Keep what passes the model in the runs from here on, as the bodies have left it;
        arguments as of `Cache`.
        """
        cache = Cache(*args, **kwargs)
        self._cache.append(cache)
        if self._users:
            cache.attach(self.model)
        return cache.cache

    def barrier(self, count: int) -> Barrier:
        """A point that `count` bodies pass together: `barrier()` in each. For bodies that run by
        `Invocation.do`.
        """
        barrier = Barrier(self, count)
        self._barriers.add(barrier)
        return barrier

    # -- attaching
    # ----------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Attach what keeps, with the first run that is entered."""
        with self._lock, contextlib.ExitStack() as undo:
            if not self._users:
                for cache in self._cache:
                    undo.callback(cache.detach)
                    cache.attach(self.model)
            self._users += 1
            undo.pop_all()

    def hook(self) -> None:
        """Attach what tells the runs where their models are, with the first that asks: before its
        model has begun.
        """
        with self._lock, uncollected():
            if self._hooked:
                return
            for name, module in first_names(self.model):
                if self._only is None or name in self._only:
                    ModuleHookManager.get_from_or_default(module).append_forward_hook(
                        _InterleaveHook(self, name)
                    )
                    self._hooked.append(module)

    def leave(self) -> None:
        """Detach, with the last run that is left."""
        with self._lock:
            self._users -= 1
            if not self._users:
                remove_hooks(self._hooked, self.hook_name)
                self._hooked.clear()
                for cache in reversed(self._cache):
                    cache.detach()

    def note(self, name: str) -> None:
        """A body has asked for something of a module."""
        if self._asked is not None:
            self._asked.add(name)
            if self._only is not None and name not in self._only:
                self._only = None
                raise InterleaveError(
                    f"the compiled body asks for {name!r}, which it did not in its first call; ask for it there too"
                )

    def body_began(self) -> None:
        """Another body runs as a function."""
        with self.changed:
            self._began += 1
            self._bodies += 1

    def body_ended(self) -> None:
        """It has ended."""
        with self.changed:
            self._bodies -= 1
            self.release_stuck()

    @contextlib.contextmanager
    def awaiting(self) -> Iterator[None]:
        """Inside, somebody waits for a body to end, and starts no other."""
        with self.changed:
            self._awaited += 1
            self.release_stuck()
        try:
            yield
        finally:
            with self.changed:
                self._awaited -= 1

    def release_stuck(self) -> None:
        """Where all bodies stand at barriers and the rest waits for them, nobody is left to come;
        with `changed` held.
        """
        standing = [barrier.standing(True) for barrier in self._barriers]
        others = sum(barrier.standing(False) for barrier in self._barriers)
        if self._began and sum(standing) == self._bodies and (self._awaited or others):
            for barrier in self._barriers:
                barrier.give_up()


class Invocation:
    """A run, and one module of its model: children by attribute, name or index; what passes the
    module by

    `output`, `inputs` ((args, kwargs)), `input` (the first argument) and `grad` (the gradient of
    the first tensor of the output), of the module's current call. Reading waits for the model to
    come there, and may be repeated; assigning replaces it for the rest. `next()` goes on to the
    next call: of every module at the root, of one below. `result` is what the forward returned. A
    child named like one of these is reached by `run["encoder.layer.0.output"]`.

    Raises InterleaveError for a call that has passed or never comes, AttributeError and KeyError
    for no module, and what the model raises.
    """

    __slots__ = ("_name", "_run", "_thread", "_value")
    _run: Run
    _name: str

    def __init__(self, run: Run, name: str) -> None:
        for key, value in (("_run", run), ("_name", name), ("_thread", None), ("_value", None)):
            object.__setattr__(self, key, value)

    # -- a run
    # ----------------------------------------------------------------------------------------------

    def __enter__(self) -> Invocation:
        self._run.begin()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._run.end(exc)
        self._run.interleaver.result = self._run.returned

    @property
    def result(self) -> Any:
        """What the forward returned; it runs to its end for that."""
        return self._run.result

    def do(self, body: Callable[[Invocation], Any]) -> Invocation:
        """Run `body(run)` as a function in a thread of its own, beside other bodies; `wait` gives
        what it returns.
        """
        self._run.interleaver.body_began()

        def work() -> None:
            _here.is_body = True
            value: tuple[Any, BaseException | None]
            try:
                with self:
                    value = body(self), None
            except BaseException as error:
                value = None, error
            finally:
                self._run.interleaver.body_ended()
            object.__setattr__(self, "_value", value)

        thread = threading.Thread(target=carried(work), name="otel_torch body", daemon=True)
        object.__setattr__(self, "_thread", thread)
        thread.start()
        return self

    def wait(self) -> Any:
        """What a body that runs by `do` returns; raises what it raises."""
        if self._thread is None:
            raise InterleaveError("no body runs: give one to `do` first")
        with self._run.interleaver.awaiting():
            self._thread.join()
        value, error = self._value
        if error is not None:
            raise error
        return value

    # -- the tree
    # ----------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(error.args[0]) from None

    def __getitem__(self, key: str | int | slice) -> Any:
        model = self._run.interleaver.model
        if isinstance(key, str):
            found = find_name(model, self._name, key)
            if found is None:
                raise KeyError(no_module(model, self._name, key))
            return Invocation(self._run, found)
        entries = self._entries()
        if isinstance(key, slice):
            return [Invocation(self._run, name) for name in entries[key]]
        try:
            return Invocation(self._run, entries[key])
        except IndexError:
            raise IndexError(
                f"{self._name or 'the model'} has {len(entries)} entries, not one at {key}"
            ) from None

    def __iter__(self) -> Iterator[Invocation]:
        return (Invocation(self._run, name) for name in self._entries())

    def __len__(self) -> int:
        return len(self._entries())

    def _entries(self) -> list[str]:
        start = f"{self._name}." if self._name else ""
        names = (name for name, _ in named_modules(self._run.interleaver.model))
        entries = [
            name for name in names if name.startswith(start) and name[len(start) :].isdecimal()
        ]
        if not entries:
            raise TypeError(f"{self._name or 'the model'} is no list of modules")
        return entries

    def __repr__(self) -> str:
        return (
            f"<run of {type(self._run.interleaver.model).__name__}, at {self._name or 'the root'}>"
        )

    # -- what passes
    # ----------------------------------------------------------------------------------------------

    def next(self) -> Invocation:
        """Go on to the next call: from here on this module's (at the root: every module's) next
        call is meant.
        """
        if self._name:
            self._run.shifts[self._name] = self._run.shifts.get(self._name, 0) + 1
        else:
            self._run.iteration += 1
        return self

    @property
    def output(self) -> Any:
        """What the module returns."""
        return self._ask("output")

    @output.setter
    def output(self, value: Any) -> None:
        self._put("output", value)

    @property
    def inputs(self) -> Any:
        """`(args, kwargs)` of the call."""
        return self._ask("inputs")

    @inputs.setter
    def inputs(self, value: Any) -> None:
        args, kwargs = value
        self._put("inputs", (tuple(args), dict(kwargs)))

    @property
    def input(self) -> Any:
        """The first positional argument, else the first by keyword, else None."""
        args, kwargs = self._ask("inputs")
        return first_argument(args, kwargs)

    @input.setter
    def input(self, value: Any) -> None:
        args, kwargs = self._ask("inputs")
        if args:
            self._put("inputs", ((value, *args[1:]), kwargs))
        elif kwargs:
            self._put("inputs", (args, kwargs | {next(iter(kwargs)): value}))
        else:
            raise InterleaveError(f"{self._name or 'the model'} is called without arguments")

    @property
    def grad(self) -> Any:
        """The gradient of the first tensor of the output, once a backward pass has come there: one
        of an output that was asked for, or one that the model's own code makes (`execute` of a
        training step).
        """
        return self._ask("grad")

    @grad.setter
    def grad(self, value: Any) -> None:
        self._put("grad", value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _OURS - {"next"}:
            raise AttributeError(f"{name!r} cannot be assigned; output, input, inputs and grad can")
        object.__setattr__(self, name, value)

    def _ask(self, what: str) -> Any:
        self._warn(what)
        return self._run.ask(self._name, what, self._call())

    def _put(self, what: str, value: Any) -> None:
        self._warn(what)
        self._run.put(self._name, what, self._call(), value)

    def _call(self) -> int:
        self._run.interleaver.note(self._name)
        return self._run.iteration + self._run.shifts.get(self._name, 0)

    def _warn(self, what: str) -> None:
        full = f"{self._name}.{what}" if self._name else what
        if find_name(self._run.interleaver.model, "", full) is not None:
            say_once(
                f"{self._name or 'the model'} has a module called {what!r}; .{what} is its value, run[{full!r}] that module"
            )


class _Here(threading.local):
    is_body = False


_here = _Here()


class Barrier:
    """Where bodies wait for each other; reusable. Raises InterleaveError where nobody is left to
    come.
    """

    def __init__(self, interleaver: Interleaver, count: int) -> None:
        self._interleaver, self.count = interleaver, count
        self._meeting = _Meeting()

    def __call__(self) -> None:
        changed = self._interleaver.changed
        with changed:
            meeting = self._meeting
            meeting.there.append(_here.is_body)
            if len(meeting.there) == self.count:
                self._end(came_all=True)
            else:
                self._interleaver.release_stuck()
            changed.wait_for(lambda: meeting.came_all is not None)
        if not meeting.came_all:
            reached = len(meeting.there)
            raise InterleaveError(
                f"barrier({self.count}) was reached by {reached} bodies; the others have ended"
            )

    def standing(self, bodies: bool) -> int:
        """How many bodies, or others, wait here."""
        return self._meeting.there.count(bodies)

    def give_up(self) -> None:
        """Whoever waits here waits in vain."""
        if self._meeting.there:
            self._end(came_all=False)

    def _end(self, came_all: bool) -> None:
        self._meeting.came_all, self._meeting = came_all, _Meeting()
        self._interleaver.changed.notify_all()


@dataclasses.dataclass
class _Meeting:
    """One use of a barrier. there: who has come, True for a body; came_all: None while that is
    open.
    """

    there: list[bool] = dataclasses.field(default_factory=list)
    came_all: bool | None = None


class _InterleaveHook(ForwardHook):
    """Tells the run of this thread that its model is at a module."""

    intervenes = True

    def __init__(self, interleaver: Interleaver, title: str) -> None:
        self.interleaver, self.title = interleaver, title

    def name(self) -> str:  # type: ignore[override]
        """A module may be in the models of several interleavers."""
        return self.interleaver.hook_name

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        found: tuple[tuple[Any, ...], dict[str, Any]] = self._met("inputs", (args, kwargs))
        return found

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return self._met("output", output)

    def _met(self, what: str, value: Any) -> Any:
        # An exported program is the user's product. A compiled one runs `_meet` eagerly.
        if torch.compiler.is_compiling() and torch_private.is_exporting():
            return value
        return _meet(self.interleaver, self.title, what, value)


@eager
def _meet(interleaver: Interleaver, title: str, what: str, value: Any) -> Any:
    run = current()
    if run is None or run.interleaver is not interleaver:
        return value
    return run.meet(title, what, run.calls(title, what), value)


def interleave(model: nn.Module) -> Interleaver:
    """Look at a model's forward from a body of plain Python that runs beside it.

        it = interleave(model)
        with it.invoke(tokens) as run:
            hidden = run.transformer.h[0].output[0]      # the model runs up to here, and stands still
            run.transformer.h[1].mlp.output = 0 * run.transformer.h[1].mlp.output
            logits = run.result.logits                   # ... and to its end

    Of the two sides exactly one runs. Ask in the order of the forward. `with it.invoke(x) as a,
    it.invoke(y) as b:` interleaves two runs as the body asks. Nothing stays on the model
    afterwards, whatever raised.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> with interleave(model).invoke(torch.ones(1, 2)) as run:
    ...     run[0].output = torch.full((1, 2), -1.0)
    ...     zero = run[1].output
    >>> zero
    tensor([[0., 0.]])
    """
    return Interleaver(model)
