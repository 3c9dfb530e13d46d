"""Which tensors are one: the output of a module is the input of the next, and is measured and
counted once.

An address is no identity, for memory is used again, and neither is the Python object, for a view is
another one. A tensor is the same while its memory lives, lies alike and has not been changed in
place. Torch does not count every change (collectives, kernels of the program's own, inference
mode): where one is likely, a tensor is measured again and its numbers decide.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch

from otel_torch.statistics.measure import Measurement
from otel_torch.statistics.row_layout import VECTORS
from otel_torch.torch_private import StorageLife, several_ranks, unobserved, version_of


class Identity:
    """One tensor by identity. `number` and the numbers of its memory are given when it is read, in
    order of first sight.

    measured: what was seen of it in this step, where that may still be believed. counted: whether
    torch counts what changes it in place; if not, it is measured at every sight.
    """

    __slots__ = ("content", "counted", "measured", "number", "storage")

    def __init__(self, storage: Storage | None, counted: bool) -> None:
        self.storage = storage
        self.counted = counted
        self.measured: Measurement | None = None
        self.number: int | None = None
        self.content: bytes = b""


class Storage:
    """The memory of tensors: views of one have this in common."""

    __slots__ = ("life", "number", "tensors", "version")

    def __init__(self, life: StorageLife) -> None:
        self.life = life
        self.number: int | None = None
        self.version: int | None = None
        self.tensors: dict[Any, Identity] = {}


class Identities:
    """The tensors that were seen, forgotten with their memory."""

    def __init__(self) -> None:
        self._storages: dict[int, Storage] = {}
        self._tensors = self._memories = 0

    @unobserved
    def of(self, tensor: torch.Tensor) -> Identity:
        """The identity of a tensor; one of its own for a tensor without memory that could be known
        again.
        """
        try:
            if hasattr(tensor, "to_local"):  # a DTensor
                with torch.no_grad():
                    tensor = tensor.to_local()
            life = StorageLife(tensor)
            version = version_of(tensor)
            place = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        except Exception:
            return Identity(None, True)
        storage = self._storages.get(life.key)
        if storage is None:
            storage = self._storages[life.key] = Storage(life)
        if storage.version != version:  # what was in this memory is gone
            storage.version = version
            storage.tensors.clear()
        identity = storage.tensors.get(place)
        if identity is None:
            identity = storage.tensors[place] = Identity(
                storage, version is not None and not several_ranks()
            )
        return identity

    def first_sight(
        self, identity: Identity, measured: Measurement, numbers: Sequence[float] | None
    ) -> bool:
        """Number the identity, to be called in order of sight; whether this is a tensor that was
        not there before.

        numbers: the row of `measured`, on the host.
        """
        if identity.storage is not None and identity.storage.number is None:
            identity.storage.number = self._memories
            self._memories += 1
        content = _content(measured, numbers)
        if identity.number is not None and identity.content == content:
            return False
        identity.number, identity.content = self._tensors, content
        self._tensors += 1
        return True

    def forget(self) -> None:
        """Let go of the tensors whose memory has been given back; what lives on is measured again
        in the next step, for a replayed graph fills its memory anew and tells nobody.
        """
        for key, storage in list(self._storages.items()):
            if storage.life.over:
                del self._storages[key]
            else:
                for identity in list(storage.tensors.values()):
                    identity.measured = None


def _content(measured: Measurement, numbers: Sequence[float] | None) -> bytes:
    """Sixteen bytes that stand for a tensor's numbers; of those that every sight has, so not of a
    parameter's rows.
    """
    if numbers is None:
        return b""
    common = len(numbers) - (VECTORS["row_sketch"] if "row_sketch" in measured.columns else 0)
    return blake2b(array("d", numbers[:common]), digest_size=16).digest()
