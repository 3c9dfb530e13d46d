"""From the environment to a running session: the only place that wires sources to sinks.
Idempotent.
"""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import importlib
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from otel_torch import at_fork, session
from otel_torch.at_fork import ForkOrder
from otel_torch.console import say, say_once
from otel_torch.job import name_run, this_job
from otel_torch.recorder import Recorder, Sink
from otel_torch.records import Losses
from otel_torch.settings import Settings, Unusable, misspelt
from otel_torch.startup.import_hooks import after_import

# frameworks with something special about them: each file's HOOKS say after which import it is
# applied
FRAMEWORKS = ("diffusers", "fastvideo")
# what the end of the program may take longer because of us, whatever a collector does
EXIT_S = 1.8
# ... and what SIGTERM may, where the device hangs: less than what launchers wait before they kill
SIGTERM_S = 5.0

_running: _Running | None = None
_starting = False  # to start may be what imports torch, and that is when an enabled process starts
_lock = threading.RLock()
_at_exit_registered = False


def start_from_env() -> bool:
    """Start as the environment says; called once torch is imported. True when a session runs."""
    try:
        settings = Settings.from_env(problem=say_once)
        for line in misspelt(os.environ) if settings.enabled else ():
            say_once(line)
    except Unusable as error:
        say(f"{error}. Nothing is recorded")
        return False
    return settings.enabled and _start(settings)


def start(**settings: str) -> bool:
    """Start recording in this process, whatever OTEL_TORCH_ENABLED says.

    settings: as the environment variables, by their names without prefix and in lower case, as
    strings; they win over the environment: `otel_torch.start(modules=r"^blocks\\.0$",
    jsonl="run.jsonl")`. True when a session runs, False when a selection is unusable (one line says
    why). Does nothing where one runs already. Raises TypeError for an unknown setting.
    """
    overrides = {}
    known = Settings.__dataclass_fields__
    for name, value in settings.items():
        if name not in known:
            raise TypeError(f"start() knows no setting {name!r}; it takes {', '.join(known)}")
        overrides[known[name].metadata["name"]] = str(value)
    try:
        return _start(Settings.from_env(os.environ | overrides, say_once), overrides)
    except Unusable as error:
        say(f"{error}. Nothing is recorded")
        return False


def flush() -> None:
    """Read and hand on everything seen so far, without ending the step that is going on."""
    if _running is not None:
        _running.clock.settle()
        _running.session.recorder.flush(_running.clock.step_scope)


def stop() -> None:
    """End the session: every hook and watcher is removed, everything recorded goes out, losses are
    said. A second call does nothing, one from another thread waits for the first.
    """
    global _running
    with _lock:
        running, _running = _running, None
        if running is not None:
            running.stop()


def _start(settings: Settings, overrides: dict[str, str] | None = None) -> bool:
    global _running, _starting, _at_exit_registered
    with _lock:
        if _running is not None or _starting:
            return True
        overrides = overrides or {}
        run_id = name_run(os.environ | overrides)
        os.environ.setdefault("OTEL_TORCH_RUN_ID", run_id)
        _starting = True
        try:
            _running = _Running(settings, overrides | {"OTEL_TORCH_RUN_ID": run_id})
        except Exception as error:
            say(f"could not start, nothing is recorded: {type(error).__name__}: {error}")
            return False
        finally:
            _starting = False
        if not _at_exit_registered:
            _at_exit_registered = True
            atexit.register(stop)
            _stop_in_multiprocessing()
            at_fork.register(ForkOrder.SESSION, in_child=_after_fork)
        return True


