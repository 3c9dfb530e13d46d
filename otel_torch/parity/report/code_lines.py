"""The code around a line of a finding, read from its file if it is still what ran."""

from __future__ import annotations

import textwrap
from pathlib import Path

from otel_torch.parity.finding import CodeLine

# lines before and after it that a report shows
_AROUND = 2


def around(line: CodeLine) -> list[tuple[int, str]]:
    """Return the lines around a line, each with its number; the line alone without its file."""
    try:
        text = Path(line.file).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        text = []
    index = line.line - 1
    if not (0 <= index < len(text) and line.text.strip() in text[index]):
        return [(line.line, line.text)]
    first = max(index - _AROUND, 0)
    block = textwrap.dedent("\n".join(text[first : index + _AROUND + 1])).split("\n")
    return [(first + 1 + offset, content) for offset, content in enumerate(block)]
