"""The statistics of the HTML report: both programs side by side, for the finding and around it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from otel_torch.parity.finding import ComparedPair, Report
from otel_torch.parity.report.pairs import pair_of_finding, worst_pair
from otel_torch.parity.report.wording import STATE_MARKS, format_error, module_name
from otel_torch.rendering.page import code, escaped, html_table

NEIGHBORS = 3  # pairs shown before and after the finding

_HIDDEN_STATISTICS = ("sketch", "histogram")


def statistics_around_finding(report: Report) -> list[str]:
    """Return the section for the finding's pair, or the worst pair if nothing was found, and the
    pairs around it.
    """
    pair_of_first = pair_of_finding(report, report.first)
    center = pair_of_first or worst_pair(report.compared)
    if center is None:
        return []
    same_step = [
        pair for pair in report.compared if (pair.loop, pair.step) == (center.loop, center.step)
    ]
    same_step.sort(key=lambda pair: pair.depth)
    index = next(index for index, pair in enumerate(same_step) if pair is center)
    title = "finding" if pair_of_first else "pair furthest from its floor"
    lines = [f"<h2>Statistics of the {title} and its neighbors</h2>"]
    for pair in same_step[max(index - NEIGHBORS, 0) : index + NEIGHBORS + 1]:
        if pair is center or pair.statistics or pair.port_statistics:
            lines += _pair_section(pair, is_open=pair is center)
    return lines


def _pair_section(pair: ComparedPair, *, is_open: bool) -> Iterator[str]:
    yield (
        f"<details{' open' if is_open else ''}><summary>"
        f"<span class='{pair.state}'>{STATE_MARKS[pair.state]} {pair.state}</span> "
        f"{code(module_name(pair.module))} {code(pair.tensor)} "
        f"<span class='faint'>= {code(module_name(pair.port_module))} {code(pair.port_tensor)}, "
        f"error {format_error(pair.error)}, floor {format_error(pair.floor)}</span></summary>"
        "<div class='wide'>"
    )
    rows = []
    for name in dict.fromkeys((*pair.statistics, *pair.port_statistics)):
        if name not in _HIDDEN_STATISTICS:
            reference, port = pair.statistics.get(name), pair.port_statistics.get(name)
            cells = [name, _format(reference), _format(port)]
            rows.append([*map(escaped, cells), _relative_difference(reference, port)])
    yield html_table(["statistic", "reference", "port", "relative difference"], rows, numbers=3)
    yield "</div></details>"


def _format(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.7g}"
    if isinstance(value, list):
        return "×".join(map(str, value)) or "scalar"
    return str(value).removeprefix("torch.")


def _relative_difference(reference: Any, port: Any) -> str:
    """Return the difference of two statistics, relative to the larger one.

    >>> _relative_difference(1.0, 2.0), _relative_difference(3, 3), _relative_difference(None, 1.0)
    ('0.5', '0', '–')
    >>> _relative_difference([2], [3]), _relative_difference([2], [2])
    ('differs', 'equal')
    """
    if reference is None or port is None:
        return "–"
    are_both_nan = reference != reference and port != port
    if reference == port or are_both_nan:
        return "0" if _is_number(reference) else "equal"
    if not (_is_finite(reference) and _is_finite(port)):
        return "differs"
    return format_error(abs(reference - port) / max(abs(reference), abs(port)))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)
