"""Find which values of a port correspond to which values of the reference, in the order in which
the port computes them.

One forward of each model is recorded in a temporary folder and compared as `otel-torch diff` does.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from otel_torch import bootstrap, session
from otel_torch.parity.compare import compare
from otel_torch.parity.map_file import load_map
from otel_torch.parity.pairing_finder import PairingFinder
from otel_torch.process import console
from otel_torch.recording.isolation_pairing import Pairing
from otel_torch.recording.reader import RecordingError, iterate_rows

ModelCaller = Callable[[nn.Module], Any]
_Event = tuple[str, str, int]  # module; "inputs" or "output"; index of the call


class TensorLocation(NamedTuple):
    """Where a tensor occurs: in the inputs or the output of a module's call, under a label."""

    module: str
    field: str
    call: int
    label: str

    @property
    def event(self) -> _Event:
        """The module, field and call, without the label."""
        return self.module, self.field, self.call


class PairedEvent(NamedTuple):
    """The inputs or the output of a call of the port, and where its tensors are in the reference.

    `tensors` maps labels to locations in the reference. `uncompared` lists the port's modules that
    returned since the previous paired event without any tensor that has a counterpart.
    """

    module: str
    field: str
    call: int
    tensors: dict[str, TensorLocation]
    uncompared: list[str]

    @property
    def event(self) -> _Event:
        """The module, field and call."""
        return self.module, self.field, self.call


def find_paired_events(
    reference: tuple[nn.Module, ModelCaller],
    port: tuple[nn.Module, ModelCaller],
    map: str | Path | None,
) -> tuple[list[PairedEvent], list[str]]:
    """Return the port's paired events in its order, and its modules without a counterpart.

    Each model comes with the function that calls it. Raises ValueError if nothing corresponds.
    """
    with tempfile.TemporaryDirectory(prefix="otel_torch-lockstep-") as folder_name:
        folder = Path(folder_name)
        reference_path, port_path = folder / "reference.jsonl", folder / "port.jsonl"
        _record(reference_path, *reference)
        _record(port_path, *port)
        finder = PairingFinder()
        loaded_map = None if map is None else load_map(map)
        try:
            report = compare(reference_path, port_path, map=loaded_map, pairing=finder)
        except RecordingError as error:
            reason = _hide_folder(folder, str(error))
            raise ValueError(f"nothing can be compared: {reason}") from None
        pairing = finder.pairing()
        if not pairing.slots:
            reason = _hide_folder(folder, report.reason or report.verdict)
            raise ValueError(f"nothing corresponds in the two models: {reason}")
        return _read_events(port_path, pairing)


def _record(path: Path, model: nn.Module, call_model: ModelCaller) -> None:
    if session.current() is not None:
        raise RuntimeError(
            "lockstep records a forward of each model itself: call otel_torch.stop() first"
        )
    with _clean_environment(), console.suppress(str(path)):
        try:
            bootstrap.start(jsonl=str(path), capture="parity", signals="", regions="")
            call_model(model)
        finally:
            bootstrap.stop()


@contextlib.contextmanager
def _clean_environment() -> Iterator[None]:
    """Unset all variables that configure recording, and restore them afterwards."""
    saved = _pop_variables()
    try:
        yield
    finally:
        _pop_variables()
        os.environ.update(saved)


def _pop_variables() -> dict[str, str]:
    names = [name for name in os.environ if name.startswith(("OTEL_", "FASTVIDEO_T"))]
    return {name: os.environ.pop(name) for name in names}


def _read_events(path: Path, pairing: Pairing) -> tuple[list[PairedEvent], list[str]]:
    events: dict[_Event, PairedEvent] = {}
    is_paired: dict[str, bool] = {}
    uncompared: dict[str, None] = {}
    for row in iterate_rows(path, lambda warning: None):
        if row.get("phase") != "forward":
            continue
        module, label, call = str(row["module"]), str(row["tensor"]), int(row["call"])
        slot = str(row["model"]), module, label
        match = pairing.partner(slot, int(row["loop"]), int(row["step"]), call)
        is_paired[module] = is_paired.get(module, False) or match is not None
        if match is not None:
            (_, reference_module, reference_label), (_, _, reference_call) = match
            event = module, _field_of(label), call
            if event not in events:
                events[event] = PairedEvent(*event, {}, list(uncompared))
                uncompared.clear()
            field = _field_of(reference_label)
            events[event].tensors[label] = TensorLocation(
                reference_module, field, reference_call, reference_label
            )
        elif _field_of(label) == "output":
            uncompared[module] = None
    unpaired = [module for module, paired in is_paired.items() if not paired]
    return list(events.values()), unpaired


def _field_of(label: str) -> str:
    return "inputs" if label.startswith("in") else "output"


def _hide_folder(folder: Path, text: str) -> str:
    return text.replace(f"{folder}{os.sep}", "").replace(".jsonl", "")
