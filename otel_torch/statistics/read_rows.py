"""Brings the rows of many tensors to the host together, while the program continues.

Reading a number from a device makes the program wait for all work queued before it. A
`RowTransfer` instead queues one copy per device after the rows, and is polled until that is done.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from otel_torch.statistics.device_rows import RowCopy
from otel_torch.statistics.graph_capture import is_capturing
from otel_torch.statistics.measure import Measurement
from otel_torch.torch_private import unobserved


class RowTransfer:
    """The rows of `measurements` on their way to the host.

    While a CUDA graph is captured no copy starts.
    """

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        self._rows: list[Sequence[float] | None] = [
            None if isinstance(measurement.row, Tensor) else measurement.row
            for measurement in measurements
        ]
        by_device: dict[tuple[torch.device, torch.dtype], tuple[list[int], list[Tensor]]]
        by_device = defaultdict(lambda: ([], []))
        for index, measurement in enumerate(measurements):
            row = measurement.row
            if isinstance(row, Tensor):
                indices, rows = by_device[row.device, row.dtype]
                indices.append(index)
                rows.append(row)
        self._to_copy = list(by_device.values())
        self._copies: list[tuple[list[int], RowCopy]] = []
        self.is_ready()

    @unobserved
    def is_ready(self) -> bool:
        """Return whether `fetch` would return at once. Starts the copies that may start now."""
        if not (self._to_copy or self._copies):
            return True
        if is_capturing():
            return False
        while self._to_copy:
            indices, rows = self._to_copy[-1]
            self._copies.append((indices, RowCopy(rows)))
            # only now, so that rows whose copy raised are tried again and not taken for missing
            self._to_copy.pop()
        return all(copy.is_ready() for _, copy in self._copies)

    @unobserved
    def fetch(self) -> list[Sequence[float] | None]:
        """Return the rows as floats, in order; None for a tensor without a row.

        Raises:
            RuntimeError: a CUDA graph is being captured, which waiting would invalidate; or an
                error of the device.
        """
        if not self.is_ready() and is_capturing():
            raise RuntimeError("a CUDA graph is being captured")
        for indices, copy in self._copies:
            for index, numbers in zip(indices, copy.fetch(), strict=True):
                self._rows[index] = numbers
        self._copies = []
        return self._rows


def read_rows(measurements: Sequence[Measurement]) -> list[Sequence[float] | None]:
    """Return the rows as floats, in order; None for a tensor without a row. Waits for devices."""
    return RowTransfer(measurements).fetch()
