"""The torch profiler, collecting in selected regions only.

The trace of a whole run is gigabytes that no viewer opens. With OTEL_TORCH_PROFILER_DIR set and
OTEL_TORCH_PROFILER_REGIONS=training_step:

    region("model_loading")   nothing is collected
    region("training_step")   the profiler starts here and collects until the region ends
    region("training_step")   collection is switched on and off again
    exit                      the trace and summary_rank0.txt and .json are written

Every case in which such a profiler would silently record nothing is handled or reported: a misspelt
region, a trace that is never exported, marks that are set while collection is off, and threads that
Kineto does not see.
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

from otel_torch.process import at_fork, job
from otel_torch.process.at_fork import ForkOrder
from otel_torch.process.console import say, say_once
from otel_torch.records import Scope
from otel_torch.regions import entry as _regions
from otel_torch.regions.fallback_settings import find_settings, read_environment
from otel_torch.regions.registry import (
    PLAIN_NAMES,
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
    """The regions in which the profiler collects.

    Args:
        regions: whether to collect, by registered name.
        others: whether to collect in regions that are not in `regions`.
    """

    regions: dict[str, bool]
    others: bool = False

    @classmethod
    def from_env(cls) -> TorchProfilerConfig:
        """Read OTEL_TORCH_PROFILER_REGIONS.

        Raises:
            ValueError: regions are named, and none of them is registered.
        """
        return cls.parse(read_environment("profiler_").profiler_regions)

    @classmethod
    def parse(cls, text: str) -> TorchProfilerConfig:
        """Parse a comma-separated list of names, short names and wildcards; empty for all regions.

        Unknown names are reported and skipped.

        Raises:
            ValueError: no name is left.

        Examples:
            >>> TorchProfilerConfig.parse("model_loading").regions
            {'profiler_region_model_loading': True}
        """
        tokens = [normalise(word) for word in split_list(text)]
        if not tokens or "all" in tokens:
            return cls({region.name: True for region in list_profiler_regions()}, others=True)
        selected: dict[str, bool] = {}
        registered = list_profiler_regions()
        available = ", ".join(region.short for region in registered)
        for token in tokens:
            pattern = RegionSelection(registered=False, patterns=(token,))
            matches = [region.name for region in registered if pattern.matches(*names_of(region))]
            if not matches:
                say_once(
                    f"OTEL_TORCH_PROFILER_REGIONS: unknown region {token!r} is skipped; "
                    f"use any of {available}"
                )
            selected.update(dict.fromkeys(matches, True))
        if not selected:
            raise ValueError(
                f"OTEL_TORCH_PROFILER_REGIONS={text!r} names no registered region; "
                f"use any of {available}"
            )
        return cls(selected)


def _mark_name(region: str, scope: Scope | None) -> str:
    plain = PLAIN_NAMES.get(region)
    return plain if scope is not None and scope.name == plain else MARK + region


class TorchProfilerController:
    """Switches the collection of a torch profiler on in selected regions and off outside of them.

    Kineto sees one thread, the one that started the profiler: regions of other threads collect
    nothing. All regions are spans as usual.

    Args:
        profiler: a `torch.profiler.profile`, or None.
        activities: the activities to switch.
        config: the regions; None reads them from the environment.
        disabled: make a controller that never collects and is not the global one.
        trace_dir: folder of the summary. With a folder the profiler is started by the first
            selected region, in its thread; without one it must be running already.

    Raises:
        RuntimeError: there is a global controller already.
        ValueError: as `TorchProfilerConfig.from_env`.
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
        # a started profiler collects at first
        self._is_started = self._is_collecting = trace_dir is None
        if disabled:
            self._is_started = self._is_collecting = False
            return
        if get_global_controller() is not None:
            raise RuntimeError(
                "this process already has a torch profiler controller; use get_global_controller()"
            )
        self._config = config or TorchProfilerConfig.from_env()
        self._profiler = profiler
        set_global_controller(self)

    @property
    def activities(self) -> tuple[ProfilerActivity, ...]:
        """The activities that the controller switches."""
        return self._activities

    @property
    def has_profiler(self) -> bool:
        """Whether the controller has a profiler that is not stopped."""
        return self._profiler is not None

    @property
    def is_enabled(self) -> bool:
        """Whether the profiler is collecting now."""
        return self._profiler is not None and self._is_collecting

    def is_region_enabled(self, region: str) -> bool:
        """Return whether the profiler collects in `region`, by its long or short name."""
        registered = resolve_profiler_region(region)
        return registered is not None and self._is_selected(registered.name)

    def region(self, region: str) -> Any:
        """Return a context manager for `region` in which this profiler collects if selected."""
        return _regions.region(region, collector=self if self.has_profiler else None)

    def start(self) -> None:
        """Start the profiler in this thread, paused until a selected region is entered."""
        with self._lock:
            if self._profiler is None:
                return
            self._profiler.start()
            self._thread = threading.get_ident()
            self._is_started = True
            self._profiler.toggle_collection_dynamic(False, self._activities)
            self._is_collecting = False

    def stop(self) -> None:
        """Stop the profiler, write its trace and summary, and unset the global controller.

        Never raises. A second call does nothing.
        """
        with self._lock:
            profiler, self._profiler = self._profiler, None
            self._depth, self._is_collecting = 0, False
        if get_global_controller() is self:
            set_global_controller(None)
        atexit.unregister(self.stop)
        if profiler is None:
            return
        if not self._is_started:
            selected = ", ".join(name for name, on in self._config.regions.items() if on)
            say(
                f"the torch profiler collected nothing: no selected region was entered ({selected})"
            )
            return
        if self._trace_dir is not None and threading.get_ident() != self._thread:
            say(
                "the torch profiler's trace is lost: call the controller's stop() in the thread "
                "that entered the first profiled region"
            )
        try:
            profiler.stop()
            if self._trace_dir is not None:
                _write_summary(profiler, Path(self._trace_dir))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            say(f"the torch profiler's trace could not be written to {self._trace_dir}: {reason}")

    def prepare(self, region: str) -> None:
        """Start the profiler at the first selected region, before the region's clock starts."""
        if self._is_started or not self._is_selected(region):
            return
        try:
            with self._lock:
                if not self._is_started:
                    self.start()
        except Exception as error:
            self._stop_failed(error)

    def enter(self, region: str, scope: Scope | None) -> Any:
        """Collect if `region` is selected, and mark it in the trace."""
        if not self._is_selected(region):
            return None
        if threading.get_ident() != self._thread:
            say_once(
                "the torch profiler sees only the thread that started it: "
                f"its trace lacks {region!r} of another thread"
            )
            return None
        try:
            with self._lock:
                if self._profiler is None:
                    return None
                self._depth += 1
                if self._depth == 1:
                    self._switch(True, scope)
            mark: Any = torch.profiler.record_function(_mark_name(region, scope))
            mark.__enter__()
            return mark
        except Exception as error:
            self._stop_failed(error)
            return None

    def leave(self, mark: Any, scope: Scope | None) -> None:
        """End the region's mark, also after `stop`; stop collecting at the outermost region."""
        try:
            mark.__exit__(None, None, None)
            with self._lock:
                if self._profiler is None:
                    return
                self._depth -= 1
                if self._depth == 0:
                    self._switch(False, scope)
        except Exception as error:
            self._stop_failed(error)

    def _is_selected(self, region: str) -> bool:
        return self._profiler is not None and self._config.regions.get(region, self._config.others)

    def _switch(self, on: bool, scope: Scope | None) -> None:
        if self._is_collecting == on:
            return
        event = ENABLE if on else DISABLE
        # both marks are set while collection is on, otherwise the trace would lack them
        if not on:
            _mark(event)
        self._profiler.toggle_collection_dynamic(on, self._activities)
        self._is_collecting = on
        if on:
            _mark(event)
        if scope is not None:
            scope.events.append((time.time_ns(), event, {}))

    def _stop_failed(self, error: Exception) -> None:
        say_once(f"the torch profiler failed and is stopped: {type(error).__name__}: {error}")
        self.stop()

    def _reset_in_child(self) -> None:
        """In a forked child, leave the profiler to the parent."""
        self._lock = threading.RLock()
        self._profiler, self._depth, self._is_collecting = None, 0, False
        atexit.unregister(self.stop)
        if get_global_controller() is self:
            set_global_controller(None)


