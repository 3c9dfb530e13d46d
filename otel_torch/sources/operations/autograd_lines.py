"""Finds the forward operation to which an operation of a backward pass belongs.

Autograd numbers its nodes in order. A node is made right before its forward operation is
dispatched, so the operation during which the counter has moved is the one that the node belongs
to. In the backward pass the running node says its number.
"""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from otel_torch import torch_private

_Origin = TypeVar("_Origin")


class AutogradLines(threading.local, Generic[_Origin]):
    """What was noted for the node of each forward operation, by thread where the forward ran."""

    def __init__(self, origins: dict[int, _Origin]) -> None:
        self._origins = origins
        self.start()

    def start(self) -> None:
        """Note operations of this thread from now on."""
        self._next = torch_private.next_number_of_operation()

    def note(self, origin: _Origin) -> None:
        """Note where the operation that is dispatched comes from, if it has a node of its own."""
        following = torch_private.next_number_of_operation()
        for number in range(self._next, following):
            self._origins[number] = origin
        self._next = following

    def current(self) -> _Origin | None:
        """Return what was noted for the node that runs backward, None if none does."""
        number = torch_private.number_of_running_node()
        return None if number is None else self._origins.get(number)
