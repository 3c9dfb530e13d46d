"""Starts and stops the recording of a process. The only place that knows both sources and sinks."""

from __future__ import annotations

import dataclasses
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from otel_torch import session
from otel_torch.process import at_fork
from otel_torch.process.at_fork import ForkOrder
from otel_torch.process.console import say, say_once
from otel_torch.process.exit_hooks import stop_at_exit
from otel_torch.process.import_hooks import after_import
from otel_torch.process.job import name_run, this_job
from otel_torch.process.os_exit import end_before_os_exit
from otel_torch.process.sigterm import FLUSH_S, SigtermWatch
from otel_torch.recorder import Recorder, Sink
from otel_torch.records import Losses
from otel_torch.settings import (
    Settings,
    UnusableSelection,
    find_misspelled,
    options_to_variables,
)
from otel_torch.sources.source import Source

if TYPE_CHECKING:
    from otel_torch.sources.events import RunEvents
    from otel_torch.sources.interventions.graph_values import GraphValues
    from otel_torch.sources.interventions.isolation import Isolation
    from otel_torch.sources.interventions.upcast import Upcast
    from otel_torch.sources.models.model import Model, ModuleSite
    from otel_torch.sources.nonfinite.watch import NonFiniteWatch
    from otel_torch.sources.operations.source import GraphCapture
    from otel_torch.sources.tensors.operations import Operations
    from otel_torch.sources.training.law_watch import LawWatch
    from otel_torch.sources.training.training_health import TrainingHealth

# Frameworks with a module in `frameworks/`. HOOKS there maps an import to what follows it.
FRAMEWORKS = (
    "deepspeed", "diffusers", "fastvideo", "keras", "lightning", "megatron", "pipelining",
    "transformers", "transformers_attention", "ultralytics", "vllm",
)  # fmt: skip
# How long the sinks may take at the end of the program, whatever a collector does: of the two
# seconds that are promised, the rest is for what comes before and after them.
EXIT_S = 1.3
# How long `os._exit` waits for the program's threads to leave the locks of the recording.
_LOCK_S = 0.5

_running: RunningSession | None = None
_starting = False  # starting may import torch, and an enabled process starts at that import
_lock: Any = threading.RLock()
_hooked_exit = False


def start_from_env() -> bool:
    """Start as the environment says, once torch is imported. Return whether a session runs."""
    try:
        settings = Settings.from_env(report=say_once)
        for line in find_misspelled(os.environ) if settings.enabled else ():
            say_once(line)
    except UnusableSelection as error:
        say(f"{error}. Nothing is recorded")
        return False
    return settings.enabled and _start(settings)


def start(**settings: Any) -> bool:
    """Start recording in this process, whatever OTEL_TORCH_ENABLED says.

    Args:
        settings: the environment variables by their names in lower case without the prefix:
            `otel_torch.start(modules=r"^blocks\\.0$", stats=["mean", "std"])`. They win over the
            environment. An unknown one is skipped, and reported in one line with the near name.

    Returns:
        Whether a session runs now. False if a selection cannot be used, which is reported in one
        line. Does nothing, and returns True, if a session runs already.
    """
    overrides = options_to_variables(settings, say_once)
    try:
        return _start(Settings.from_env(os.environ | overrides, say_once), overrides)
    except UnusableSelection as error:
        say(f"{error}. Nothing is recorded")
        return False


def is_running() -> bool:
    """Return whether a session records in this process."""
    return _running is not None


def flush() -> None:
    """Read everything measured so far and hand it to the sinks, without ending the current step."""
    if _running is not None:
        tracker = _running.step_tracker
        tracker.end_pending_forward()
        _running.session.recorder.flush(tracker.step_scope)


def add_result(result: Any) -> None:
    """Record what the program has returned as the end of its graph of operations, if that is
    recorded.
    """
    if _running is not None and _running.graph_capture is not None:
        _running.graph_capture.add_result(result)


def stop() -> None:
    """End the session: flush everything, remove every hook, and report what was lost.

    A second call does nothing. A call from another thread waits for the first.
    """
    global _running
    with _lock:
        running, _running = _running, None
        if running is not None:
            running.stop()


