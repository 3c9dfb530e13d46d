"""The torch profiler, collecting inside chosen regions only: a whole run's trace is gigabytes that
no viewer opens.

Each line here answers a way in which such a profiler recorded nothing without a word: a region that
is misspelt, a trace that is never exported, a marker written while collection was off, a thread
that Kineto does not see.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from otel_torch import at_fork, job
from otel_torch.at_fork import ForkOrder
from otel_torch.console import say, say_once
from otel_torch.records import Scope
from otel_torch.regions import entry as _regions
from otel_torch.regions.fallback_settings import find_settings, read_environment
from otel_torch.regions.registry import (
    list_profiler_regions,
    names_of,
    normalise,
    resolve_profiler_region,
)
from otel_torch.settings import RegionSelection, Settings, split_list

ENABLE, DISABLE = "fastvideo.profiler.enable_collection", "fastvideo.profiler.disable_collection"
MARK = "fastvideo.region::"
_SUMMARY_ROWS = 60


@dataclass
class TorchProfilerConfig:
    """In which regions the profiler collects: {registered name: whether}; `others` is for names
    that do not stand there.
    """

    regions: dict[str, bool]
    others: bool = False

    @classmethod
    def from_env(cls) -> TorchProfilerConfig:
        """Read OTEL_TORCH_PROFILER_REGIONS. Raises ValueError where regions are named and none of
        them is known.
        """
        return cls.parse(read_environment("profiler_").profiler_regions)

    @classmethod
    def parse(cls, text: str) -> TorchProfilerConfig:
        """Read a comma list of names, short names and wildcards; an empty one means all regions.

        An unknown name is said and left out. Raises ValueError where nothing is left.

        >>> TorchProfilerConfig.parse("model_loading").regions
        {'profiler_region_model_loading': True}
        """
        tokens = [normalise(word) for word in split_list(text)]
        if not tokens or "all" in tokens:
            return cls({region.name: True for region in list_profiler_regions()}, others=True)
        chosen: dict[str, bool] = {}
        available = ", ".join(region.short for region in list_profiler_regions())
        for token in tokens:
            found = [
                region.name
                for region in list_profiler_regions()
                if RegionSelection(False, (token,)).matches(*names_of(region))
            ]
            if not found:
                say_once(
                    f"OTEL_TORCH_PROFILER_REGIONS: unknown profiler region {token!r} is left out; use any of {available}"
                )
            chosen.update(dict.fromkeys(found, True))
        if not chosen:
            raise ValueError(
                f"OTEL_TORCH_PROFILER_REGIONS={text!r} names no known region; use any of {available}"
            )
        return cls(chosen)


class TorchProfilerController:
    """Switches a torch profiler's collection on inside chosen regions and off outside of them.

    profiler: a `torch.profiler.profile`, or None. activities: those that are switched. config:
    which regions; read from the environment when None (ValueError as in
    `TorchProfilerConfig.from_env`). disabled: a controller that never collects and is not the
    global one. Its regions are spans all the same. trace_dir: folder for the summary; with it the
    profiler starts at the first chosen region, in that region's thread. Raises RuntimeError where a
    controller is already the global one.

    Kineto sees one thread, that in which the profiler was started: regions of other threads collect
    nothing.
    """

    def __init__(
        self,
        profiler: Any,
        activities: Iterable[ProfilerActivity],
        config: TorchProfilerConfig | None = None,
        disabled: bool = False,
        *,
        trace_dir: str | None = None,
    ) -> None:
        self._activities = tuple(activities)
        self._profiler: Any = None
        self._config = config or TorchProfilerConfig({})
        self._trace_dir = trace_dir
        self._lock = threading.RLock()
        self._depth = 0
        self._thread = threading.get_ident()
        # torch's profiler collects from its start on
        self._started = self._collecting = trace_dir is None
        if disabled:
            self._started = self._collecting = False
            return
        if get_global_controller() is not None:
            raise RuntimeError(
                "there is already a torch profiler controller in this process; use get_global_controller()"
            )
        self._config = config or TorchProfilerConfig.from_env()
        self._profiler = profiler
        set_global_controller(self)

    @property
    def activities(self) -> tuple[ProfilerActivity, ...]:
        """The activities that are switched."""
        return self._activities

    @property
    def has_profiler(self) -> bool:
        """Whether there is a profiler that has not been stopped."""
        return self._profiler is not None

    @property
    def is_enabled(self) -> bool:
        """Whether the profiler collects right now."""
        return self._profiler is not None and self._collecting

    def is_region_enabled(self, region: str) -> bool:
        """Whether the profiler collects inside `region`, a long or short name; False for an unknown
        one.
        """
        known = resolve_profiler_region(region)
        return known is not None and self._profiler is not None and self._chooses(known.name)

    def region(self, region: str) -> Any:
        """A context manager around `region`, in which this controller's profiler collects if it was
        chosen.
        """
        return _regions.region(region, collector=self if self.has_profiler else None)

    def start(self) -> None:
        """Start the profiler in this thread, and pause it until a region is entered."""
        with self._lock:
            if self._profiler is None:
                return
            self._profiler.start()
            self._thread = threading.get_ident()
            self._started = True
            self._profiler.toggle_collection_dynamic(False, self._activities)
            self._collecting = False

    def stop(self) -> None:
        """Stop the profiler, write its trace and summary, and be no longer the global controller.
        Never raises; idempotent.
        """
        with self._lock:
            profiler, self._profiler = self._profiler, None
            self._depth, self._collecting = 0, False
        if get_global_controller() is self:
            set_global_controller(None)
        atexit.unregister(self.stop)
        if profiler is None:
            return
        if not self._started:
            say(
                f"the torch profiler collected nothing: no region it was asked to collect in was entered ({self._wanted()})"
            )
            return
        if self._trace_dir is not None and threading.get_ident() != self._thread:
            say(
                "the torch profiler's trace is lost: only the thread that entered the first profiled region can stop it; "
                "call the controller's stop() there"
            )
        try:
            profiler.stop()
            if self._trace_dir is not None:
                _write_summary(profiler, Path(self._trace_dir))
        except Exception as error:
            say(
                f"the torch profiler's trace could not be written to {self._trace_dir}: {type(error).__name__}: {error}"
            )

    def prepare(self, region: str) -> None:
        """Start a profiler that is ours to start, before the region's clock does."""
        if self._started or not self._chooses(region):
            return
        try:
            with self._lock:
                if not self._started:
                    self.start()
        except Exception as error:
            self._give_up(error)

    def enter(self, region: str, scope: Scope | None) -> Any:
        """Collect, if `region` was chosen, and mark it in the trace."""
        if not self._chooses(region):
            return None
        if threading.get_ident() != self._thread:
            say_once(
                f"the torch profiler sees only the thread that started it: {region!r} in another one is not in its trace"
            )
            return None
        try:
            with self._lock:
                if self._profiler is None:
                    return None
                self._depth += 1
                if self._depth == 1:
                    self._collect(True, scope)
            mark: Any = torch.profiler.record_function(MARK + region)
            mark.__enter__()
            return mark
        except Exception as error:
            self._give_up(error)
            return None

    def leave(self, entered: Any, scope: Scope | None) -> None:
        """End the region's mark, and collecting with the outermost region; also after `stop`."""
        try:
            entered.__exit__(None, None, None)
            with self._lock:
                if self._profiler is None:
                    return
                self._depth -= 1
                if self._depth == 0:
                    self._collect(False, scope)
        except Exception as error:
            self._give_up(error)

    def _chooses(self, region: str) -> bool:
        return self._profiler is not None and self._config.regions.get(region, self._config.others)

    def _collect(self, on: bool, scope: Scope | None) -> None:
        if self._collecting == on:
            return
        event = ENABLE if on else DISABLE
        if not on:
            _mark(
                event
            )  # both events are written while collection is on: else they would not be in the trace
        self._profiler.toggle_collection_dynamic(on, self._activities)
        self._collecting = on
        if on:
            _mark(event)
        if scope is not None:
            scope.events.append((time.time_ns(), event, {}))

    def _give_up(self, error: Exception) -> None:
        say_once(
            f"the torch profiler failed and is left out from here on: {type(error).__name__}: {error}"
        )
        self.stop()

    def _wanted(self) -> str:
        return ", ".join(name for name, on in self._config.regions.items() if on)

    def _forget(self) -> None:
        # in a forked child the profiler is the parent's
        self._lock = threading.RLock()
        self._profiler, self._depth, self._collecting = None, 0, False
        atexit.unregister(self.stop)
        if get_global_controller() is self:
            set_global_controller(None)


