"""What C and Python share by position comes from one table, and Python's tuples have its fields."""

from __future__ import annotations

from otel_torch.sources.modules.call_stack import EnteredCall
from otel_torch.sources.tensors.native_observer import ModulePlace
from otel_torch.statistics import native_layout


def test_the_header_is_made_from_the_table() -> None:
    text = native_layout.HEADER.read_text()
    assert text == native_layout.header_text(), (
        "run: python -m otel_torch.statistics.native_layout, and install again"
    )


def test_named_tuples_have_the_fields_that_c_reads() -> None:
    assert ModulePlace._fields == native_layout.fields_of("PLACE_")
    assert EnteredCall._fields == native_layout.fields_of("ENTERED_")