def _mark(event: str) -> None:
    with torch.profiler.record_function(event):
        pass


class _QuietProfile(torch.profiler.profile):
    """A profiler that switches collection without a warning of Kineto each time.

    On a CPU it switches the thread's observers: Kineto's own switch warns, or takes 0.5 ms if an
    absent GPU is named to avoid the warning. With a GPU, Kineto warns unless every kind is named.
    """

    def toggle_collection_dynamic(
        self, enable: bool, activities: Iterable[ProfilerActivity]
    ) -> None:
        selected = set(activities)
        switch = getattr(torch.autograd, "_enable_record_function", None)
        if selected == {ProfilerActivity.CPU} and switch is not None:
            switch(enable)
        else:
            super().toggle_collection_dynamic(
                enable, selected | {ProfilerActivity.CUDA, ProfilerActivity.XPU}
            )

    def stop(self) -> None:
        switch = getattr(torch.autograd, "_enable_record_function", None)
        if switch is not None:
            switch(True)
        super().stop()


def available_activities() -> tuple[ProfilerActivity, ...]:
    """Return CPU, and CUDA if available."""
    return (
        (ProfilerActivity.CPU, ProfilerActivity.CUDA)
        if torch.cuda.is_available()
        else (ProfilerActivity.CPU,)
    )