def _mark(event: str) -> None:
    with torch.profiler.record_function(event):
        pass


class _QuietProfile(torch.profiler.profile):
    """A profiler whose collection can be switched without a warning of Kineto's each time.

    On a CPU it is the thread's observers that are switched off: Kineto's own switch warns, and with
    an absent GPU named, so that it does not, takes 0.5 ms. With a GPU, Kineto warns unless every
    kind of GPU is named.
    """

    def toggle_collection_dynamic(
        self, enable: bool, activities: Iterable[ProfilerActivity]
    ) -> None:
        chosen = set(activities)
        switch = getattr(torch.autograd, "_enable_record_function", None)
        if chosen == {ProfilerActivity.CPU} and switch is not None:
            switch(enable)
        else:
            super().toggle_collection_dynamic(
                enable, chosen | {ProfilerActivity.CUDA, ProfilerActivity.XPU}
            )

    def stop(self) -> None:
        switch = getattr(torch.autograd, "_enable_record_function", None)
        if switch is not None:
            switch(True)
        super().stop()


def available_activities() -> tuple[ProfilerActivity, ...]:
    """CPU, and CUDA where there is one."""
    return (
        (ProfilerActivity.CPU, ProfilerActivity.CUDA)
        if torch.cuda.is_available()
        else (ProfilerActivity.CPU,)
    )


