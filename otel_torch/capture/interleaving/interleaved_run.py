"""Run a model's forward and a body in turns: of the two threads, exactly one runs at any time.

So there are no races, and neither source code is captured nor Python rewritten. For a model with
the submodules `a` and `b`, and this body:

    with interleave(model).invoke(x) as run:
        hidden = run.a.output
        run.b.output = 2 * hidden

| the body's thread                   | the model's thread                         |
|-------------------------------------|--------------------------------------------|
| enters `with`                       | does not exist yet                         |
| asks for `a.output`, waits          | starts, runs until `a` returns             |
| gets the output, multiplies it      | waits inside `a`'s hook                    |
| assigns `b.output`: waits           | runs until `b` returns                     |
| puts its value in place of `b`'s    | waits inside `b`'s hook                    |
| leaves `with`: waits                | continues with the new value to its end    |
"""

from __future__ import annotations

import enum
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from otel_torch import session
from otel_torch.capture.interleaving.interleave_error import InterleaveError
from otel_torch.capture.interleaving.interleaved_model import InterleavedModel, current_run
from otel_torch.capture.interleaving.thread_state import bind_thread_state
from otel_torch.capture.module_paths import with_root
from otel_torch.capture.tensor_structure import rmap_tensor
from otel_torch.records import Scope


class _Abandoned(BaseException):
    """End a forward whose body has raised. A model's `except Exception` does not catch it."""


_Event = tuple[str, str, int]  # module; "inputs", "output" or "grad"; index of the call
_END: _Event = ("", "result", 0)


class _State(enum.Enum):
    NEW = "the run has not been entered"
    BODY_TURN = "the body runs; the forward waits or has not started"
    MODEL_TURN = "the forward runs up to the event that the body waits for"
    FORWARD_DONE = "the forward has ended; the body still runs"
    FINISHING = "the body has ended; the forward runs to its end"
    ABANDONED = "the body has raised; the forward ends at its next event"
    CLOSED = "both have ended"


_OUTSIDE_BODY = (_State.NEW, _State.FINISHING, _State.ABANDONED, _State.CLOSED)
_MODEL_RUNS = (_State.MODEL_TURN, _State.FINISHING, _State.ABANDONED)