def get_global_controller() -> TorchProfilerController | None:
    """Return the controller that all regions of this process use, or None."""
    controller: TorchProfilerController | None = _regions.get_collector()
    return controller


def set_global_controller(controller: TorchProfilerController | None) -> None:
    """Use `controller` in all regions of this process; None for no controller."""
    _regions.set_collector(controller)


def get_or_create_profiler(trace_dir: str | None) -> TorchProfilerController:
    """Return the global controller; make one that writes traces to `trace_dir` if there is none.

    The profiler starts at the first selected region. `stop` writes the trace and
    `summary_rank<RANK>.txt` and `.json`, at the latest when the process exits.

    Returns:
        A disabled controller, which is not the global one, without a folder, if no named region is
        registered, or if the folder cannot be made.
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
    at_fork.register(ForkOrder.PROFILER, in_child=controller._reset_in_child)
    return controller


def close() -> None:
    """Stop the global controller, if any, which writes its trace and summary."""
    controller = get_global_controller()
    if controller is not None:
        controller.stop()


def _make_profile(
    settings: Settings, folder: Path, activities: tuple[ProfilerActivity, ...]
) -> torch.profiler.profile:
    def export(profiler: Any) -> None:
        worker = f"rank{job.this_job().rank}_{os.getpid()}"
        torch.profiler.tensorboard_trace_handler(str(folder), worker, use_gzip=True)(profiler)

    # no schedule: nothing calls the profiler's step(), so a schedule would never start to record
    return _QuietProfile(
        activities=activities,
        record_shapes=settings.profiler_record_shapes,
        profile_memory=settings.profiler_with_profile_memory,
        with_stack=settings.profiler_with_stack,
        with_flops=settings.profiler_with_flops,
        on_trace_ready=export,
    )


def _write_summary(profiler: Any, folder: Path) -> None:
    """Write the time of each operator by input shape, as a table and as JSON."""
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
