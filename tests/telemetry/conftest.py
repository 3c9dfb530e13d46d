"""The receiver of every test of telemetry."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.otlp_receiver import Receiver


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as running:
        yield running