class _Running:
    """What one session consists of, put together; stopped in the mirror image of its start."""

    def __init__(self, settings: Settings, overrides: dict[str, str]) -> None:
        # sources know torch, and torch may be what is being imported: only from here on may they be
        # loaded
        from otel_torch.regions import profiler, record_function
        from otel_torch.sources import steps
        from otel_torch.sources.activations import Activations
        from otel_torch.sources.inventory import Inventory
        from otel_torch.sources.modules import Registry
        from otel_torch.sources.noise import Jitter
        from otel_torch.sources.training import Training

        if settings.isolate is not None and settings.budget is not None:
            say("OTEL_TORCH_BUDGET does not count with OTEL_TORCH_ISOLATE, which needs every step")
            settings = dataclasses.replace(settings, budget=None)
        self.settings, self.overrides = settings, overrides
        losses = Losses()
        recorder = Recorder(lambda pending: self.activations.read(pending), self._connect, losses)
        self.session = session.Session(this_job(os.environ | overrides), settings, recorder, losses)
        self.clock = steps.Clock(self.session)
        self.inventory = Inventory()
        self.activations = Activations(self.session)
        self.jitter = Jitter(settings.noise) if settings.noise is not None else None
        self.isolation, self.operations = self._isolation(), self._operations()
        self.watch = self._watch_outputs()
        self.registry = Registry(
            self.clock,
            recorder,
            self._attach,
            self.activations.parameters,
            self.activations.say_what_did_not_fire,
        )
        self.training = Training(self.clock, self._stepping)
        self._undo: list[Callable[[], None]] = []

        self.clock.settle = self.registry.settle
        session.become(self.session)
        steps.become(self.clock)
        self._undo += [lambda: steps.become(None), lambda: session.become(None)]
        for source in (self.registry, self.training):
            source.install()
            self._undo.append(source.uninstall)
        self._undo.append(self.activations.detach)
        self._undo += [
            source.detach
            for source in (self.isolation, self.jitter, self.operations, self.watch)
            if source is not None
        ]
        if settings.regions.patterns:
            record_function.install()
            self._undo.append(record_function.uninstall)
        profiler.get_or_create_profiler(settings.profiler_dir)  # without a folder it does nothing
        self._undo.append(profiler.close)
        for name in FRAMEWORKS:
            self._watch(name)
        self._restore_sigterm = _on_sigterm()

    def _connect(self) -> list[Sink]:
        """The sinks for the job that this process is. Asked at the first scope or record: some
        learn their rank late.
        """
        from otel_torch import telemetry
        from otel_torch.recording.disk_budget import DiskBudget
        from otel_torch.recording.jsonl_sink import JsonlSink
        from otel_torch.recording.tensor_sink import TensorSink
        from otel_torch.sources.nonfinite_sink import NonFiniteSink

        self.session.job = job = this_job(os.environ | self.overrides)
        settings, losses = self.settings, self.session.recorder.losses
        sinks: list[Sink] = []
        budget = DiskBudget(settings.max_bytes)
        writes = settings.jsonl_ranks.includes(
            rank=job.rank, local_rank=job.local_rank, world_size=job.world_size
        )
        if writes and settings.jsonl is not None:
            chosen = settings.chosen(os.environ | self.overrides)
            sinks.append(
                JsonlSink(
                    settings.jsonl,
                    job,
                    losses,
                    budget=budget,
                    settings=chosen,
                    facts=self._facts,
                    trace_id=telemetry.trace_id(job),
                )
            )
        if writes and settings.tensors is not None and self.activations.keeps_tensors:
            sinks.append(TensorSink(settings.tensors, job, losses, budget))
        sinks += telemetry.build_sinks(settings, job, losses, stop, budget)
        if self.clock.cadence is not None:
            sinks.append(NonFiniteSink(self.clock.saw))
        return sinks

    def _watch(self, name: str) -> None:
        framework = importlib.import_module(f"otel_torch.frameworks.{name}")
        for module_name, apply in framework.HOOKS.items():
            self._undo.append(after_import(module_name, _guarded(apply, module_name)))
        self._undo.append(framework.uninstall)

    def _attach(self, model: Any, sites: list[Any]) -> None:
        # a rank that neither writes nor exports pays for no hook
        recorded = self.settings.activations and any(
            sink.wanted for sink in self.session.recorder.sinks
        )
        chosen = self.activations.chosen(model, sites) if recorded else []
        if self.isolation is not None:
            self.isolation.attach_around(model, chosen)
        if recorded:
            self.activations.attach(model, sites)
            if "parity" in self.settings.capture:
                self.inventory.take_down(model, sites, self.activations.observes)
        if self.isolation is not None:
            self.isolation.attach_within(model, chosen)
        if (
            self.settings.activations and self.jitter is not None
        ):  # on every rank, or ranks would part; behind the observers
            self.jitter.attach(model, sites)
        if self.operations is not None:
            self.operations.attach(model, chosen)
        if recorded and chosen and self.watch is not None:
            self.watch.attach(model, sites)

    def _isolation(self) -> Any:
        """What feeds a port with its reference's tensors, None where nobody asked."""
        if self.settings.isolate is None:
            return None
        if "parity" not in self.settings.capture:
            say("OTEL_TORCH_ISOLATE needs OTEL_TORCH_CAPTURE=parity, so nothing is isolated")
            return None
        from otel_torch.sources.isolation import Isolation

        isolation = Isolation(
            self.settings.isolate, lambda: self.session.job.rank, self.activations.going_on
        )
        self.activations.told_of_graphs.append(isolation.met_in_graph)
        return isolation

    def _operations(self) -> Any:
        """What watches the operations of some modules, None where nobody asked."""
        if self.settings.operations is None:
            return None
        from otel_torch.sources.operations import Operations

        operations = Operations(self.settings.operations, self.activations.taker)
        self.activations.told_of_graphs.append(operations.met_in_graph)
        return operations

    def _watch_outputs(self) -> Any:
        """What sees values that are not finite in steps that are not recorded, None where all are
        that may be.
        """
        if self.clock.cadence is None:
            return None
        from otel_torch.sources.nonfinite_watch import Watch

        watch = Watch(self.clock.saw)
        self.clock.collect = watch.collect
        return watch

    def _stepping(self, optimizer: Any, step: int) -> None:
        held = frozenset(
            id(parameter) for group in optimizer.param_groups for parameter in group["params"]
        )
        for model in list(self.registry.models):
            if (
                self.clock.cadence is not None
                and model.moment is not None
                and not model.moment.recording
            ):
                continue
            busiest = self.clock.optimizer_steps(model)
            self.activations.parameter_gradients(
                model, held, step if busiest is None else busiest, self.clock.loop
            )

    def _facts(self) -> dict[str, Any]:
        versions = {
            "python": platform.python_version(),
            "otel_torch": importlib.import_module("otel_torch").__version__,
        }
        for name in ("torch", "numpy", "diffusers", "transformers", "fastvideo"):
            if (module := sys.modules.get(name)) is not None:
                versions[name] = str(getattr(module, "__version__", ""))
        models = {
            model.name: {
                "modules": model.size,
                "forwards": model.completed,
                "held_as": model.held_as,
            }
            | (self.inventory.describe(model) if "parity" in self.settings.capture else {})
            for model in list(self.registry.models)
        }
        isolated = {} if self.isolation is None else {"isolated": self.isolation.describe()}
        budget = {} if self.clock.cadence is None else {"budget": self.clock.cadence.describe()}
        from otel_torch.statistics import gpu, native

        kernels = (
            f"{native.describe()}; on a GPU: {gpu.describe()}"
            if gpu.prepared()
            else native.describe()
        )
        return {"versions": versions, "kernels": kernels, "models": models} | isolated | budget

    def forked(self) -> None:
        """In a forked child: the same sources, sinks of its own once there is something to record."""
        self.session.losses = Losses()
        self.session.recorder.restart(self.session.losses)
        self.clock.forked()
        self.registry.forked()
        self.clock.seen_steps = self.clock.recorded_steps = 0

    def stop(self) -> None:
        deadline = time.monotonic() + EXIT_S
        for action in (self.clock.finish, self._say_what_never_matched):
            _guarded(action, action.__name__)()
        while self._undo:
            undo = self._undo.pop()
            _guarded(undo, getattr(undo, "__qualname__", "stop"))()
        self.session.recorder.finish(max(deadline, time.monotonic() + 0.5))
        self._restore_sigterm()  # last: until here a SIGTERM waits for the end that is under way

    def _say_what_never_matched(self) -> None:
        regions = self.settings.regions
        if self.clock.seen_steps and (
            unused := [pattern for pattern in regions.patterns if pattern not in regions.used]
        ):
            say(
                f"OTEL_TORCH_REGIONS: no region and no range was called {', '.join(map(repr, unused))}"
            )
        from otel_torch import torch_private

        if not self.registry.models and torch_private.compiled_graphs():
            say(
                "no model was seen: what ran was compiled as part of a function. Call the model once before that, or compile it"
            )
        if not self.clock.seen_steps:
            return  # a helper, such as a worker of a data loader, has no model of its own
        self.activations.say_what_never_matched()
        if self.isolation is not None:
            self.isolation.say_what_was_fed()
        if self.operations is not None:
            self.operations.say_what_never_matched()
        if self.clock.cadence is not None:
            say(self.clock.cadence.line())
        if not self.clock.recorded_steps:
            say(
                f"OTEL_TORCH_STEPS selects none of the steps of {self.clock.seen_steps} forwards, so no activation was recorded"
            )


