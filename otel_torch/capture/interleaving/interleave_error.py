"""The error of a body that asks for a value in vain."""


class InterleaveError(RuntimeError):
    """A body asked for a value that has already passed or will never come."""
