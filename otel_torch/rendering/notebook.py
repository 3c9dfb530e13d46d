"""How a result looks in a notebook: a few lines and a short table, as HTML without a script.

The HTML becomes part of the saved notebook, so it loads nothing, and names in it are escaped.
"""

from __future__ import annotations

from collections.abc import Sequence

from otel_torch.rendering.page import escaped, html_table

MAX_ROWS = 30


def notebook_html(
    lines: Sequence[str],
    header: Sequence[str] = (),
    rows: Sequence[Sequence[str]] = (),
    *,
    count: int | None = None,
) -> str:
    """Return the lines, the first one in bold, and the first `MAX_ROWS` rows of a table.

    Args:
        lines, header, rows: Plain text.
        count: How many rows there are, if `rows` has only the first of them.

    >>> notebook_html(["2 calls", "of <Net>"])
    '<div><b>2 calls</b><br>of &lt;Net&gt;</div>'
    """
    first, *others = map(escaped, lines)
    parts = ["<br>".join([f"<b>{first}</b>", *others])]
    if rows:
        cells = [list(map(escaped, row)) for row in rows[:MAX_ROWS]]
        parts.append(html_table(list(map(escaped, header)), cells))
    more = (len(rows) if count is None else count) - MAX_ROWS
    if more > 0:
        parts.append(f"and {more:,} more")
    return f"<div>{''.join(parts)}</div>"
