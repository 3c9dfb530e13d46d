"""A file is recognized by its first bytes, however hostile: in time that grows with their number, not
with its square, which was a quarter of a minute.
"""

from __future__ import annotations

import pytest

from otel_torch.recording.file_kinds import OTHER_JSON, recognize

SIZE = 1 << 16
CSV = "a table (CSV)"


@pytest.mark.parametrize(
    ("head", "what"),
    [
        (b"[" * SIZE, None),
        (b" x" * (SIZE // 2), None),
        (b"," * SIZE, None),
        (b"," * SIZE + b"\n", CSV),
        (b'{"a": "' + b'\\"' * (SIZE // 2), OTHER_JSON.what),
    ],
    ids=["brackets", "words", "commas", "columns", "cut off in a string"],
)
def test_long_lines_are_recognized(head: bytes, what: str | None) -> None:
    kind = recognize(head)
    assert (kind.what if kind else None) == what


def test_text_before_json_is_seen_and_blanks_are_none() -> None:
    row = b'{"module": "a"}\n'
    kind = recognize(b"INFO " + row)
    assert kind is not None and kind.what.startswith("JSON with other text before it")
    assert recognize(b"  " + row) == recognize(row)
