"""Memory for the rows on a device, and their copy to the host.

Rows are placed side by side in one block, so that a step's rows are one copy. A tensor for each row
would be an allocation and a copy per record. A blocking copy would stop the program until the
device has finished all work queued before it.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from otel_torch.statistics.graph_capture import thread_local_capture_mode
from otel_torch.torch_private import current_raw_stream

# numbers in a block: the scalar rows of a thousand tensors, 64 KiB
_BLOCK = 8192


class _RowMemory:
    """The block in which the next rows of one device and dtype are allocated.

    A full block lives as long as its rows. `streams`: those that wrote rows since the last copy, by
    their handles. `recorded`: those that the allocator knows to use the block.
    """

    def __init__(self) -> None:
        self.block: Tensor | None = None
        self.used = 0
        self.streams: dict[int, Any] = {}
        self.recorded: set[int] = set()


_memories: dict[tuple[torch.device, torch.dtype], _RowMemory] = {}
_lock = threading.Lock()


def allocate_row(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialized memory for one row, shape (size,). Waits for nothing."""
    with _lock:
        memory = _memories.setdefault((device, dtype), _RowMemory())
        if memory.block is None or memory.used + size > memory.block.numel():
            with torch.inference_mode(False):
                memory.block = torch.empty(max(size, _BLOCK), dtype=dtype, device=device)
            memory.used, memory.recorded = 0, set()
        row = memory.block.narrow(0, memory.used, size)
        memory.used += size
        if device.type == "cuda":
            handle = current_raw_stream(device.index)
            if handle not in memory.streams:
                memory.streams[handle] = torch.cuda.current_stream(device)
            if handle not in memory.recorded:
                # the allocator must not reuse the block before this stream is done with it
                memory.block.record_stream(memory.streams[handle])
                memory.recorded.add(handle)
        return row


def _take_writing_streams(device: torch.device) -> list[Any]:
    """Return the streams that have written rows on `device` since the last call."""
    streams: dict[int, Any] = {}
    with _lock:
        for (memory_device, _), memory in _memories.items():
            if memory_device == device:
                streams |= memory.streams
                memory.streams = {}
    return list(streams.values())


class RowCopy:
    """Rows of one device and dtype on their way to the host.

    The rows may be anywhere in memory; those in one block are copied together.
    """

    def __init__(self, rows: list[Tensor]) -> None:
        self._rows = rows
        self._device = rows[0].device
        # by storage: the offset at which the copied range begins, and its copy
        self._host: dict[int, tuple[int, Tensor]] = {}
        self._arrival: Any = None
        if self._device.type == "cuda":
            with thread_local_capture_mode():
                self._start()

    def _start(self) -> None:
        """Queue the copies, on a stream that waits for those that write the rows."""
        stream = _copy_stream(self._device)
        for writer in _take_writing_streams(self._device):
            stream.wait_stream(writer)
        with torch.cuda.stream(stream):
            for key, (start, memory) in _ranges(self._rows).items():
                host = torch.empty(
                    memory.numel(), dtype=memory.dtype, device="cpu", pin_memory=True
                )
                self._host[key] = start, host.copy_(memory, non_blocking=True)
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrival.record(stream)

    def is_ready(self) -> bool:
        """Return whether `fetch` would return at once; always True on devices other than CUDA."""
        if self._arrival is None:
            return True
        with thread_local_capture_mode():
            return bool(self._arrival.query())

    def fetch(self) -> list[list[float]]:
        """Return the rows as floats, in order. Waits; raises errors of the device."""
        if self._arrival is not None:
            with thread_local_capture_mode():
                self._arrival.synchronize()
        else:
            ranges = _ranges(self._rows)
            self._host = {key: (start, memory.cpu()) for key, (start, memory) in ranges.items()}
        numbers = {key: (start, host.tolist()) for key, (start, host) in self._host.items()}
        rows = []
        for row in self._rows:
            start, floats = numbers[_storage_key(row)]
            first = row.storage_offset() - start
            rows.append(floats[first : first + row.numel()])
        return rows


def _storage_key(row: Tensor) -> int:
    return row.untyped_storage().data_ptr()


def _ranges(rows: list[Tensor]) -> dict[int, tuple[int, Tensor]]:
    """Return by storage the smallest range that holds all its rows: offset and tensor."""
    bounds: dict[int, tuple[int, int, Tensor]] = {}
    for row in rows:
        key = _storage_key(row)
        first = int(row.storage_offset())
        end = first + row.numel()
        low, high, _ = bounds.get(key, (first, end, row))
        bounds[key] = min(low, first), max(high, end), row
    return {
        key: (low, row.as_strided((high - low,), (1,), low))
        for key, (low, high, row) in bounds.items()
    }


_copy_streams: dict[torch.device, Any] = {}


def _copy_stream(device: torch.device) -> Any:
    stream = _copy_streams.get(device)
    if stream is None:
        stream = _copy_streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
