"""Records what an unmodified torch program does, and the values of its tensors.

This is the list of public names. Each is loaded when it is first used: the interpreter's start-up
file imports this module in every enabled process, so it imports neither torch nor OpenTelemetry.
"""

TYPE_CHECKING = False  # importing it from typing costs time; type checkers know the name
if TYPE_CHECKING:
    __version__: str
    from otel_torch.bisecting.callables import bisect as bisect
    from otel_torch.bootstrap import flush as flush
    from otel_torch.bootstrap import start as start
    from otel_torch.bootstrap import stop as stop
    from otel_torch.capture.activation_trace import ActivationStatHook as ActivationStatHook
    from otel_torch.capture.activation_trace import ActivationTraceManager as ActivationTraceManager
    from otel_torch.capture.activation_trace import JsonlSink as JsonlSink
    from otel_torch.capture.activation_trace import (
        attach_activation_trace as attach_activation_trace,
    )
    from otel_torch.capture.activation_trace import (
        detach_activation_trace as detach_activation_trace,
    )
    from otel_torch.capture.cache import Cache as Cache
    from otel_torch.capture.cache_dict import CacheDict as CacheDict
    from otel_torch.capture.interleaving.interleave import Interleaver as Interleaver
    from otel_torch.capture.interleaving.interleave import interleave as interleave
    from otel_torch.capture.interleaving.lockstep import lockstep as lockstep
    from otel_torch.capture.offload import enable_layerwise_offload as enable_layerwise_offload
    from otel_torch.capture.offloaded_layer import LayerwiseOffloadHook as LayerwiseOffloadHook
    from otel_torch.capture.offloaded_layer import LayerwiseOffloadState as LayerwiseOffloadState
    from otel_torch.capture.stash import Event as Event
    from otel_torch.capture.stash import Stash as Stash
    from otel_torch.capture.stash import StashFn as StashFn
    from otel_torch.capture.stash import StashValueFn as StashValueFn
    from otel_torch.capture.stash import default_stash as default_stash
    from otel_torch.capture.stash import default_stash_value as default_stash_value
    from otel_torch.capture.stash import get_stash_fn as get_stash_fn
    from otel_torch.capture.tensor_structure import rmap_tensor as rmap_tensor
    from otel_torch.capture.track import Tracker as Tracker
    from otel_torch.capture.track import to_frame as to_frame
    from otel_torch.capture.track import track as track
    from otel_torch.instrumentor import OtelTorchInstrumentor as OtelTorchInstrumentor
    from otel_torch.parity.diff import diff as diff
    from otel_torch.recording.reader import read_recording as read_recording
    from otel_torch.regions.entry import profile_region as profile_region
    from otel_torch.regions.entry import profiler_region as profiler_region
    from otel_torch.regions.entry import region as region
    from otel_torch.regions.nvtx import nvtx_range as nvtx_range
    from otel_torch.regions.profiler import TorchProfilerConfig as TorchProfilerConfig
    from otel_torch.regions.profiler import TorchProfilerController as TorchProfilerController
    from otel_torch.regions.profiler import get_global_controller as get_global_controller
    from otel_torch.regions.profiler import get_or_create_profiler as get_or_create_profiler
    from otel_torch.regions.profiler import set_global_controller as set_global_controller
    from otel_torch.regions.registry import ProfilerRegion as ProfilerRegion
    from otel_torch.regions.registry import list_profiler_regions as list_profiler_regions
    from otel_torch.regions.registry import register_profiler_region as register_profiler_region
    from otel_torch.regions.registry import resolve_profiler_region as resolve_profiler_region
    from otel_torch.scanning.scan import scan as scan
    from otel_torch.sources.modules.hooks import ForwardHook as ForwardHook
    from otel_torch.sources.modules.hooks import ModuleHookManager as ModuleHookManager
    from otel_torch.sources.nonfinite.error import NonFiniteError as NonFiniteError
    from otel_torch.sources.steps.trace_step import current_step_idx as current_step_idx
    from otel_torch.sources.steps.trace_step import trace_step as trace_step

# Module -> its public names. The imports above repeat this for type checkers.
_HOMES = {
    "bootstrap": ("start", "stop", "flush"),
    "instrumentor": ("OtelTorchInstrumentor",),
    "sources.steps.trace_step": ("trace_step", "current_step_idx"),
    "sources.modules.hooks": ("ForwardHook", "ModuleHookManager"),
    "sources.nonfinite.error": ("NonFiniteError",),
    "capture.activation_trace": (
        "ActivationStatHook",
        "JsonlSink",
        "ActivationTraceManager",
        "attach_activation_trace",
        "detach_activation_trace",
    ),
    "regions.registry": (
        "ProfilerRegion",
        "register_profiler_region",
        "resolve_profiler_region",
        "list_profiler_regions",
    ),
    "regions.entry": ("region", "profiler_region", "profile_region"),
    "regions.nvtx": ("nvtx_range",),
    "regions.profiler": (
        "TorchProfilerConfig",
        "TorchProfilerController",
        "get_or_create_profiler",
        "get_global_controller",
        "set_global_controller",
    ),
    "capture.cache": ("Cache",),
    "capture.cache_dict": ("CacheDict",),
    "capture.interleaving.interleave": ("interleave", "Interleaver"),
    "capture.interleaving.lockstep": ("lockstep",),
    "capture.offload": ("enable_layerwise_offload",),
    "capture.offloaded_layer": ("LayerwiseOffloadHook", "LayerwiseOffloadState"),
    "bisecting.callables": ("bisect",),
    "scanning.scan": ("scan",),
    "capture.stash": (
        "Event",
        "Stash",
        "StashFn",
        "StashValueFn",
        "default_stash",
        "default_stash_value",
        "get_stash_fn",
    ),
    "capture.tensor_structure": ("rmap_tensor",),
    "capture.track": ("Tracker", "to_frame", "track"),
    "parity.diff": ("diff",),
    "recording.reader": ("read_recording",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
# Modules that are useful to a program that never imports torch.
_WITHOUT_TORCH = frozenset(
    {
        "bootstrap",
        "instrumentor",
        "regions.registry",
        "scanning.scan",
        "parity.diff",
        "recording.reader",
    }
)

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return globals().setdefault(name, _version())  # from now on an ordinary attribute
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    if _HOME[name] not in _WITHOUT_TORCH:
        # First, because an enabled process starts recording when it imports torch, and then needs
        # complete modules: the one asked for would be half loaded.
        importlib.import_module("torch")
    value: object = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # likewise
    return value


def _version() -> str:
    """Return the version that was installed; a build takes it from the last tag."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("otel-torch")
    except PackageNotFoundError:
        return "0+unknown"  # imported from a folder, not installed


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