def _guarded(action: Callable[..., Any], what: str) -> Callable[..., None]:
    def call(*args: Any) -> None:
        try:
            action(*args)
        except Exception as error:
            say_once(f"{what} failed: {type(error).__name__}: {error}")

    return call


def _on_sigterm() -> Callable[[], None]:
    """Flush when the process is told to end, and end as it would have: only where nobody else
    handles SIGTERM.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        return lambda: None

    ending: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if ending != [os.getpid()]:
            ending[:] = [os.getpid()]
            try:
                threading.Thread(target=_stop_and_die, name="otel_torch-sigterm").start()
            except RuntimeError:  # the interpreter is ending, and the recording with it
                _die()

    def restore() -> None:
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is handle
        ):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, handle)
    return restore


def _stop_and_die() -> None:
    """In a thread of its own, because the main one may have been interrupted with any lock in its
    hands; and not waited for without end, because a device may never come back.
    """
    stopping = threading.Thread(target=stop, name="otel_torch-stop", daemon=True)
    stopping.start()
    stopping.join(SIGTERM_S)
    _die()


def _die() -> None:
    """Die of SIGTERM now, whatever the main thread is doing: Python itself resets a handler only
    there.
    """
    ctypes.pythonapi.PyOS_setsig(signal.SIGTERM, 0)
    os.kill(os.getpid(), signal.SIGTERM)


def _stop_in_multiprocessing() -> None:
    """A child of multiprocessing clears its exit functions at its start, and most never run
    atexit.
    """
    from multiprocessing import process, util

    def at_end(_: object) -> None:
        util.Finalize(None, stop, exitpriority=0)

    util.register_after_fork(stop, at_end)
    if process.parent_process() is not None:
        at_end(None)


def _after_fork() -> None:
    global _lock, _starting
    _lock, _starting = threading.RLock(), False
    if _running is not None:
        _guarded(_running.forked, "going on in a forked process")()
