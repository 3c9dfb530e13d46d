"""The object that a body works with: a run, and by attribute, name or index the modules of its
model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from otel_torch.capture.interleaving.interleave_error import InterleaveError
from otel_torch.capture.interleaving.interleaved_run import InterleavedRun
from otel_torch.capture.interleaving.thread_state import bind_thread_state
from otel_torch.capture.module_paths import describe_missing_module, find_module_name
from otel_torch.capture.tensor_structure import first_argument
from otel_torch.process.console import say_once
from otel_torch.sources.modules.module_names import named_modules

_ASSIGNABLE = frozenset({"output", "input", "inputs", "grad"})


class Invocation:
    """One module of the model in a run; the root is the run itself.

    Submodules are reached by attribute, name or index. `output`, `inputs` (`(args, kwargs)`),
    `input` (the first argument) and `grad` (the gradient of the first tensor of the output) belong
    to the module's current call: reading one runs the forward up to it, assigning replaces it for
    the rest. `next()` moves to the next call, of all modules at the root or of one below it.
    `result` is the forward's return value. A submodule that has one of these names is reached as
    `run["encoder.layer.0.output"]`.

    Raises:
        InterleaveError: The call has passed or never comes.
        AttributeError, KeyError: No such module.
        Exception: Whatever the model raises.
    """

    __slots__ = ("_name", "_outcome", "_run", "_thread")
    _run: InterleavedRun
    _name: str
    _thread: threading.Thread | None
    _outcome: tuple[Any, BaseException | None]

    def __init__(self, run: InterleavedRun, name: str) -> None:
        # past __setattr__, which assigns to the model
        object.__setattr__(self, "_run", run)
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_thread", None)

    # -- the run

    def __enter__(self) -> Invocation:
        self._run.begin()
        return self

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        self._run.end(exc)
        self._run.shared.last_result = self._run.result_so_far

    @property
    def result(self) -> Any:
        """The forward's return value. Reading it runs the forward to its end."""
        return self._run.result

    def do(self, body: Callable[[Invocation], Any]) -> Invocation:
        """Run `body(run)` in a new thread, concurrently with other bodies; `wait` returns its
        result.
        """
        bodies = self._run.shared.bodies
        bodies.start()

        def run_body() -> None:
            bodies.mark_thread()
            outcome: tuple[Any, BaseException | None]
            try:
                with self:
                    outcome = body(self), None
            except BaseException as error:
                outcome = None, error
            finally:
                bodies.finish()
            object.__setattr__(self, "_outcome", outcome)

        thread = threading.Thread(
            target=bind_thread_state(run_body), name="otel_torch body", daemon=True
        )
        object.__setattr__(self, "_thread", thread)
        thread.start()
        return self

    def wait(self) -> Any:
        """Return what the body that `do` started returns. Raises what it raises."""
        if self._thread is None:
            raise InterleaveError("no body is running: give one to `do` first")
        with self._run.shared.bodies.waiting():
            self._thread.join()
        result, error = self._outcome
        if error is not None:
            raise error
        return result

    # -- the tree

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(error.args[0]) from None

    def __getitem__(self, key: str | int | slice) -> Any:
        model = self._run.shared.model
        if isinstance(key, str):
            name = find_module_name(model, self._name, key)
            if name is None:
                raise KeyError(describe_missing_module(model, self._name, key))
            return Invocation(self._run, name)
        entries = self._entries()
        if isinstance(key, slice):
            return [Invocation(self._run, name) for name in entries[key]]
        try:
            return Invocation(self._run, entries[key])
        except IndexError:
            raise IndexError(
                f"{self._label} has {len(entries)} entries, none at index {key}"
            ) from None

    def __iter__(self) -> Iterator[Invocation]:
        return (Invocation(self._run, name) for name in self._entries())

    def __len__(self) -> int:
        return len(self._entries())

    def _entries(self) -> list[str]:
        prefix = f"{self._name}." if self._name else ""
        entries = [
            name
            for name, _ in named_modules(self._run.shared.model)
            if name.startswith(prefix) and name.removeprefix(prefix).isdecimal()
        ]
        if not entries:
            raise TypeError(f"{self._label} is not a list of modules")
        return entries

    @property
    def _label(self) -> str:
        return self._name or "the model"

    def __repr__(self) -> str:
        model = type(self._run.shared.model).__name__
        return f"<run of {model}, at {self._name or 'the root'}>"

    # -- the values of a module's call

    def next(self) -> Invocation:
        """Move to the next call, of this module only or, at the root, of all modules."""
        if self._name:
            self._run.shifts[self._name] = self._run.shifts.get(self._name, 0) + 1
        else:
            self._run.iteration += 1
        return self

    @property
    def output(self) -> Any:
        """The module's return value."""
        return self._ask("output")

    @output.setter
    def output(self, value: Any) -> None:
        self._put("output", value)

    @property
    def inputs(self) -> Any:
        """The `(args, kwargs)` of the call."""
        return self._ask("inputs")

    @inputs.setter
    def inputs(self, value: Any) -> None:
        args, kwargs = value
        self._put("inputs", (tuple(args), dict(kwargs)))

    @property
    def input(self) -> Any:
        """The first positional argument, else the first keyword argument, or None."""
        args, kwargs = self._ask("inputs")
        return first_argument(args, kwargs)

    @input.setter
    def input(self, value: Any) -> None:
        args, kwargs = self._ask("inputs")
        if args:
            self._put("inputs", ((value, *args[1:]), kwargs))
        elif kwargs:
            first_key = next(iter(kwargs))
            self._put("inputs", (args, kwargs | {first_key: value}))
        else:
            raise InterleaveError(f"{self._label} is called without arguments")

    @property
    def grad(self) -> Any:
        """The gradient of the first tensor of the output, after a backward pass.

        The output must have been asked for before, unless the backward pass is part of the run
        (`execute` of a training step).
        """
        return self._ask("grad")

    @grad.setter
    def grad(self, value: Any) -> None:
        self._put("grad", value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _ASSIGNABLE:
            raise AttributeError(f"{name!r} cannot be assigned; output, input, inputs and grad can")
        object.__setattr__(self, name, value)

    def _ask(self, field: str) -> Any:
        self._warn_of_submodule(field)
        return self._run.ask(self._name, field, self._call())

    def _put(self, field: str, value: Any) -> None:
        self._warn_of_submodule(field)
        self._run.put(self._name, field, self._call(), value)

    def _call(self) -> int:
        self._run.shared.add_request(self._name)
        return self._run.iteration + self._run.shifts.get(self._name, 0)

    def _warn_of_submodule(self, field: str) -> None:
        path = f"{self._name}.{field}" if self._name else field
        if find_module_name(self._run.shared.model, "", path) is not None:
            say_once(
                f"interleave: {self._label} has a module called {field!r}; "
                f".{field} is its value, run[{path!r}] that module"
            )
