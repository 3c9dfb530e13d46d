"""One forward beside one body: the model runs in a thread of its own, and only while the body waits
for something of it.

So there is no race, no source code that is captured and no Python that is rewritten: of the two,
one stands still.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from otel_torch import session
from otel_torch.capture.names import title
from otel_torch.capture.structure import rmap_tensor
from otel_torch.capture.thread_state import carried
from otel_torch.records import Scope

if TYPE_CHECKING:
    from otel_torch.capture.interleave import Interleaver


class InterleaveError(RuntimeError):
    """A body asked for what has already passed, or never comes."""


class _Abandoned(BaseException):
    """Ends a forward whose body has raised. No `except Exception` of a model stops it."""


_Event = tuple[str, str, int]  # module, what of it, which of its calls
_END: _Event = ("", "result", 0)


class _Current(threading.local):
    run: Run | None = None


_current = _Current()


def current() -> Run | None:
    """The run whose forward this thread is in."""
    return _current.run


class Run:
    """One call of a model, or of anything that calls it, and what a body asks of it; made by
    `Interleaver.invoke`.

    Turns are handed over by two semaphores, so that exactly one side runs: the model from a request
    of the body until the event that was asked for, which it holds until the next. The first request
    makes the model's thread; a body that ends without one needs none, and no hook either.
    """

    def __init__(
        self, interleaver: Interleaver, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> None:
        self.interleaver = interleaver
        self.iteration = 0
        self.shifts: dict[str, int] = {}  # of modules that were moved on by themselves
        self._function, self._args, self._kwargs = function, args, kwargs
        self._model_may, self._body_may = threading.Semaphore(0), threading.Semaphore(0)
        self._forward: Callable[[], None] | None = (
            None  # to be called in any thread; it holds this run
        )
        self._thread: threading.Thread | None = None
        self._wanted: _Event | None = None
        self._held: _Event | None = None  # where the model stands
        self._going_on: Any = None  # ... and with what it goes on from there
        self._seen: dict[_Event, Any] = {}
        self._passed: dict[tuple[str, str], int] = {}
        self._kept: frozenset[_Event] = frozenset()
        self._gradients: dict[_Event, Any] = {}  # what is to be put in the place of a gradient
        self._error: BaseException | None = None
        self._entered = self._ended = self._abandoned = self._free = self._models_turn = False
        self._result: Any = None
        self._scope: Scope | None = None

    # -- the body's side
    # ----------------------------------------------------------------------------------------------

    def __enter__(self) -> Run:
        self.begin()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end(exc)

    def begin(self) -> None:
        """Keep what the forward is to find in its thread; it stands still until something is asked
        for.
        """
        if self._entered:
            raise InterleaveError("a run is entered once; invoke again for another")
        self.interleaver.enter()
        self._entered = True
        self._open_span()
        self._forward = carried(self._run)

    def ask(self, module: str, what: str, call: int) -> Any:
        """The value of an event; the model runs until it comes. Raises InterleaveError where it has
        passed or never comes, and what the model raises.
        """
        event = module, what, call
        if event in self._seen:
            return self._seen[event]
        if self.calls(module, what) > call:
            raise InterleaveError(self._too_late(event))
        self._go_on(event)
        if event not in self._seen:
            raise InterleaveError(self._never(event))
        return self._seen[event]

    def put(self, module: str, what: str, call: int, value: Any) -> None:
        """Replace the value of an event for the rest of the forward, or of the backward pass.
        Raises as `ask` does.
        """
        event = module, what, call
        if what == "grad":
            self.ask(
                module, "output", call
            )  # the model stands there, or has been there with the body
            self._gradients[event] = value
            return
        if self._held != event:
            if event in self._seen or self.calls(module, what) > call:
                raise InterleaveError(self._too_late(event))
            self.ask(*event)
        self._seen[event] = self._going_on = value

    def keep(self, events: Iterable[tuple[str, str, int]]) -> None:
        """Copy these when the model passes them, so that they may be asked for later; `forget` each
        in time.
        """
        self._kept = frozenset(events)

    def forget(self, module: str, what: str, call: int) -> None:
        """Let go of the value of an event."""
        self._seen.pop((module, what, call), None)

    @property
    def result(self) -> Any:
        """What the forward returned; the model runs to its end. Raises what the model raises."""
        if not self._ended:
            self._go_on(_END)
        if self._error is not None:
            raise self._error
        return self._result

    @property
    def returned(self) -> Any:
        """What the forward has returned, None where it has not."""
        return self._result

    def end(self, error: BaseException | None) -> None:
        """Leave the body: the forward finishes; or, where the body has raised, it is abandoned."""
        already = self._error
        if error is not None:
            self._abandoned = True
        self._free = True
        if self._thread is not None:
            if not self._ended:
                self._models_turn = True
                self._model_may.release()
            self._thread.join()
        elif self._forward is not None and not self._abandoned:
            self._forward()
        self._forward = None
        self._seen.clear()
        self._gradients.clear()
        self.interleaver.leave()
        self._close_span(error or self._error)
        if error is None and self._error is not None and already is None:
            raise self._error

    def _go_on(self, event: _Event) -> None:
        if not self._entered or self._free:
            raise InterleaveError("nothing can be asked of a run outside its `with`")
        if not self._ended:
            began = time.time_ns()
            self._wanted, self._models_turn = event, True
            if self._thread is None:
                self.interleaver.hook()
                self._thread = threading.Thread(
                    target=self._forward, name="otel_torch interleave", daemon=True
                )
                self._thread.start()
            else:
                self._model_may.release()
            self._body_may.acquire()
            self._note(began, event)
        if self._error is not None:
            raise self._error

    # -- the model's side
    # ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        outer, _current.run = _current.run, self
        try:
            self._result = self._function(*self._args, **self._kwargs)
        except _Abandoned:
            pass
        except BaseException as error:
            self._error = error
        finally:
            _current.run = outer
            self._args = self._kwargs = None
            self._ended, self._held, self._models_turn = True, None, False
            self._body_may.release()

    def meet(self, module: str, what: str, call: int, value: Any) -> Any:
        """The model comes to an event; the value with which it goes on."""
        event = module, what, call
        if what != "grad":
            self._passed[module, what] = call + 1
        if self._abandoned:
            raise _Abandoned
        if event in self._kept:
            self._seen[event] = rmap_tensor(value, lambda tensor: tensor.detach().clone())
        if self._wanted == event and not self._free:
            self._seen[event] = self._going_on = value
            self._held, self._models_turn = event, False
            self._body_may.release()
            self._model_may.acquire()
            if self._abandoned:
                raise _Abandoned
            value, self._going_on, self._held = self._going_on, None, None
        if what == "output" and (event in self._seen or self._wanted == (module, "grad", call)):
            self._watch_gradient(module, call, value)
        return value

    def gradient(self, event: _Event, gradient: Tensor) -> Tensor | None:
        """A gradient has come to an event; what goes on in its place, None for itself."""
        # unless the body itself called backward
        found = self.meet(*event, gradient) if self._models_turn else gradient
        self._seen[event] = found = self._gradients.get(event, found)
        return None if found is gradient else found

    def calls(self, module: str, what: str) -> int:
        """How often the model has come to these events."""
        return self._passed.get((module, what), 0)

    def _watch_gradient(self, module: str, call: int, value: Any) -> None:
        event = module, "grad", call
        tensors: list[Tensor] = []
        rmap_tensor(value, tensors.append)
        first = next((tensor for tensor in tensors if tensor.requires_grad), None)
        if first is not None:
            # weak, for the graph holds the hook, and a result that somebody keeps holds the graph
            run = weakref.ref(self)

            def arrived(gradient: Tensor) -> Tensor | None:
                here = run()
                return None if here is None else here.gradient(event, gradient)

            first.register_hook(arrived)  # type: ignore[no-untyped-call]

    # -- words
    # ----------------------------------------------------------------------------------------------

    def _too_late(self, event: _Event) -> str:
        module, what, call = event
        stands = (
            f"the model stands at {title(self._held[0])}.{self._held[1]}"
            if self._held
            else "the model is beyond it"
        )
        return f"{title(module)}.{what} of call {call} has already passed ({stands}); ask in the order of the forward"

    def _never(self, event: _Event) -> str:
        module, what, call = event
        if what == "grad":
            return f"no gradient came to {title(module)}: call backward() first, on a result that it is part of"
        count = self.calls(module, what)
        return f"{title(module)}.{what} of call {call} never came: the forward has ended, and called it {count} times"

    # -- telling
    # ----------------------------------------------------------------------------------------------

    def _open_span(self) -> None:
        running = session.current()
        if running is not None:
            name = (
                type(self._function).__name__
                if isinstance(self._function, nn.Module)
                else self._function.__name__
            )
            self._scope = Scope(
                "stage", "torch.interleave", lexical=False, attributes={"torch.model": name}
            )
            running.recorder.open(self._scope)

    def _note(self, began: int, event: _Event) -> None:
        if self._scope is not None:
            seconds = (time.time_ns() - began) / 1e9
            attributes = {
                "torch.module": event[0],
                "torch.interleave.asked": event[1],
                "torch.interleave.waited": seconds,
            }
            self._scope.events.append((began, "torch.interleave.wait", attributes))

    def _close_span(self, error: BaseException | None) -> None:
        running = session.current()
        if running is not None and self._scope is not None:
            running.recorder.close(self._scope, error)
