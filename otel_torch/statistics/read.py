"""Brings the rows of many tensors to the host at once: the one wait for a device in a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from otel_torch.statistics.measure import Measured
from otel_torch.torch_private import unobserved


@unobserved
def read_rows(measured: Sequence[Measured]) -> list[list[float] | None]:
    """The rows of `measured` as floats, in order, None where a tensor has none; one copy a device (and row dtype).

    Raises what the device raises; call it between steps, never while a CUDA graph is captured.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for index, one in enumerate(measured):
        if one.row is not None:
            groups[one.row.device, one.row.dtype].append(index)
    rows: list[list[float] | None] = [None] * len(measured)
    for (device, _), indices in groups.items():
        _wait_for(device)
        numbers = torch.cat([row for index in indices if (row := measured[index].row) is not None]).tolist()
        start = 0
        for index in indices:
            end = start + measured[index].row.numel()  # type: ignore[union-attr]
            rows[index] = numbers[start:end]
            start = end
    return rows


def _wait_for(device: torch.device) -> None:
    """Rows may have been written in streams other than the one that copies them."""
    if device.type == "cpu":
        return
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif hasattr(torch, "accelerator"):
        torch.accelerator.synchronize()
