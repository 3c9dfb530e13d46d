"""A reference and its port, run together: at each module that corresponds the tensors meet, and the
first fault is in hand.

Recordings say where a port goes wrong. With both models at hand nothing has to be recorded in full
and looked at later: the port stands where it differs, with both tensors there, or goes on from the
reference's.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from otel_torch import bootstrap, console, session
from otel_torch.capture.interleave import Interleaver
from otel_torch.capture.interleaved_run import InterleaveError, Run
from otel_torch.capture.structure import replace_leaves
from otel_torch.parity.compare import compare
from otel_torch.parity.mapping import load_map
from otel_torch.parity.pairing_finder import PairingFinder
from otel_torch.parity.tolerance import Tolerance
from otel_torch.recording.isolation_pairing import Pairing
from otel_torch.recording.reader import RecordingError, iterate_rows
from otel_torch.sources.conform_tensor import Stays, fitted
from otel_torch.sources.values import walk, walk_inputs


@dataclass
class Fault:
    """One place where the port makes something wrong of what is right.

    module, tensor, call: in the port; reference_module: in the reference. kind: `output`, the
    module makes it; `input`, the code in front of it does. error: the relative L2 distance; limit:
    what legal arithmetic may cause. reference, port: the tensors, the reference's in the port's
    shape and type; as it is, with an infinite error, where none fits. unmet: the port's modules
    whose outputs went into it, or may have, and were compared with nothing.
    """

    module: str
    tensor: str
    call: int
    kind: str
    reference_module: str
    error: float
    limit: float
    reference: Tensor
    port: Tensor
    unmet: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        module, theirs = self.module or "the root", self.reference_module or "the root"
        where = f"{module} ({theirs} of the reference), {self.tensor}, call {self.call}"
        made = "made by this module" if self.kind == "output" else "made in front of this module"
        unmet = f"; compared with nothing on the way: {', '.join(self.unmet)}" if self.unmet else ""
        return f"{where}: {made}; off by {self.error:.2g}, where {self.limit:.2g} is legal{unmet}"


@dataclass
class Lockstep:
    """What came of it. faults: in the port's order. compared: how many tensors were; alone: modules
    of the port without a counterpart. result: what the port returned, None where it was stopped at
    its first fault.
    """

    faults: list[Fault] = field(default_factory=list)
    compared: int = 0
    alone: list[str] = field(default_factory=list)
    result: Any = None

    def __str__(self) -> str:
        found = "\n".join(map(str, self.faults)) or "no fault"
        alone = f"; {len(self.alone)} modules of the port have no counterpart" if self.alone else ""
        return f"{found}\n{self.compared} tensors compared{alone}"


class _Meeting(NamedTuple):
    """An event of the port, and what its tensors correspond to: label -> (module, what, call,
    label) of the reference. unmet: modules that returned something since the event before, of which
    nothing corresponds to anything.
    """

    module: str
    what: str
    call: int
    tensors: dict[str, tuple[str, str, int, str]]
    unmet: list[str]


def lockstep(
    reference: nn.Module,
    port: nn.Module,
    inputs: Any,
    *,
    port_inputs: Any = None,
    heal: bool = False,
    rtol: float | None = None,
    map: str | Path | None = None,
) -> Lockstep:
    """Run `reference` and `port` on the same inputs, module beside module, and find where the port
    goes wrong.

    inputs: a tensor, a tuple of arguments, a dict of keyword arguments, or a function that calls
    the model it is given; port_inputs: likewise, where the port's forward takes others. Names need
    not agree: what corresponds is found as `otel-torch diff` finds it, from one forward of each
    that is recorded in a temporary folder; `map` is its TOML file. rtol: instead of what the
    coarser dtype allows. Wherever the tensors meet, the port goes on from the reference's, so each
    module's own error stands alone. At a fault it stops; with `heal` it goes on from there too, and
    lists all.

    Runs without gradients. Raises ValueError where nothing corresponds, RuntimeError while
    recording is going on, and what the models raise. Two models that do not fit on a device
    together: `enable_layerwise_offload`.
    """
    first, second = _caller(inputs), _caller(inputs if port_inputs is None else port_inputs)
    with torch.no_grad():
        with tempfile.TemporaryDirectory(prefix="otel_torch-lockstep-") as folder:
            meetings, alone = _find_meetings(Path(folder), (reference, first), (port, second), map)
        return _Together(Tolerance(rtol), heal, Lockstep(alone=alone)).run(
            Run(Interleaver(reference), first, (reference,), {}),
            Run(Interleaver(port), second, (port,), {}),
            meetings,
        )


def _caller(inputs: Any) -> Callable[[nn.Module], Any]:
    if callable(inputs) and not isinstance(inputs, Tensor):
        function: Callable[[nn.Module], Any] = inputs
        return function

    def call(model: nn.Module) -> Any:
        if isinstance(inputs, Mapping):
            return model(**_copied(inputs))
        return model(*_copied(inputs if isinstance(inputs, (tuple, list)) else (inputs,)))

    return call


def _copied(inputs: Any) -> Any:
    """Inputs that one model may change in place while the other still needs them."""
    return replace_leaves(inputs, Tensor, torch.clone)


# -- what corresponds
# --------------------------------------------------------------------------------------------------


def _find_meetings(
    folder: Path,
    reference: tuple[nn.Module, Callable[[nn.Module], Any]],
    port: tuple[nn.Module, Callable[[nn.Module], Any]],
    map: str | Path | None,
) -> tuple[list[_Meeting], list[str]]:
    paths = folder / "reference.jsonl", folder / "port.jsonl"
    for path, (model, call) in zip(paths, (reference, port), strict=True):
        _record(path, model, call)
    finder = PairingFinder()
    try:
        report = compare(*paths, map=None if map is None else load_map(map), pairing=finder)
    except RecordingError as error:
        raise ValueError(f"nothing can be compared: {_without(folder, str(error))}") from None
    pairing = finder.pairing()
    if not pairing.slots:
        raise ValueError(
            f"nothing corresponds in the two models: {_without(folder, report.reason or report.verdict)}"
        )
    return _meetings(paths[1], pairing)


def _record(path: Path, model: nn.Module, call: Callable[[nn.Module], Any]) -> None:
    if session.current() is not None:
        raise RuntimeError(
            "lockstep records a forward of each model itself: call otel_torch.stop() first"
        )
    with _plain_environment(), console.hidden(str(path)):
        try:
            bootstrap.start(jsonl=str(path), capture="parity", signals="", regions="")
            call(model)
        finally:
            bootstrap.stop()


@contextlib.contextmanager
def _plain_environment() -> Iterator[None]:
    """Inside, no variable selects, samples or sends; afterwards all are what they were."""

    def take() -> dict[str, str]:
        ours = [name for name in os.environ if name.startswith(("OTEL_", "FASTVIDEO_T"))]
        return {name: os.environ.pop(name) for name in ours}

    before = take()
    try:
        yield
    finally:
        take()
        os.environ.update(before)


def _meetings(path: Path, pairing: Pairing) -> tuple[list[_Meeting], list[str]]:
    """The port's events in its order, each with what it corresponds to."""
    found: dict[tuple[str, str, int], _Meeting] = {}
    modules: dict[str, bool] = {}
    unmet: dict[str, None] = {}
    for row in iterate_rows(path, lambda warning: None):
        if row.get("phase") != "forward":
            continue
        module, label, call = str(row["module"]), str(row["tensor"]), int(row["call"])
        partner = pairing.partner(
            (str(row["model"]), module, label), int(row["loop"]), int(row["step"]), call
        )
        modules[module] = modules.get(module, False) or partner is not None
        if partner is not None:
            (_, their_module, their_label), (_, _, their_call) = partner
            event = module, _what(label), call
            if event not in found:
                found[event] = _Meeting(*event, {}, list(unmet))
                unmet.clear()
            found[event].tensors[label] = their_module, _what(their_label), their_call, their_label
        elif _what(label) == "output":
            unmet[module] = None
    return list(found.values()), [module for module, paired in modules.items() if not paired]


