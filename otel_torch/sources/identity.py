"""Which tensors are one: the output of a module is the input of the next, and is measured and counted once.

An address is no identity, for memory is used again, and neither is the Python object, for a view is another one. A tensor
is the same while its memory lives, lies alike and has not been changed in place.
"""

from __future__ import annotations

from typing import Any

import torch

from otel_torch.statistics.measure import Measured
from otel_torch.torch_private import StorageLife, unobserved, version_of


class Identity:
    """One tensor by identity. `number` and the numbers of its memory are given when it is read, in order of first sight.

    measured: what was seen of it first. counted: whether torch counts changes in place; if it does not (inference mode),
    the tensor is measured at every sight, and `numbers` tell whether it still is the same.
    """

    __slots__ = ("counted", "measured", "number", "numbers", "storage")

    def __init__(self, storage: Storage | None, counted: bool) -> None:
        self.storage = storage
        self.counted = counted
        self.measured: Measured | None = None
        self.number: int | None = None
        self.numbers: list[float] | None = None


class Storage:
    """The memory of tensors: views of one have this in common."""

    __slots__ = ("life", "number", "tensors")

    def __init__(self, life: StorageLife) -> None:
        self.life = life
        self.number: int | None = None
        self.tensors: dict[Any, Identity] = {}


class Identities:
    """The tensors that were seen, forgotten with their memory."""

    def __init__(self) -> None:
        self._storages: dict[int, Storage] = {}
        self._tensors = self._memories = 0

    @unobserved
    def of(self, tensor: torch.Tensor) -> Identity:
        """The identity of a tensor; one of its own for a tensor without memory that could be known again."""
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor; below autograd this is free
        try:
            life = StorageLife(local)
            version = version_of(local)
            place = (local.storage_offset(), tuple(local.shape), local.stride(), local.dtype, version)
        except Exception:
            return Identity(None, True)
        storage = self._storages.get(life.key)
        if storage is None:
            storage = self._storages[life.key] = Storage(life)
        identity = storage.tensors.get(place)
        if identity is None:
            identity = storage.tensors[place] = Identity(storage, version is not None)
        return identity

    def first_sight(self, identity: Identity, numbers: list[float] | None) -> bool:
        """Number the identity, to be called in order of sight; whether this is a tensor that was not there before."""
        if identity.storage is not None and identity.storage.number is None:
            identity.storage.number = self._memories
            self._memories += 1
        if identity.number is not None and (identity.counted or identity.numbers == numbers):
            return False
        identity.number, identity.numbers = self._tensors, None if identity.counted else numbers
        self._tensors += 1
        return True

    def forget(self) -> None:
        """Let go of the tensors whose memory has been given back."""
        for key, storage in list(self._storages.items()):
            if storage.life.over:
                del self._storages[key]
