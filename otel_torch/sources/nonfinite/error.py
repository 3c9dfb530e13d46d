"""The error that ends a program at its first NaN or Inf, under OTEL_TORCH_ON_NONFINITE=stop."""

from __future__ import annotations


class NonFiniteError(ArithmeticError):
    """A value of the program became NaN or Inf; the message says which, and what produced it.

    Raised in the program's thread with `OTEL_TORCH_ON_NONFINITE=stop` only, at the end of the
    outermost forward, the backward pass or the optimizer's step in which that is known. Everything
    recorded until then is written.
    """

    __module__ = "otel_torch"  # where programs import it from
