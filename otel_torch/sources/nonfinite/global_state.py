"""What a forward may change besides its module: random states, the default dtype, the grad mode."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def preserved_global_state() -> Iterator[None]:
    """Restore the random states of torch, Python and NumPy, the default dtype and the grad mode."""
    numpy: Any = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    dtype = torch.get_default_dtype()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    try:
        with (
            torch.random.fork_rng(devices=devices),
            torch.set_grad_enabled(torch.is_grad_enabled()),
        ):
            yield
    finally:
        random.setstate(python_state)
        if numpy_state is not None:
            numpy.random.set_state(numpy_state)
        torch.set_default_dtype(dtype)