def _what(label: str) -> str:
    return "inputs" if label.startswith("in") else "output"


def _without(folder: Path, text: str) -> str:
    return text.replace(f"{folder}{os.sep}", "").replace(".jsonl", "")


# -- side by side
# --------------------------------------------------------------------------------------------------


@dataclass
class _Together:
    tolerance: Tolerance
    heal: bool
    found: Lockstep

    def run(self, reference: Run, port: Run, meetings: list[_Meeting]) -> Lockstep:
        # a tensor of the reference may belong to several places of the port, however far apart
        awaited = Counter(theirs[:3] for meeting in meetings for theirs in meeting.tensors.values())
        reference.keep(awaited)
        with reference, port:
            for meeting in meetings:
                self._meet(reference, port, meeting)
                for theirs in meeting.tensors.values():
                    awaited[theirs[:3]] -= 1
                    if not awaited[theirs[:3]]:
                        reference.forget(*theirs[:3])
                port.forget(*meeting[:3])
                if self.found.faults and not self.heal:
                    return self.found
            self.found.result = port.result
        return self.found

    def _meet(self, reference: Run, port: Run, meeting: _Meeting) -> None:
        try:
            own = port.ask(*meeting[:3])
        except InterleaveError:
            return  # healed, it goes another way than when it was recorded
        tensors = dict(walk_inputs(*own) if meeting.what == "inputs" else walk(own, "out"))
        right: dict[int, Tensor] = {}
        for label, (module, what, call, their_label) in meeting.tensors.items():
            theirs = reference.ask(module, what, call)
            expected = dict(walk_inputs(*theirs) if what == "inputs" else walk(theirs, "out")).get(
                their_label
            )
            if label in tensors and expected is not None:
                healed = self._compare(meeting, label, module, expected, tensors[label])
                if healed is not None:
                    right[id(tensors[label])] = healed
        if right:
            port.put(
                *meeting[:3],
                replace_leaves(own, Tensor, lambda tensor: right.get(id(tensor), tensor)),
            )

    def _compare(
        self, meeting: _Meeting, label: str, module: str, expected: Tensor, own: Tensor
    ) -> Tensor | None:
        """What the port goes on with; None for its own."""
        self.found.compared += 1
        limit = self.tolerance.base((str(expected.dtype), str(own.dtype)))
        healed: Tensor | None = None
        error = float("inf")
        with contextlib.suppress(Stays):
            healed = fitted(expected, own)
            error = _distance(healed, own)
        if not error <= limit:
            kind = "output" if meeting.what == "output" else "input"
            right = expected if healed is None else healed
            self.found.faults.append(
                Fault(
                    meeting.module,
                    label,
                    meeting.call,
                    kind,
                    module,
                    error,
                    limit,
                    right,
                    own.clone(),
                    meeting.unmet,
                )
            )
        return healed


def _distance(right: Tensor, own: Tensor) -> float:
    """The relative L2 distance; not finite where only one of them is not."""
    kind = torch.complex128 if right.is_complex() else torch.float64
    one, other = right.to(kind), own.to(kind)
    if torch.equal(one, other) or torch.equal(one.nan_to_num(), other.nan_to_num()):
        return 0.0
    return float((one - other).norm() / one.norm().clamp_min(1e-30))
