"""Recognizes the same tensor in several places: a module's output is the next module's input.

Such a tensor is measured once and gets one `value` number. Neither its address (memory is reused)
nor the Python object (a view is a new one) identifies it. Here a tensor is the same as long as its
storage lives, its offset, shape, strides and dtype are equal, and torch's version counter has not
changed. Torch does not count every change in place (collectives, custom kernels, inference mode);
where one is likely, the tensor is measured again and its statistics decide.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch

from otel_torch.statistics.compact_rows import numbers_of
from otel_torch.statistics.measure import Measurement
from otel_torch.statistics.row_layout import VECTORS
from otel_torch.torch_private import StorageLife, has_other_ranks, unobserved, version_of


class Identity:
    """One tensor by identity.

    measurement: what was measured in this step, as bytes if `observer.c` did; None if the tensor
    must be measured (again).
    counts_changes: whether torch counts all changes in place; if not, the tensor is measured
    whenever it is seen. number: in order of first sight, set when the row is read. content: a
    digest of the row that `number` belongs to.
    """

    __slots__ = ("content", "counts_changes", "measurement", "number", "storage")

    def __init__(self, storage: Storage | None, counts_changes: bool) -> None:
        self.storage = storage
        self.counts_changes = counts_changes
        self.measurement: Measurement | bytes | None = None
        self.number: int | None = None
        self.content: bytes = b""


class Storage:
    """The memory that a tensor shares with its views.

    number: in order of first sight. version: torch's counter of changes in place. identities: by
    offset, shape, strides and dtype.
    """

    __slots__ = ("identities", "life", "number", "version")

    def __init__(self, life: StorageLife) -> None:
        self.life = life
        self.number: int | None = None
        self.version: int | None = None
        self.identities: dict[Any, Identity] = {}


class IdentityRegistry:
    """The identities of the tensors seen, dropped with their memory."""

    def __init__(self) -> None:
        self._storages: dict[int, Storage] = {}
        self._tensor_count = self._storage_count = 0

    @unobserved
    def of(self, tensor: torch.Tensor) -> Identity:
        """Return the identity of a tensor; a new one if its memory cannot be recognized."""
        try:
            if hasattr(tensor, "to_local"):  # a DTensor
                with torch.no_grad():
                    tensor = tensor.to_local()
            life = StorageLife(tensor)
            version = version_of(tensor)
            view = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        except Exception:
            return Identity(None, True)
        storage = self._storages.get(life.key)
        if storage is None:
            storage = self._storages[life.key] = Storage(life)
        if storage.version != version:  # the memory has new contents
            storage.version = version
            storage.identities.clear()
        identity = storage.identities.get(view)
        if identity is None:
            counts_changes = version is not None and not has_other_ranks()
            identity = storage.identities[view] = Identity(storage, counts_changes)
        return identity

    def assign_number(self, identity: Identity, content: bytes) -> bool:
        """Number a tensor and its storage; return whether the tensor is new.

        A tensor whose row differs from that of an earlier sight is new. Call this in order of
        sight.

        Args:
            content: a digest of the row, by `digest` or `compact_digest`.
        """
        if identity.storage is not None and identity.storage.number is None:
            identity.storage.number = self._storage_count
            self._storage_count += 1
        if identity.number is not None and identity.content == content:
            return False
        identity.number, identity.content = self._tensor_count, content
        self._tensor_count += 1
        return True

    def end_step(self) -> None:
        """Drop tensors whose memory was freed; have the others measured again in the next step.

        The replay of a CUDA graph writes to memory without any trace of it in torch.
        """
        for key, storage in list(self._storages.items()):
            if storage.life.is_freed:
                del self._storages[key]
            else:
                for identity in list(storage.identities.values()):
                    identity.measurement = None


def digest(measurement: Measurement, row: Sequence[float] | None) -> bytes:
    """Return 16 bytes for a row, without its row sketch, which only some sights have."""
    if row is None:
        return b""
    has_row_sketch = "row_sketch" in measurement.columns
    length = len(row) - (VECTORS["row_sketch"] if has_row_sketch else 0)
    return blake2b(array("d", row[:length]), digest_size=16).digest()


def compact_digest(data: bytes) -> bytes:
    """Return for a compact row what `digest` returns for its row."""
    return blake2b(numbers_of(data), digest_size=16).digest()
