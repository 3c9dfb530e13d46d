"""Rankings of modules as lines of text: the distances from a golden recording, and what each module
adds to the error of a program in lower precision.
"""

from __future__ import annotations

from collections.abc import Sequence

from otel_torch.parity.rankings import GoldenComparison, LowerPrecision
from otel_torch.parity.report.screen import Screen
from otel_torch.parity.report.wording import (
    GAIN_UNKNOWN,
    format_error,
    golden_sentence,
    module_name,
    precision_sentence,
)
from otel_torch.rendering.table import Line


def golden_block(golden: GoldenComparison | None, screen: Screen) -> list[str]:
    """Return the verdict, and the outputs of which the port is furthest beyond the reference."""
    if golden is None:
        return []
    header = ("distance from the golden recording", "reference", "port", "nearer")
    rows = [
        (
            f"{module_name(row.module)} {row.tensor}",
            format_error(row.error),
            format_error(row.port_error),
            row.nearer,
        )
        for row in golden.modules
    ]
    return _ranking(golden_sentence(golden), header, rows, screen)


def precision_block(precision: LowerPrecision | None, screen: Screen) -> list[str]:
    """Return which program is of lower precision, and the modules that add most to its error."""
    if precision is None or not precision.modules:
        return []
    header = ("module", "input", "output", "added")
    rows = [
        (
            module_name(row.module),
            *map(format_error, (row.input_error, row.output_error, row.added)),
        )
        for row in precision.modules
    ]
    return [
        *_ranking(precision_sentence(precision), header, rows, screen),
        *screen.wrap(GAIN_UNKNOWN, "dim", indent="  "),
    ]


def _ranking(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], screen: Screen
) -> list[str]:
    shown = rows[: screen.list_limit]
    lines = [Line([screen.shorten(name, screen.width // 2), *cells]) for name, *cells in shown]
    more = len(rows) - len(shown)
    return [
        *screen.wrap(title, "bold", hanging_indent="  "),
        *(f"  {line}" for line in screen.table(header, lines, left_columns=1)),
        *([f"  and {more:,} more; --all lists them"] if more else []),
    ]