def _start(settings: Settings, overrides: dict[str, str] | None = None) -> bool:
    global _running, _starting, _hooked_exit
    with _lock:
        if _running is not None or _starting:
            return True
        overrides = overrides or {}
        run_id = name_run(os.environ | overrides)
        os.environ.setdefault("OTEL_TORCH_RUN_ID", run_id)
        _starting = True
        try:
            running = RunningSession(settings, overrides | {"OTEL_TORCH_RUN_ID": run_id})
            running.start()
            _running = running
        except Exception as error:
            say(f"could not start, nothing is recorded: {type(error).__name__}: {error}")
            return False
        finally:
            _starting = False
        if not _hooked_exit:
            _hooked_exit = True
            stop_at_exit(stop)
            at_fork.register(ForkOrder.SESSION, in_child=_after_fork)
        return True


def _after_fork() -> None:
    global _lock, _starting
    _lock, _starting = threading.RLock(), False
    if _running is not None:
        _guarded(_running.forked, "recording in a forked process")()


class RunningSession:
    """Everything that one session consists of.

    The constructor makes it, `start` installs it in order, and `stop` removes it in reverse.
    """

    def __init__(self, settings: Settings, overrides: dict[str, str]) -> None:
        # Sources import torch, whose import may have brought us here: load them only now.
        from otel_torch.sources.events import RunEvents
        from otel_torch.sources.interventions.noise import Jitter
        from otel_torch.sources.models.configurations import Configurations
        from otel_torch.sources.models.inventory import Inventory
        from otel_torch.sources.models.model_registry import ModelRegistry
        from otel_torch.sources.models.module_modes import ModeChanges
        from otel_torch.sources.nonfinite.origin import NonFiniteOrigin
        from otel_torch.sources.steps.step_clocks import StepTracker
        from otel_torch.sources.tensors.activations import Activations
        from otel_torch.sources.tensors.tensor_reader import TensorReader, step_of
        from otel_torch.sources.training.training_loop import Training

        if settings.isolate is not None and settings.budget is not None:
            say("OTEL_TORCH_BUDGET is ignored with OTEL_TORCH_ISOLATE, which needs every step")
            settings = dataclasses.replace(settings, budget=None)
        self.settings, self._overrides = settings, overrides
        losses, events, reader = Losses(), RunEvents(), TensorReader(settings)
        recorder = Recorder(reader.read, self._make_sinks, losses, step_of)
        self.step_tracker = StepTracker(settings, recorder, events)
        self.session = session.Session(
            this_job(os.environ | overrides), settings, recorder, losses, self.step_tracker
        )
        self.registry = ModelRegistry(self.step_tracker, recorder, events)
        self.training = Training(self.step_tracker, self.registry, events)
        self.activations = Activations(self.session, reader, events)
        self.inventory = Inventory()
        self.modes = ModeChanges(events) if "parity" in settings.capture else None
        self.configurations = Configurations(events) if "graph" in settings.capture else None
        self.isolation = self._make_isolation(events)
        # where operations are recorded, they get the noise themselves
        noise = settings.noise if "graph" not in settings.capture else None
        self.jitter = Jitter(noise) if noise is not None else None
        self.upcast = self._make_upcast()
        self.operations = self._make_operations(events)
        self.graph_values: GraphValues | None = None
        self.graph_capture = self._make_graph_capture(events)
        self.training_health = self._make_training_health(events)
        self.law_watch = self._make_law_watch(events)
        cadence = self.step_tracker.cadence
        self.nonfinite_origin = NonFiniteOrigin(
            self.session,
            events,
            report=None if cadence is None else cadence.observe,
            operations=self.operations if settings.on_nonfinite == "zoom" else None,
        )
        self._observe_tokens(events)
        self.nonfinite_watch = self._make_nonfinite_watch(events)
        reader.observers.append(self.nonfinite_origin.observe)
        if self.law_watch is not None:
            reader.observers.append(self.law_watch.observe)
        events.modules_found.append(self._attach_hooks)
        ranges = _RecordFunctionRanges() if settings.regions.patterns else None
        optional = (
            self.isolation,
            self.jitter,
            self.upcast,
            self.operations,
            self.graph_capture,
            self.training_health,
            self.law_watch,
            self.nonfinite_watch,
            ranges,
        )
        self.sources: list[Source] = [
            self.step_tracker,
            self.registry,
            self.training,
            self.activations,
            self.nonfinite_origin,
            *(source for source in optional if source is not None),
            _Profiler(settings.profiler_dir),
            *map(_Framework, FRAMEWORKS),
        ]
        self._sigterm = SigtermWatch(stop, self._flush_for_handler, self._is_in_session)
        self._restore_os_exit: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Make this the current session, and install its sources."""
        session.become(self.session)
        for source in self.sources:
            source.install()
        self._sigterm.install()
        recorder = self.session.recorder
        self._restore_os_exit = end_before_os_exit(self._end_process, lambda: recorder.is_in_use)

    def _attach_hooks(self, model: Model, sites: list[ModuleSite]) -> None:
        """Attach every hook that the new `sites` of a model need.

        Hooks nest: what is attached first runs outermost. Isolation replaces inputs after the
        observers saw them and outputs after the observers saw those, so its two hooks surround
        theirs.
        """
        settings = self.settings
        # A rank that neither writes nor exports gets no hook.
        is_recorded = settings.activations and any(
            sink.has_destination for sink in self.session.recorder.sinks
        )
        selected = self.activations.selection.sites(model, sites) if is_recorded else []
        if self.isolation is not None:
            self.isolation.attach_around(model, selected)
        if is_recorded:
            self.activations.attach(model, sites)
            if "parity" in settings.capture:
                self.inventory.add(model, sites, self.activations.is_observed)
        if self.isolation is not None:
            self.isolation.attach_within(model, selected)
        if self.jitter is not None and settings.activations:
            # On every rank, recorded or not, or the ranks would diverge.
            self.jitter.attach(model, sites)
        if self.upcast is not None and settings.activations:
            self.upcast.attach(model, sites)
        if self.operations is not None:
            self.operations.attach(model, selected)
        if self.nonfinite_watch is not None and selected:
            self.nonfinite_watch.attach(model, sites)

    def _is_in_session(self) -> bool:
        """Return whether this thread holds a lock that `stop` needs, or is in `stop` itself."""
        locks = (_lock, self.step_tracker.lock, self.session.recorder.lock)
        return any(lock._is_owned() for lock in locks)

    def _flush_for_handler(self, is_busy: bool) -> None:
        """Send what is recorded so far, before the program's handler of SIGTERM runs."""
        recorder = self.session.recorder
        if not recorder.is_in_use:
            return
        if not is_busy:
            recorder.flush(self.step_tracker.step_scope)
            recorder.drain(FLUSH_S)
        else:
            recorder.drain_sinks(FLUSH_S)

    @contextmanager
    def _end_process(self) -> Iterator[None]:
        """Finish the sinks. In the block, a thread of the program that ends a step is held.

        The sources stay: a step that such a thread begins meanwhile would have no records.
        """
        locks = self.step_tracker.lock, self.session.recorder.lock
        with ExitStack() as held:
            for lock in locks:
                if lock.acquire(timeout=_LOCK_S / len(locks)):
                    held.callback(lock.release)
            if not all(lock._is_owned() for lock in locks):  # the device hangs
                self.session.recorder.drain_sinks(EXIT_S)
            else:
                deadline = time.monotonic() + EXIT_S
                _guarded(self.step_tracker.end_run, "the end of the last step")()
                _guarded(self._report, "the report at the end")()
                self.session.recorder.finish(deadline)
            yield

    def forked(self) -> None:
        """Continue in a forked child: the same sources, and sinks of its own when it records."""
        self.session.losses = Losses()
        self.session.recorder.restart(self.session.losses)
        for source in self.sources:
            source.forked()

    def stop(self) -> None:
        """End the active step, report, remove every source, and finish the sinks."""
        deadline = time.monotonic() + EXIT_S
        self._sigterm.begin_stop()
        _guarded(self.step_tracker.end_run, "the end of the last step")()
        _guarded(self._report, "the report at the end")()
        for source in reversed(self.sources):
            _guarded(source.uninstall, type(source).__qualname__)()
        session.become(None)
        self.session.recorder.finish(max(deadline, time.monotonic() + 0.5))
        self._restore_os_exit()
        self._sigterm.restore()  # last: until here a SIGTERM waits for this to end

    def _report(self) -> None:
        from otel_torch import torch_private

        if not self.registry.models and torch_private.count_compiled_graphs():
            say(
                "no model was seen: what ran was compiled before recording began, or calls none. "
                "Start recording before the first call"
            )
        if not self.step_tracker.seen_forwards:
            return  # a process without a model of its own, such as a worker of a data loader
        regions = self.settings.regions
        unused = [pattern for pattern in regions.patterns if pattern not in regions.used]
        if unused:
            names = ", ".join(map(repr, unused))
            say(f"OTEL_TORCH_REGIONS: no region and no range was called {names}")
        for source in self.sources:
            _guarded(source.finish, f"the report of {type(source).__qualname__}")()

    # -- what only some settings need

    def _make_isolation(self, events: RunEvents) -> Isolation | None:
        if self.settings.isolate is None:
            return None
        if "parity" not in self.settings.capture:
            say("OTEL_TORCH_ISOLATE needs OTEL_TORCH_CAPTURE=parity, so nothing is isolated")
            return None
        from otel_torch.sources.interventions.isolation import Isolation

        return Isolation(self.settings.isolate, self.session, self.activations.current_call, events)

    def _make_operations(self, events: RunEvents) -> Operations | None:
        if self.settings.operations is None and self.settings.on_nonfinite != "zoom":
            return None
        from otel_torch.sources.tensors.operations import Operations

        return Operations(self.settings.operations, self.activations.recorder_for, events)

    def _make_upcast(self) -> Upcast | None:
        if self.settings.upcast == "off":
            return None
        from otel_torch.sources.interventions.upcast import Upcast

        return Upcast()

    def _make_graph_capture(self, events: RunEvents) -> GraphCapture | None:
        if "graph" not in self.settings.capture:
            return None
        from otel_torch.sources.interventions.graph_values import GraphValues
        from otel_torch.sources.interventions.noise import NoisyResults
        from otel_torch.sources.operations.source import GraphCapture

        settings = self.settings
        change = None if settings.noise is None else NoisyResults(settings.noise)
        meet = None
        if settings.graph_keep or settings.graph_put:
            self.graph_values = GraphValues(
                settings.graph_keep, settings.graph_put, self.session.job.rank
            )
            meet = self.graph_values.meet
        return GraphCapture(self.session, self.activations.selection, events, change, meet)

    def _make_training_health(self, events: RunEvents) -> TrainingHealth | None:
        if not self.settings.training:
            return None
        from otel_torch.sources.training.training_health import TrainingHealth

        selection, optimizers = self.activations.selection, self.step_tracker.training.optimizers
        return TrainingHealth(
            self.session,
            selection,
            optimizers,
            events,
            self.activations.is_observed,
            lambda: self.registry.models,
            self.training.facts.idle,
        )

    def _make_law_watch(self, events: RunEvents) -> LawWatch | None:
        if self.training_health is None:
            return None
        from otel_torch.sources.training.law_watch import LawWatch

        return LawWatch(self.session, self.training_health.rows, events, self._training_facts)

    def _observe_tokens(self, events: RunEvents) -> None:
        if "tokens" not in self.settings.capture:
            return
        from otel_torch.sources.tensors.tokens import TokenObserver

        TokenObserver(self.session, self.activations.selection, events)

    def _make_nonfinite_watch(self, events: RunEvents) -> NonFiniteWatch | None:
        if self.step_tracker.cadence is None:
            return None
        from otel_torch.sources.nonfinite.watch import NonFiniteWatch

        return NonFiniteWatch(self.nonfinite_origin.observe_unrecorded, events)

    # -- sinks

    def _make_sinks(self) -> list[Sink]:
        """Make the sinks for this process's place in the job.

        The recorder calls this at the first scope or record: some processes learn their rank late.
        """
        from otel_torch.recording.disk_budget import DiskBudget
        from otel_torch.recording.recording_sink import RecordingSink
        from otel_torch.recording.remote.remote_files import is_url
        from otel_torch.recording.tensor_sink import TensorSink
        from otel_torch.telemetry.run_trace import run_trace_id
        from otel_torch.telemetry.sinks.telemetry_sink import build_telemetry_sinks

        self.session.job = job = this_job(os.environ | self._overrides)
        settings, losses = self.settings, self.session.recorder.losses
        sinks: list[Sink] = []
        budget = DiskBudget(settings.max_bytes)
        writes = settings.jsonl_ranks.includes(
            rank=job.rank, local_rank=job.local_rank, world_size=job.world_size
        )
        if writes and settings.jsonl is not None:
            chosen = settings.chosen(os.environ | self._overrides)
            kind: Any = RecordingSink
            if is_url(settings.jsonl):
                from otel_torch.recording.remote.uploaded_recording import UploadedRecording

                kind = UploadedRecording
            sinks.append(
                kind(
                    settings.jsonl,
                    job,
                    losses,
                    budget=budget,
                    settings=chosen,
                    otlp_folder=settings.otlp_file,
                    facts=self._metadata,
                    trace_id=run_trace_id(job),
                )
            )
        if writes and settings.tensors is not None and self.activations.keeps_tensors:
            sinks.append(TensorSink(settings.tensors, job, losses, budget))
        sinks += build_telemetry_sinks(settings, job, losses, stop, budget)
        return sinks

    def _metadata(self) -> dict[str, Any]:
        """Return what the sources and the versions add to the metadata of a recording."""
        from otel_torch.sources.environment import describe_environment, versions

        metadata: dict[str, Any] = {
            "versions": versions(),
            "environment": describe_environment(),
            "kernels": _kernels(),
            "models": self._models(),
        }
        metadata |= self._training_facts()
        if self.law_watch is not None and self.law_watch.broken:
            metadata["broken_laws"] = [law._asdict() for law in self.law_watch.broken]
        if self.registry.models.forgotten:
            metadata["models_forgotten"] = self.registry.models.forgotten
        health = self.training_health
        if health is not None and (throughput := health.throughput.describe()):
            metadata["training"] = throughput
        if self.graph_capture is not None:
            metadata["lines"] = self.graph_capture.describe()
            metadata["callers"] = self.graph_capture.recorder.lines.callers()
            metadata["operations_cut"] = self.graph_capture.is_cut
        if self.graph_values is not None:
            metadata["values_put"] = self.graph_values.put
            metadata["values_not_kept"] = self.graph_values.not_kept
            metadata["values_differed"] = self.graph_values.differed
            metadata["values_scaled"] = self.graph_values.scaled
        if self.isolation is not None:
            metadata["isolated"] = self.isolation.describe()
        if self.step_tracker.cadence is not None:
            metadata["budget"] = self.step_tracker.cadence.describe()
        if self.nonfinite_origin.origin is not None:
            metadata["nonfinite"] = self.nonfinite_origin.origin.describe()
        return metadata

    def _training_facts(self) -> dict[str, Any]:
        """Return what the metadata say of optimizers and of the models that they train."""
        health = self.training_health
        facts: dict[str, Any] = {
            "optimizers": self.training.facts.describe(),
            "idle_optimizers": self.training.facts.idle(),
            "training_loops": {} if health is None else health.describe(),
        }
        return {name: fact for name, fact in facts.items() if fact}

    def _models(self) -> dict[str, dict[str, Any]]:
        models = {}
        for model in self.registry.models:
            models[model.name] = {
                "modules": model.size,
                "forwards": model.completed,
                "held_as": model.held_as,
                "trained": model.clock.is_trained,
            }
            if "parity" in self.settings.capture:
                models[model.name] |= self.inventory.describe(model)
            if self.modes is not None:
                models[model.name] |= self.modes.describe(model)
            if self.configurations is not None:
                models[model.name] |= self.configurations.describe(model)
        return models


