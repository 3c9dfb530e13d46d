"""A step of a loop: what a record's position in the run is called."""

from __future__ import annotations

from typing import NamedTuple


class LoopStep(NamedTuple):
    """A step of a loop, as recorded."""

    loop: int | None
    number: int | None

    def __str__(self) -> str:
        """Return the step, with its loop unless that is the first.

        >>> str(LoopStep(0, 3)), str(LoopStep(1, 3))
        ('step 3', 'step 3 of loop 1')
        """
        step = f"step {self.number}"
        return f"{step} of loop {self.loop}" if self.loop else step
