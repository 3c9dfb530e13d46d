"""Say which of two programs is nearer to a third one that computes in higher precision.

Two correct programs, such as an eager and a compiled one, differ by rounding. Which of them rounds
less is known only from a recording of the same computation in double precision. For example:

    module        reference    port    nearer
    layers.1.mlp    2.1e-07  8.4e-04     port is 4,000 times as far: a fault
    layers.0.mlp    2.0e-07  2.3e-07     neither: rounding of two kernels
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path

from otel_torch.parity.compare import compare
from otel_torch.parity.finding import ComparedPair, Report
from otel_torch.parity.rankings import GoldenComparison, ModuleErrors, Nearer
from otel_torch.parity.sides import Sides

# sketches have the precision of float32, and estimate a distance within about 20 %: smaller errors
# are no smaller than that, and errors apart by less than the factor are equally large
_RESOLUTION, _APART = 1e-7, 2.0
_Place = tuple[str, str, str, int | None, int | None, int | None]


def compare_with_golden(
    golden: str | Path,
    reference: str | Path,
    port: str | Path,
    progress: Callable[[str], None],
    models: Sides[str] | None = None,
) -> GoldenComparison:
    """Compare two recordings with a golden one.

    Args:
        models: Of each recording, compare only this model; of the golden one, the reference's.

    Raises:
        RecordingError: A file cannot be read.
        ValueError: The golden recording cannot be compared with both; the message is one line.
    """
    sides = Sides(reference, port)
    chosen: Sides[Sides[str] | None] = Sides(None, None)
    if models is not None:
        chosen = models.map(lambda model: Sides(models.reference, model))
    reports = Sides(
        *(
            compare(golden, path, models=pair, progress=progress)
            for path, pair in zip(sides, chosen, strict=True)
        )
    )
    for path, report in zip(sides, reports, strict=True):
        if report.verdict == "incomparable":
            raise ValueError(f"{golden} cannot be compared with {path}: {report.reason}")
    outputs = reports.map(_outputs)
    places = [place for place in outputs.reference if place in outputs.port]
    if not places:
        raise ValueError(f"{golden} shares no output with both {reference} and {port}")
    pairs = [Sides(outputs.reference[place], outputs.port[place]) for place in places]
    by_module: dict[tuple[str, str, str], list[Sides[ComparedPair]]] = {}
    for pair in pairs:
        by_module.setdefault(_place(pair.reference)[:3], []).append(pair)
    modules = [_errors_of(group) for group in by_module.values()]
    whole = [pair for pair in pairs if not pair.reference.module]
    end = _errors_of([(whole or pairs)[-1]])
    modules.sort(key=lambda module: -_ratio(module.error, module.port_error))
    return GoldenComparison(str(golden), end, modules)


def _outputs(report: Report) -> dict[_Place, ComparedPair]:
    """Return the outputs that were compared, by their place in the golden recording."""
    return {_place(pair): pair for pair in report.compared if pair.side == "output"}


def _place(pair: ComparedPair) -> _Place:
    return pair.model, pair.module, pair.tensor, pair.loop, pair.step, pair.call


def _errors_of(pairs: list[Sides[ComparedPair]]) -> ModuleErrors:
    """Return the errors of a module from all of its calls."""
    reference, port = pairs[0]
    error = _largest(pair.reference for pair in pairs)
    port_error = _largest(pair.port for pair in pairs)
    return ModuleErrors(
        *(reference.port_model, reference.port_module, reference.port_tensor),
        *(port.port_model, port.port_module, port.port_tensor),
        error,
        port_error,
        _nearer(error, port_error),
    )


def _nearer(error: float, port_error: float) -> Nearer:
    """Return which of the two errors is smaller.

    >>> _nearer(2e-8, 9e-8), _nearer(2e-7, 8e-4), _nearer(math.inf, 0.1)
    ('neither', 'reference', 'port')
    """
    ratio = _ratio(error, port_error)
    if 1 / _APART < ratio < _APART:
        return "neither"
    return "reference" if ratio > 1 else "port"


def _ratio(error: float, port_error: float) -> float:
    """Return how many times as far the port is, as far as sketches can tell."""
    if math.isinf(error) and math.isinf(port_error):
        return 1.0
    return max(port_error, _RESOLUTION) / max(error, _RESOLUTION)


def _largest(pairs: Iterable[ComparedPair]) -> float:
    """Return the largest error; one that is not defined is infinite."""
    return max(math.inf if pair.error is None else pair.error for pair in pairs)
