"""Measures the tensors of a call and adds them to the recorder.

A tensor that is recognized (`identity.py`) is measured only once in a step.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch

from otel_torch import torch_private
from otel_torch.process.console import say_once
from otel_torch.records import PARAMETER_PHASES
from otel_torch.session import Session
from otel_torch.sources.steps import warm_ups
from otel_torch.sources.tensors.copies import can_write_tensors, copy_of
from otel_torch.sources.tensors.identity import Identity
from otel_torch.sources.tensors.tensor_reader import MeasuredTensor, RecordedCall, TensorReader
from otel_torch.sources.tensors.values import argument_name
from otel_torch.statistics.compact_rows import unpack
from otel_torch.statistics.measure import Measurement, measure
from otel_torch.statistics.row_layout import NONFINITE, RANGE
from otel_torch.statistics.table import columns_for

# a CPU tensor with fewer elements is measured faster than it is recognized
_RECOGNIZE_MIN = 2**15


class TensorMeasurer:
    """Measures tensors for one session."""

    def __init__(self, session: Session, reader: TensorReader) -> None:
        settings = session.settings
        self._recorder = session.recorder
        self._identities = reader.identities
        self._parity = reader.parity
        self._inputs = "inputs" in settings.capture
        self.columns = tuple(dict.fromkeys((*columns_for(reader.stats), *RANGE)))
        self.keeps_tensors = settings.tensors is not None and can_write_tensors()

    def add(
        self,
        call: RecordedCall,
        tensors: Iterable[tuple[str, torch.Tensor]],
        parameter_names: Sequence[str] | None = None,
        recognize: bool = True,
    ) -> bool:
        """Measure the (label, tensor) pairs of a call. Never raises.

        Returns whether a tensor is known to have a NaN or Inf; those on a device are not known yet.

        Args:
            parameter_names: if the tensors are inputs, the parameter names of forward.
            recognize: whether a tensor seen before may be recognized. One of a warm-up never is:
                the row of its first sight has its sketch, and comparisons pass over that row.
        """
        recognize = recognize and call.phase != warm_ups.PHASE
        now = time.time_ns()
        columns, has_nonfinite = self.columns, False
        if self._parity and torch_private.has_other_ranks():
            columns = (*columns, "part_sketches")
        if call.phase in PARAMETER_PHASES and self._parity:
            columns = (*columns, "row_sketch")
        if "rows" in columns and call.phase in PARAMETER_PHASES:
            columns = tuple(name for name in columns if name != "rows")  # are no tokens
        for label, tensor in tensors:
            try:
                identity, argument = None, None
                if self._parity or (self._inputs and _is_worth_recognizing(tensor)):
                    identity = self._identities.of(tensor) if recognize else Identity(None, True)
                    if parameter_names is not None:
                        argument = argument_name(label, parameter_names)
                        call.inputs = (call.inputs or frozenset()) | {identity}
                    elif call.inputs is None or identity in call.inputs or call.phase == "update":
                        # a custom kernel of the module may have changed its input in place, and an
                        # optimizer a parameter, uncounted
                        identity.measurement = None
                measurement = self._measure(tensor, columns, identity)
                row = measurement.row
                if row.__class__ is list and row[NONFINITE]:
                    has_nonfinite = True
                copy = self._copy(tensor) if self.keeps_tensors else None
                self._recorder.add(
                    MeasuredTensor(
                        call,
                        label,
                        measurement,
                        now,
                        copy,
                        identity if self._parity else None,
                        argument,
                    )
                )
            except Exception as error:
                self.report_failure(call.model, error)
        return has_nonfinite

    @staticmethod
    def _measure(
        tensor: torch.Tensor, columns: tuple[str, ...], identity: Identity | None
    ) -> Measurement:
        if identity is None or not identity.counts_changes:
            return measure(tensor, columns)
        kept = identity.measurement
        if isinstance(kept, bytes):
            return unpack(kept).measurement
        if kept is None:
            kept = identity.measurement = measure(tensor, columns)
        return kept

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor | None:
        copy = copy_of(tensor)
        if copy is None:
            self._recorder.losses.count("tensor", "unreadable")
        return copy

    def report_unwalked(self, model: str, kind: str) -> None:
        """Count and log an output in which no tensor was found, though its class may hold some."""
        if torch_private.is_symbolically_traced():
            return  # the program makes a graph: these are no numbers
        self._recorder.losses.count("record", "not_walked")
        say_once(
            f"{model}: outputs of class {kind} have no record: their tensors are not found; "
            "return them in attributes, a dict, tuple or dataclass"
        )

    def report_failure(self, model: str, error: Exception) -> None:
        """Count and log a tensor that could not be recorded."""
        self._recorder.losses.count("record", "error")
        say_once(f"{model}: a tensor was not recorded: {type(error).__name__}: {error}")


def _is_worth_recognizing(tensor: torch.Tensor) -> bool:
    """Return whether recognizing a tensor is faster than measuring it again."""
    return not (torch_private.is_plain_memory(tensor) and tensor.numel() < _RECOGNIZE_MIN)