def get_global_controller() -> TorchProfilerController | None:
    """The controller that all regions of this process use, None where there is none."""
    controller: TorchProfilerController | None = _regions.get_collector()
    return controller


def set_global_controller(controller: TorchProfilerController | None) -> None:
    """Let all regions of this process use `controller`; None: no longer any."""
    _regions.set_collector(controller)


def get_or_create_profiler(trace_dir: str | None) -> TorchProfilerController:
    """The process's controller; made, for traces in the folder `trace_dir`, where there is none
    yet.

    Without a folder, and where none of the named regions is known or the folder cannot be made, a
    disabled controller, which is not the global one. The profiler starts at the first chosen
    region; the trace and `summary_rank<RANK>.txt` and `.json` are written by `stop`, at the latest
    when the process exits.
    """
    existing = get_global_controller()
    if existing is not None:
        return existing
    activities = available_activities()
    if not trace_dir:
        return TorchProfilerController(None, activities, disabled=True)
    settings = find_settings("profiler_")
    folder = Path(trace_dir).expanduser()
    try:
        config = TorchProfilerConfig.parse(settings.profiler_regions)
        folder.mkdir(parents=True, exist_ok=True)
        profiler = _make_profile(settings, folder, activities)
    except (ValueError, OSError, RuntimeError) as error:
        say_once(f"the torch profiler is off: {error}")
        return TorchProfilerController(None, activities, disabled=True)
    controller = TorchProfilerController(profiler, activities, config, trace_dir=str(folder))
    atexit.register(controller.stop)
    at_fork.register(ForkOrder.PROFILER, in_child=controller._forget)
    return controller


def close() -> None:
    """Stop the global controller, if there is one: its trace and summary are written now."""
    controller = get_global_controller()
    if controller is not None:
        controller.stop()


def _make_profile(
    settings: Settings, folder: Path, activities: tuple[ProfilerActivity, ...]
) -> torch.profiler.profile:
    def export(profiler: Any) -> None:
        worker = f"rank{job.this_job().rank}_{os.getpid()}"
        torch.profiler.tensorboard_trace_handler(str(folder), worker, use_gzip=True)(profiler)

    # no schedule: nothing calls the profiler's step(), so that one would never advance and nothing
    # be recorded
    return _QuietProfile(
        activities=activities,
        record_shapes=settings.profiler_record_shapes,
        profile_memory=settings.profiler_with_profile_memory,
        with_stack=settings.profiler_with_stack,
        with_flops=settings.profiler_with_flops,
        on_trace_ready=export,
    )


def _write_summary(profiler: Any, folder: Path) -> None:
    """Which operators took how long, by input shape, so that nobody has to read a trace of
    gigabytes for it.
    """
    averages = profiler.key_averages(group_by_input_shape=True)
    stem = f"summary_rank{job.this_job().rank}"
    (folder / f"{stem}.txt").write_text(
        averages.table(sort_by="self_device_time_total", row_limit=_SUMMARY_ROWS)
    )
    rows = [
        {
            "name": row.key,
            "shapes": str(row.input_shapes),
            "self_device_us": row.self_device_time_total,
            "device_us": row.device_time_total,
            "count": row.count,
        }
        for row in averages
    ]
    (folder / f"{stem}.json").write_text(json.dumps(rows))
