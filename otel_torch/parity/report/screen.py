"""Width, color and list lengths of a text report, and the helpers that apply them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from otel_torch.rendering import table
from otel_torch.rendering.table import Line, escape

_SHORTEST_NAME = 12  # columns that a shortened name keeps at least


@dataclass(frozen=True, slots=True)
class Screen:
    """How a text report is laid out.

    width: columns of the text. list_limit: entries shown of each list; None shows everything, with
    full names.
    """

    color: bool
    width: int
    list_limit: int | None

    @property
    def shows_all(self) -> bool:
        """Whether nothing is shortened."""
        return self.list_limit is None

    def paint(self, text: str, style: str) -> str:
        """Return the text in a style, if colors are on."""
        return table.paint(text, style, self.color)

    def table(
        self, header: Sequence[str], lines: Sequence[Line], *, left_columns: int
    ) -> list[str]:
        """Return the lines of a table; the first `left_columns` columns are left-aligned."""
        return table.format_table(
            header, lines, left_columns=left_columns, color=self.color
        ).splitlines()

    def shorten(self, name: str, room: int) -> str:
        """Return the end of a name that exceeds its room; the end of a module name says most."""
        room = max(room, _SHORTEST_NAME)
        if self.shows_all or len(name) <= room:
            return name
        return f"…{name[1 - room :]}"

    def wrap(
        self,
        text: str,
        style: str | None = None,
        *,
        indent: str = "",
        hanging_indent: str | None = None,
        max_lines: int | None = None,
    ) -> list[str]:
        """Return the text, escaped and wrapped; more than `max_lines` lines end in …"""
        lines = textwrap.wrap(
            escape(text),
            self.width,
            initial_indent=indent,
            subsequent_indent=indent if hanging_indent is None else hanging_indent,
            max_lines=None if self.shows_all else max_lines,
            placeholder=" …",
            break_on_hyphens=False,
        )
        return [table.paint(line, style, self.color) for line in lines]

    def list_names(self, title: str, names: Sequence[str]) -> list[str]:
        """Return the title and as many names as fit on one line, or each name on its own line."""
        if self.shows_all:
            return [title, *(f"  {name}" for name in names)]
        for count in range(min(len(names), self.width), 1, -1):
            more = f", … {len(names) - count:,} more" if count < len(names) else ""
            line = f"{title} ({', '.join(names[:count])}{more})"
            if len(line) <= self.width:
                return [line]
        first_name = self.shorten(names[0], self.width - len(title) - 5)
        return [f"{title} ({first_name}{', …' if len(names) > 1 else ''})"]
