"""The table of what a recording can be exported to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from otel_torch.exporting.exported_recording import ExportedRecording, ExportError


@dataclass(frozen=True, slots=True)
class Target:
    """A tool that recordings can be exported to.

    Attributes:
        metavar: What the value of its option is.
        text: What its option does.
        module: Where its functions `check(destination)`, which raises for a destination that
            cannot be used, and `write(recordings, destination)` are. What `write` returns is
            printed by `--json`.
        package: What it needs.
        extra: The extra of otel-torch that installs the package, if any does.
    """

    metavar: str
    text: str
    module: str
    package: str
    extra: str = ""


# by the name of the option
TARGETS: dict[str, Target] = {
    "parquet": Target(
        "FOLDER",
        "write rows, values and metadata as Parquet, partitioned by rank and step",
        "otel_torch.exporting.parquet",
        "duckdb",
        "parquet",
    ),
    "tensorboard": Target(
        "FOLDER",
        "write the training's numbers and the statistics of activations as scalars of "
        "TensorBoard, a run for each rank",
        "otel_torch.exporting.tensorboard",
        "tensorboard",
        "tensorboard",
    ),
    "trackio": Target(
        "PROJECT",
        "add the same scalars to a project in Trackio's local database, a run for each rank",
        "otel_torch.exporting.trackio",
        "trackio",
        "trackio",
    ),
    "pprof": Target(
        "FILE",
        "write the times of regions, steps and modules as a profile for pprof, speedscope, "
        "Pyroscope or Parca",
        "otel_torch.exporting.pprof",
        "google.protobuf",
    ),
}


def check_targets(destinations: dict[str, str]) -> None:
    """Raise for the first target that lacks its package or cannot write to its destination.

    Raises:
        ExportError, OSError: With one line to print.
    """
    for name, destination in destinations.items():
        target = TARGETS[name]
        if find_spec(target.package) is None:
            raise ExportError(
                f"--{name} needs {target.package}: pip install 'otel-torch[{target.extra}]'"
            )
        import_module(target.module).check(destination)


def write_target(
    name: str, recordings: Sequence[ExportedRecording], destination: str
) -> dict[str, Any]:
    """Export recordings to one target; return what was written.

    Raises:
        RecordingError: A recording cannot be read.
        ExportError, OSError: It cannot be written.
    """
    written = import_module(TARGETS[name].module).write(recordings, destination)
    return {"target": name, "destination": destination, **written}
