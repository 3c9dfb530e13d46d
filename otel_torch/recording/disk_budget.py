"""How much one process may write to disk, over everything that it writes: a full disk stops more
than a recording.
"""


class DiskBudget:
    """Bytes that may be written, and that were.

    >>> budget = DiskBudget(10); budget.spend(4); budget.exhausted
    False
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.spent = 0

    def spend(self, number: int) -> None:
        """So many bytes were written."""
        self.spent += number

    @property
    def exhausted(self) -> bool:
        """Whether the limit is reached: writing ends at the end of the step."""
        return self.spent >= self.limit
