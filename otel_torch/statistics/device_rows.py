"""Rows on a device: side by side in memory that is there already, so that a step's rows are one
copy to the host.

A tensor a row would be an allocation a record, and a copy each; and a copy that is waited for stops
the program until the device has done all that was queued before it.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from otel_torch.statistics.graph_capture import beside_captures

# numbers in one piece of memory: rows of a thousand tensors' sums, 64 KiB
_PIECE = 8192


class _Memory:
    """The piece that rows of one device and type are taken from. A piece that is used up lives as
    long as its rows.
    """

    def __init__(self) -> None:
        self.piece: Tensor | None = None
        self.used = 0
        self.streams: dict[int, Any] = {}  # those that write rows which nobody has fetched yet


_memories: dict[tuple[torch.device, torch.dtype], _Memory] = {}
_lock = threading.Lock()


def take(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for one row: shape (size,), not initialised. Waits for nothing."""
    with _lock:
        memory = _memories.setdefault((device, dtype), _Memory())
        if memory.piece is None or memory.used + size > memory.piece.numel():
            with torch.inference_mode(False):
                memory.piece = torch.empty(max(size, _PIECE), dtype=dtype, device=device)
            memory.used = 0
        row = memory.piece.narrow(0, memory.used, size)
        memory.used += size
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            if memory.streams.setdefault(stream.stream_id, stream) is stream:
                memory.piece.record_stream(
                    stream
                )  # it must not be given to others before this stream is done with it
        return row


def _streams_of(device: torch.device) -> list[Any]:
    """The streams that have written rows on `device` since this was asked last."""
    found: dict[int, Any] = {}
    with _lock:
        for (where, _), memory in _memories.items():
            if where == device:
                found |= memory.streams
                memory.streams = {}
    return list(found.values())


class Copy:
    """Rows of one device and type on their way to the host. The rows may lie anywhere; neighbours
    are copied at once.
    """

    def __init__(self, rows: list[Tensor]) -> None:
        self._rows = rows
        self._device = rows[0].device
        self._host: dict[
            int, tuple[int, Tensor]
        ] = {}  # by storage: where in it the copy begins, and the copy
        self._arrival: Any = None
        if self._device.type == "cuda":
            with beside_captures():
                self._begin()

    def _begin(self) -> None:
        """Queue the copies behind everything that writes the rows, in a stream of our own."""
        stream = _copy_stream(self._device)
        for writer in _streams_of(self._device):
            stream.wait_stream(writer)
        with torch.cuda.stream(stream):
            for key, (start, memory) in _pieces(self._rows).items():
                host = torch.empty(
                    memory.numel(), dtype=memory.dtype, device="cpu", pin_memory=True
                )
                self._host[key] = start, host.copy_(memory, non_blocking=True)
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrival.record(stream)

    def ready(self) -> bool:
        """Whether `fetch` would return at once; of a device whose copies cannot be watched,
        always.
        """
        if self._arrival is None:
            return True
        with beside_captures():
            return bool(self._arrival.query())

    def fetch(self) -> list[list[float]]:
        """The rows as floats, in order. Raises what the device raises."""
        if self._arrival is not None:
            with beside_captures():
                self._arrival.synchronize()
        else:
            self._host = {
                key: (start, memory.cpu()) for key, (start, memory) in _pieces(self._rows).items()
            }
        numbers = {key: (start, host.tolist()) for key, (start, host) in self._host.items()}
        fetched = []
        for row in self._rows:
            start, of_piece = numbers[_key(row)]
            first = row.storage_offset() - start
            fetched.append(of_piece[first : first + row.numel()])
        return fetched


def _key(row: Tensor) -> int:
    return row.untyped_storage().data_ptr()


def _pieces(rows: list[Tensor]) -> dict[int, tuple[int, Tensor]]:
    """By storage, the stretch that all rows in it lie in: where it begins, and its numbers."""
    stretches: dict[int, tuple[int, int, Tensor]] = {}
    for row in rows:
        first = int(row.storage_offset())
        last = first + row.numel()
        low, high, _ = stretches.get(_key(row), (first, last, row))
        stretches[_key(row)] = min(low, first), max(high, last), row
    return {
        key: (low, row.as_strided((high - low,), (1,), low))
        for key, (low, high, row) in stretches.items()
    }


_copy_streams: dict[torch.device, Any] = {}


def _copy_stream(device: torch.device) -> Any:
    stream = _copy_streams.get(device)
    if stream is None:
        stream = _copy_streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
