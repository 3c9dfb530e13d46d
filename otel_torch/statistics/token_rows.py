"""The row of a batch's tokens: numbers that wait on their device like those of a tensor.

A row holds one column after another, of `length` numbers each:

    ids in 3 parts | positions | requests       whichever are known, then one number: the updates
    ids in 3 parts | log-probabilities          of the likeliest next ids, row after row

An id is hashed with splitmix64 (https://prng.di.unimi.it/splitmix64.c) unless it may be recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from otel_torch.records import Statistic
from otel_torch.statistics.bit_hash import MIX, STRIDE, split_into_parts
from otel_torch.statistics.device_rows import allocate_row
from otel_torch.statistics.measure import Measurement
from otel_torch.statistics.reduce import widest
from otel_torch.statistics.row_layout import HASH_PARTS, ROWS_MAX, join_parts
from otel_torch.statistics.sketch_format import encode
from otel_torch.torch_private import unobserved

# of splitmix64, as a signed integer
_LAST_MIX = 0x94D049BB133111EB - 2**64
_UPDATES = "updates"
# a padding has no request and no position
NO_TOKEN = -1
# how many next ids are recorded for each row of logits
LIKELIEST = 32


@unobserved
def measure_tokens(
    ids: Tensor | None,
    positions: Tensor | None,
    requests: Tensor | None,
    *,
    hashed: bool,
    updates: int = 0,
) -> Measurement | None:
    """Return the row of up to `ROWS_MAX` tokens without waiting for their device.

    None if nothing is known of them.

    Args:
        ids, positions, requests: integers, one for each token, in any shape; None if unknown.
        hashed: whether to record a hash of each id.
        updates: how often optimizers of the process have stepped.
    """
    known = {"ids": ids, "positions": positions, "requests": requests}
    columns = {name: values for name, values in known.items() if values is not None}
    if not columns:
        return None
    leading = next(iter(columns.values()))
    if any(values.numel() != leading.numel() for values in columns.values()):
        raise ValueError(f"{', '.join(columns)} have different lengths")
    parts = []
    for name, values in columns.items():
        numbers = values.to(leading.device, torch.int64, non_blocking=True).reshape(-1)[:ROWS_MAX]
        if name == "ids":
            parts += split_into_parts(mix(numbers) if hashed else numbers)
        else:
            parts.append(numbers)
    names = tuple("hashes" if name == "ids" and hashed else name for name in columns)
    if updates:
        names = *names, _UPDATES
        parts.append(torch.full((1,), updates, device=leading.device))
    count, shape, dtype = leading.numel(), list(leading.shape), str(leading.dtype)
    return Measurement(_joined(parts), names, count, count, shape, dtype)


@unobserved
def measure_log_probabilities(logits: Tensor, *, hashed: bool) -> Measurement:
    """Return the row of the `LIKELIEST` next ids of up to `ROWS_MAX` rows, without waiting.

    Args:
        logits: Floating point, shape (..., vocabulary).
        hashed: Whether to record a hash of each id.
    """
    rows = logits.detach().reshape(-1, logits.shape[-1])[:ROWS_MAX]
    values, ids = rows.topk(min(LIKELIEST, rows.shape[-1]), -1)
    totals = torch.logsumexp(rows.float(), -1, keepdim=True)
    flat = ids.reshape(-1)
    log_probabilities = (values.float() - totals).reshape(-1)
    parts = [*split_into_parts(mix(flat) if hashed else flat), log_probabilities]
    names = ("hashes" if hashed else "ids", "logprobs")
    shape = [*logits.shape[:-1], values.shape[-1]]
    return Measurement(_joined(parts), names, flat.numel(), flat.numel(), shape, str(logits.dtype))


def _joined(parts: Sequence[Tensor]) -> Tensor | list[float]:
    device = parts[0].device
    wide = [part.to(widest(device)) for part in parts]
    if device.type == "cpu":
        numbers: list[float] = torch.cat(wide).tolist()
        return numbers
    row = allocate_row(sum(map(len, wide)), wide[0].dtype, device)
    torch.cat(wide, out=row)
    return row


def mix(ids: Tensor) -> Tensor:
    """Return a hash of 64 bits of each id.

    >>> [number % 2**64 for number in mix(torch.tensor([0, 1])).tolist()]
    [16294208416658607535, 10451216379200822465]
    """
    mixed = ids + STRIDE
    mixed = (mixed ^ _shift_right(mixed, 30)) * MIX
    mixed = (mixed ^ _shift_right(mixed, 27)) * _LAST_MIX
    return mixed ^ _shift_right(mixed, 31)


def _shift_right(numbers: Tensor, places: int) -> Tensor:
    """Shift without copying the sign."""
    return torch.bitwise_and(numbers >> places, 2 ** (64 - places) - 1)


def token_statistics(row: Sequence[float], measurement: Measurement) -> dict[str, Statistic]:
    """Return what a recording says of the tokens."""
    names = measurement.columns
    stats: dict[str, Statistic] = {"shape": measurement.shape or []}
    if _UPDATES in names:
        *row, updates = row
        names, stats[_UPDATES] = names[:-1], int(updates)
    widths = [HASH_PARTS if name in ("ids", "hashes") else 1 for name in names]
    length = len(row) // sum(widths)
    columns = [row[start : start + length] for start in range(0, len(row), length)]
    for name, width in zip(names, widths, strict=True):
        parts, columns = columns[:width], columns[width:]
        if name == "hashes":
            stats[name] = encode([join_parts(number) for number in zip(*parts, strict=True)], "Q")
        elif width > 1:
            stats[name] = [join_parts(number) for number in zip(*parts, strict=True)]
        elif name == "logprobs":
            stats[name] = encode(parts[0])
        else:
            stats[name] = [int(number) for number in parts[0]]
    return stats