class _RecordFunctionRanges(Source):
    """The ranges of `torch.profiler.record_function`, if OTEL_TORCH_REGIONS asks for any."""

    def install(self) -> None:
        from otel_torch.regions import record_function

        record_function.install()

    def uninstall(self) -> None:
        from otel_torch.regions import record_function

        record_function.uninstall()


class _Profiler(Source):
    """The torch profiler. Without OTEL_TORCH_PROFILER_DIR it never collects."""

    def __init__(self, folder: str | None) -> None:
        self._folder = folder

    def install(self) -> None:
        from otel_torch.regions import profiler

        profiler.get_or_create_profiler(self._folder)

    def uninstall(self) -> None:
        from otel_torch.regions import profiler

        profiler.close()


class _Framework(Source):
    """One module of `frameworks/`, applied once the framework is imported."""

    def __init__(self, name: str) -> None:
        self._framework = importlib.import_module(f"otel_torch.frameworks.{name}")
        self._call_off: list[Callable[[], None]] = []

    def install(self) -> None:
        for module_name, apply in self._framework.HOOKS.items():
            self._call_off.append(after_import(module_name, _guarded(apply, module_name)))

    def uninstall(self) -> None:
        self._framework.uninstall()
        while self._call_off:
            self._call_off.pop()()


def _kernels() -> str:
    from otel_torch.statistics import cpu_kernel, gpu_kernel

    if gpu_kernel.was_prepared():
        return f"{cpu_kernel.describe()}; on a GPU: {gpu_kernel.describe()}"
    return cpu_kernel.describe()


def _guarded(action: Callable[..., Any], name: str) -> Callable[..., None]:
    """Return a function that calls `action`, and reports in one line what it raises."""

    def call(*args: Any) -> None:
        try:
            action(*args)
        except Exception as error:
            say_once(f"{name} failed: {type(error).__name__}: {error}")

    return call
