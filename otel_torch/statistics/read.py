"""Brings the rows of many tensors to the host at once, while the program goes on.

Asking a device for a number makes the program wait for everything that was queued before it. Here
one copy a device is queued behind the rows, and looked at when it has been made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from otel_torch.statistics.device_rows import Copy
from otel_torch.statistics.graph_capture import capturing
from otel_torch.statistics.measure import Measured
from otel_torch.torch_private import unobserved


class Rows:
    """The rows of `measured` on their way to the host; while a CUDA graph is captured they stay
    where they are.
    """

    def __init__(self, measured: Sequence[Measured]) -> None:
        self._rows: list[Sequence[float] | None] = [
            None if isinstance(one.row, Tensor) else one.row for one in measured
        ]
        on_device: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
        for index, one in enumerate(measured):
            if isinstance(one.row, Tensor):
                on_device[one.row.device, one.row.dtype].append(index)
        self._to_copy = [
            (indices, [row for index in indices if isinstance(row := measured[index].row, Tensor)])
            for indices in on_device.values()
        ]
        self._copies: list[tuple[list[int], Copy]] = []
        self.ready()

    @unobserved
    def ready(self) -> bool:
        """Whether `fetch` would return at once. Begins to copy what may be copied now."""
        if not (self._to_copy or self._copies):
            return True
        if capturing():
            return False
        while self._to_copy:
            indices, rows = self._to_copy[-1]
            self._copies.append((indices, Copy(rows)))
            self._to_copy.pop()  # only now: what cannot be copied is no tensor without numbers
        return all(copy.ready() for _, copy in self._copies)

    @unobserved
    def fetch(self) -> list[Sequence[float] | None]:
        """The rows as floats, in order, None where a tensor has none. Raises what the device
        raises, and RuntimeError while a CUDA graph is captured, which to wait for them would spoil.
        """
        if not self.ready() and capturing():
            raise RuntimeError("a CUDA graph is being captured")
        for indices, copy in self._copies:
            for index, numbers in zip(indices, copy.fetch(), strict=True):
                self._rows[index] = numbers
        self._copies = []
        return self._rows


def read_rows(measured: Sequence[Measured]) -> list[Sequence[float] | None]:
    """The rows of `measured` as floats, in order, None where a tensor has none; waits for their
    devices.
    """
    return Rows(measured).fetch()
