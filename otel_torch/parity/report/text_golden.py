"""Which program is nearer to the golden recording, as lines of text."""

from __future__ import annotations

from otel_torch.parity.golden import GoldenComparison
from otel_torch.parity.report.screen import Screen
from otel_torch.parity.report.wording import format_error, golden_sentence, module_name
from otel_torch.rendering.table import Line

_HEADER = ("distance from the golden recording", "reference", "port", "nearer")


def golden_block(golden: GoldenComparison | None, screen: Screen) -> list[str]:
    """Return the verdict, and the modules of which the port is furthest beyond the reference."""
    if golden is None:
        return []
    rows = [
        Line(
            [
                screen.shorten(f"{module_name(row.module)} {row.tensor}", screen.width // 2),
                format_error(row.error),
                format_error(row.port_error),
                row.nearer,
            ]
        )
        for row in golden.modules[: screen.list_limit]
    ]
    table = screen.table(_HEADER, rows, left_columns=1)
    more = len(golden.modules) - len(rows)
    return [
        *screen.wrap(golden_sentence(golden), "bold", hanging_indent="  "),
        *(f"  {line}" for line in table),
        *([f"  and {more:,} more outputs; --all lists them"] if more else []),
    ]
