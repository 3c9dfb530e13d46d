"""Bounds the bytes that one process writes to disk, over all of its files: a full disk harms more
than the recording.
"""


class DiskBudget:
    """Counts the bytes that a process has written against its limit.

    >>> budget = DiskBudget(10); budget.spend(4); budget.is_exhausted
    False
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.spent = 0

    def spend(self, size: int) -> None:
        self.spent += size

    @property
    def is_exhausted(self) -> bool:
        """Return whether the limit is reached. The current step may still be written in full."""
        return self.spent >= self.limit