class InterleavedRun:
    """One call of a model, or of a function that calls it, together with its body.

    Two semaphores pass the turn. The model's thread starts with the first request; without one, the
    forward runs in the body's thread at the end and needs no hooks.
    """

    def __init__(
        self, shared: InterleavedModel, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> None:
        self.shared = shared
        self.iteration = 0
        self.shifts: dict[str, int] = {}  # calls that single modules are ahead of `iteration`
        self._function, self._args, self._kwargs = function, args, kwargs
        self._state = _State.NEW
        self._model_turn, self._body_turn = threading.Semaphore(0), threading.Semaphore(0)
        self._forward: Callable[[], None] | None = None  # callable in any thread; refers to self
        self._thread: threading.Thread | None = None
        self._wanted: _Event | None = None  # the event that the body waits for
        self._current: _Event | None = None  # the event at which the forward waits
        self._current_value: Any = None  # the value with which it will continue
        self._values: dict[_Event, Any] = {}
        self._counts: dict[tuple[str, str], int] = {}
        self._retained: frozenset[_Event] = frozenset()
        self._new_gradients: dict[_Event, Any] = {}
        self._error: BaseException | None = None
        self._result: Any = None
        self._scope: Scope | None = None

    # -- called by the body

    def __enter__(self) -> InterleavedRun:
        self.begin()
        return self

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        self.end(exc)

    def begin(self) -> None:
        """Enter the run. The forward starts with the first request, in the state of this thread."""
        if self._state is not _State.NEW:
            raise InterleaveError("a run is entered once; call invoke again for another run")
        self.shared.enter_run()
        self._state = _State.BODY_TURN
        self._open_span()
        self._forward = bind_thread_state(self._run)

    def ask(self, module: str, field: str, call: int) -> Any:
        """Return the value of an event, running the forward up to it if necessary.

        Raises InterleaveError if it has passed or never comes, and what the model raises.
        """
        event = module, field, call
        if event in self._values:
            return self._values[event]
        if self.count(module, field) > call:
            raise InterleaveError(self._describe_passed(event))
        self._run_model_until(event)
        if event not in self._values:
            raise InterleaveError(self._describe_never_reached(event))
        return self._values[event]

    def put(self, module: str, field: str, call: int, value: Any) -> None:
        """Replace the value of an event for the rest of the forward, or of the backward pass.
        Raises as `ask` does.
        """
        event = module, field, call
        if field == "grad":
            self.ask(module, "output", call)  # so that the gradient of this output is watched
            self._new_gradients[event] = value
            return
        if self._current != event:
            if event in self._values or self.count(module, field) > call:
                raise InterleaveError(self._describe_passed(event))
            self.ask(*event)
        self._values[event] = self._current_value = value

    def retain(self, events: Iterable[tuple[str, str, int]]) -> None:
        """Copy the values of these events as the forward passes them, so that they can be asked for
        later. Call `forget` for each afterwards.
        """
        self._retained = frozenset(events)

    def forget(self, module: str, field: str, call: int) -> None:
        """Release the value of an event."""
        self._values.pop((module, field, call), None)

    @property
    def result(self) -> Any:
        """The forward's return value, running it to its end. Raises what the model raises."""
        if self._state not in (_State.FORWARD_DONE, _State.CLOSED):
            self._run_model_until(_END)
        if self._error is not None:
            raise self._error
        return self._result

    @property
    def result_so_far(self) -> Any:
        """The forward's return value, or None if it has not returned."""
        return self._result

    def end(self, error: BaseException | None) -> None:
        """Leave the body: let the forward finish, or abandon it if the body has raised `error`."""
        earlier_error = self._error
        forward_done = self._state is _State.FORWARD_DONE
        if not forward_done:
            self._state = _State.FINISHING if error is None else _State.ABANDONED
        if self._thread is not None:
            if not forward_done:
                self._model_turn.release()
            self._thread.join()
        elif self._forward is not None and error is None:
            self._forward()
        self._state = _State.CLOSED
        self._forward = None
        self._values.clear()
        self._new_gradients.clear()
        self.shared.leave_run()
        self._close_span(error or self._error)
        # an error of the forward that the body has not seen yet
        if error is None and self._error is not None and earlier_error is None:
            raise self._error

    def _run_model_until(self, event: _Event) -> None:
        if self._state in _OUTSIDE_BODY:
            raise InterleaveError("a run can be asked only inside its `with`")
        if self._state is not _State.FORWARD_DONE:
            start_ns = time.time_ns()
            self._wanted, self._state = event, _State.MODEL_TURN
            if self._thread is None:
                self.shared.attach_hooks()
                self._thread = threading.Thread(
                    target=self._forward, name="otel_torch interleave", daemon=True
                )
                self._thread.start()
            else:
                self._model_turn.release()
            self._body_turn.acquire()
            self._add_wait_event(start_ns, event)
        if self._error is not None:
            raise self._error

    # -- called by the forward

    def _run(self) -> None:
        outer_run, current_run.run = current_run.run, self
        try:
            self._result = self._function(*self._args, **self._kwargs)
        except _Abandoned:
            pass
        except BaseException as error:
            self._error = error
        finally:
            current_run.run = outer_run
            self._args = self._kwargs = self._current = None
            if self._state is _State.MODEL_TURN:
                self._state = _State.FORWARD_DONE
            self._body_turn.release()

    def on_event(self, module: str, field: str, call: int, value: Any) -> Any:
        """Handle an event of the forward: pause if the body waits for it. Return the value with
        which the forward continues.
        """
        event = module, field, call
        if field != "grad":
            self._counts[module, field] = call + 1
        if self._state is _State.ABANDONED:
            raise _Abandoned
        if event in self._retained:
            self._values[event] = rmap_tensor(value, lambda tensor: tensor.detach().clone())
        if self._wanted == event and self._state is _State.MODEL_TURN:
            value = self._pause(event, value)
        if field == "output":
            gradient_wanted = self._wanted == (module, "grad", call)
            if event in self._values or gradient_wanted:
                self._watch_gradient(module, call, value)
        return value

    def _pause(self, event: _Event, value: Any) -> Any:
        """Give the turn to the body until it passes it back; return the value that it assigned."""
        self._values[event] = self._current_value = value
        self._current, self._state = event, _State.BODY_TURN
        self._body_turn.release()
        self._model_turn.acquire()
        if self._is_abandoned():
            raise _Abandoned
        value, self._current_value, self._current = self._current_value, None, None
        return value

    def _is_abandoned(self) -> bool:
        return self._state is _State.ABANDONED

    def _on_gradient(self, event: _Event, gradient: Tensor) -> Tensor | None:
        """Handle a gradient; return its replacement, or None to keep it."""
        # if it is the body that called backward, there is no forward to pause
        model_runs = self._state in _MODEL_RUNS
        value = self.on_event(*event, gradient) if model_runs else gradient
        self._values[event] = value = self._new_gradients.get(event, value)
        return None if value is gradient else value

    def count(self, module: str, field: str) -> int:
        """Return how many of these events the forward has passed."""
        return self._counts.get((module, field), 0)

    def _watch_gradient(self, module: str, call: int, value: Any) -> None:
        event = module, "grad", call
        tensors: list[Tensor] = []
        rmap_tensor(value, tensors.append)
        first = next((tensor for tensor in tensors if tensor.requires_grad), None)
        if first is None:
            return
        # weak: the graph holds the hook, and a result that the caller keeps holds the graph
        reference = weakref.ref(self)

        def on_gradient(gradient: Tensor) -> Tensor | None:
            run = reference()
            return None if run is None else run._on_gradient(event, gradient)

        first.register_hook(on_gradient)  # type: ignore[no-untyped-call]

    # -- messages

    def _describe_passed(self, event: _Event) -> str:
        module, field, call = event
        position = "the forward is past it"
        if self._current is not None:
            position = f"the forward waits at {with_root(self._current[0])}.{self._current[1]}"
        return (
            f"{with_root(module)}.{field} of call {call} has already passed ({position}); "
            "ask in the order of the forward"
        )

    def _describe_never_reached(self, event: _Event) -> str:
        module, field, call = event
        name = with_root(module)
        if field == "grad":
            return (
                f"no gradient came to {name}: call backward() first, on a result that depends on it"
            )
        count = self.count(module, field)
        return (
            f"{name}.{field} of call {call} never came: the forward has ended after {count} calls"
        )

    # -- the span of the run

    def _open_span(self) -> None:
        running = session.current()
        if running is None:
            return
        function = self._function
        is_module = isinstance(function, nn.Module)
        name = type(function).__name__ if is_module else function.__name__
        attributes = {"torch.model": name}
        self._scope = Scope("stage", "torch.interleave", lexical=False, attributes=attributes)
        running.recorder.open(self._scope)

    def _add_wait_event(self, start_ns: int, event: _Event) -> None:
        if self._scope is not None:
            attributes = {
                "torch.module": event[0],
                "torch.interleave.asked": event[1],
                "torch.interleave.waited": (time.time_ns() - start_ns) / 1e9,
            }
            self._scope.events.append((start_ns, "torch.interleave.wait", attributes))

    def _close_span(self, error: BaseException | None) -> None:
        running = session.current()
        if running is not None and self._scope is not None:
            running.recorder.close(self._scope, error)
