"""A test that leaves torch changed fails itself, instead of the tests that run after it in the same process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest


def torch_state() -> list[Any] | None:
    """What torch keeps for the whole process; None while nothing has loaded it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    try:
        device = torch.get_default_device()
    except AttributeError:  # torch 2.9 after `set_default_device(None)`: use `with torch.device(…)`
        device = None
    return [
        device,
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
        torch.is_anomaly_enabled(),
        torch.get_num_threads(),
    ]


@pytest.fixture(autouse=True)
def torch_stays_as_it_is() -> Iterator[None]:
    before = torch_state()
    yield
    assert before is None or torch_state() == before, "this test leaves torch changed"
