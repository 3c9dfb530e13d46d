"""A sketch of each row along a tensor's last dimension: 9 numbers, which a token takes with it.

The sketch of a whole tensor changes with its batch. Two programs that batch the same tokens
differently, by paddings, chunks or caches, have equal rows in tensors of different shapes.

    sketch of a row = projection (8 x 64) · sum over blocks of 64 elements of (signs * elements)

It is linear: the sketches of `hidden` and `residual` add up to that of their sum. Signs depend on
the column only, so that paddings of zeros at the end of a row change nothing. The ninth number is
the sum of squares, which is not linear, but adds up over the parts of a fused row.

>>> x, y, total = row_sketches(torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 2.0]]))
>>> bool(torch.allclose(x[:8] + y[:8], total[:8])), round(total[8].item(), 6)
(True, 5.0)
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional

from otel_torch.process.console import say_once
from otel_torch.statistics.reduce import widest
from otel_torch.statistics.row_layout import ROW_NUMBERS, ROWS_MAX
from otel_torch.statistics.sketch import as_real, sign_tensor

_FOLD, _PROJECTIONS = 64, ROW_NUMBERS - 1
# elements that are widened at once: on a CPU few enough for its cache
_AT_ONCE, _AT_ONCE_ON_CPU = 2**22, 2**16


def row_sketches(values: Tensor) -> Tensor:
    """Compute the sketches of the first `ROWS_MAX` rows, without waiting for the device.

    No BLAS: it may round to TF32, and raises in deterministic mode.

    Args:
        values: strided, of any shape and dtype; complex numbers count as pairs.

    Returns:
        shape (rows, 9), float64 (float32 on devices without it).
    """
    is_pair = values.is_complex()
    values = as_real(values)
    values = values.flatten(-2) if is_pair else values
    width = values.shape[-1] if values.dim() else 1
    rows = values.reshape(-1, width)
    if len(rows) > ROWS_MAX:
        say_once(
            f"a tensor has {len(rows)} rows; only the first {ROWS_MAX} of each tensor have a "
            "sketch, so the tokens behind them are not compared one by one"
        )
        rows = rows[:ROWS_MAX]
    signs, projection = _signs(width, values.device), _projection(values.device)
    step = max(1, (_AT_ONCE_ON_CPU if values.is_cpu else _AT_ONCE) // width)
    sketches = []
    for first in range(0, len(rows), step):
        signed = rows[first : first + step] * signs  # as wide as these
        squares = torch.linalg.vector_norm(signed, dim=1, keepdim=True).square()
        if width % _FOLD:
            signed = functional.pad(signed, (0, -width % _FOLD))
        folded = signed.view(len(signed), -1, _FOLD).sum(1)
        sketches.append(torch.cat(((folded[:, None] * projection).sum(2), squares), 1))
    return sketches[0] if len(sketches) == 1 else torch.cat(sketches)


@functools.lru_cache(256)
def _signs(width: int, device: torch.device) -> Tensor:
    return sign_tensor("columns", width, widest(device)).to(device)


@functools.cache
def _projection(device: torch.device) -> Tensor:
    """Return the projection, shape (8, 64), whose columns have length 1."""
    signs = sign_tensor("tokens", _PROJECTIONS * _FOLD, widest(device))
    return signs.view(_PROJECTIONS, _FOLD).div_(math.sqrt(_PROJECTIONS)).to(device)
