"""Rank the modules of a program in lower precision by the error that each one adds.

A model in bfloat16, fp8 or int8 differs from its original everywhere, and none of it is a fault.
What helps is which module costs most, as that one may be kept in higher precision:

    module          input  output   added
    layers.1.down    0.01    0.05   0.049    adds nearly all of its error
    layers.1.norm    0.01    0.01   0        passes on what it is given
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

from otel_torch.parity.call_graph import Parameter, enclosing_names
from otel_torch.parity.finding import ComparedPair, Finding, Side
from otel_torch.parity.findings import pair_finding, parameter_finding
from otel_torch.parity.modules import ModulePath
from otel_torch.parity.parameters import ParameterPair
from otel_torch.parity.rankings import AddedError, LowerPrecision
from otel_torch.parity.sides import Sides
from otel_torch.parity.tolerance import Tolerance, coarser, rounds_more

# a quantized weight has at least so many elements; smaller tensors of bytes are tables and masks
_SMALLEST_WEIGHT = 64
_QUANTIZED = ("int8", "uint8", "int4", "uint4", "qint", "quint", "float8", "float4")
# relative L2 error of normally distributed weights in a type, where it is more than int8's
_ROUNDING = {"float8_e4m3": 0.026, "float8_e5m2": 0.053, "int4": 0.1, "uint4": 0.1}
# errors of activations that 8 bits cause, relative L2, and how far the errors of weights may grow
_FLOOR, _GROWTH, _CEILING = 6e-2, 10.0, 0.5
# how much further than the median a weight may be off
_OUTLIER = 4.0
# fewer rounded weights than this, or than half of all, do not suggest a quantized port
_FEWEST = 3


def quantized_dtype(parameters: Iterable[Parameter]) -> str:
    """Return the type of the quantized weights among parameters and buffers, "" without any."""
    dtypes = {
        str(parameter.row.get("dtype", "")).removeprefix("torch.")
        for parameter in parameters
        if parameter.numel >= _SMALLEST_WEIGHT and len(parameter.shape) > 1
    }
    return min(filter(_is_quantized, dtypes), default="")


def _is_quantized(dtype: str) -> bool:
    return dtype.startswith(_QUANTIZED)


def lower_side(dtypes: Sides[set[str]]) -> str | None:
    """Return the side whose tensors round more, None if both round alike."""
    reference, port = dtypes.map(coarser)
    if rounds_more(port, reference):
        return "port"
    return "reference" if rounds_more(reference, port) else None


def tolerance_of(pairs: Sequence[ParameterPair], dtype: str) -> Tolerance:
    """Return the limits of activations computed with quantized weights of a type."""
    errors = [pair.error for pair in pairs if _is_rounded(pair)]
    typical = median(error for error in errors if error is not None) if errors else 0.0
    typical = max(
        typical, *(error for name, error in _ROUNDING.items() if dtype.startswith(name)), 0
    )
    return Tolerance(min(max(_FLOOR, _GROWTH * typical), _CEILING))


def accept_rounded(pairs: Sequence[ParameterPair]) -> dict[int, ParameterPair]:
    """Return what replaces each pair of a weight and its quantized form, by the pair's `id`.

    A weight that is off much further than the others stays as it is.
    """
    errors = [pair.error for pair in pairs if _is_rounded(pair) and pair.error is not None]
    limit = _OUTLIER * median(errors) if errors else 0.0
    return {
        id(pair): replace(pair, equal=True)
        for pair in pairs
        if not pair.equal
        and (bool(quantized_dtype(pair.port)) or (pair.error is not None and pair.error <= limit))
    }


def count_rounded(pairs: Sequence[ParameterPair]) -> int:
    """Return how many weights are off alike, as if all were rounded to few bits; 0 if few are.

    Biases and norms are left as they are; where they differ, weights were changed for another
    reason.
    """
    is_matrix = [len(pair.reference[0].shape) > 1 for pair in pairs]
    if any(not pair.equal for pair, flag in zip(pairs, is_matrix, strict=True) if not flag):
        return 0
    errors = [pair.error for pair in pairs if _is_rounded(pair) and pair.error is not None]
    matrices = sum(is_matrix)
    if len(errors) < max(_FEWEST, matrices / 2) or max(errors) > _OUTLIER * median(errors):
        return 0
    return len(errors)


def outliers_among_rounded(pairs: Sequence[ParameterPair]) -> list[ParameterPair]:
    """Return the weights that are off much further than all others, which seem to be rounded.

    A weight is one only if the limit of a quantized port shows it. Without any, the rounding itself
    may be the fault.
    """
    errors = [pair.error for pair in pairs if _is_rounded(pair) and pair.error is not None]
    limit = max(_OUTLIER * median(errors), tolerance_of(pairs, "").base(())) if errors else 0.0
    outliers = [
        pair for pair in pairs if not pair.equal and pair.error is not None and pair.error > limit
    ]
    others = [pair for pair in pairs if pair not in outliers]
    return outliers if count_rounded(others) else []


def _is_rounded(pair: ParameterPair) -> bool:
    """Return whether a weight is off by less than half, and holds numbers of the same scale."""
    if pair.equal or pair.error is None or quantized_dtype(pair.port):
        return False
    return pair.error <= _CEILING


def rank_modules(
    side: str, dtypes: set[str], pairs: Sequence[ComparedPair], measured: bool
) -> LowerPrecision:
    """Rank the innermost modules by the error that they add; of several calls, the worst counts.

    Args:
        side: The side of lower precision.
        dtypes: The types of its weights and activations.
        measured: Whether each module ran from right inputs.
    """
    names = sorted(dtype.removeprefix("torch.") for dtype in dtypes)
    is_rounding = coarser(dtypes) not in ("", "torch.float32", "torch.float64")
    dtype = coarser(dtypes).removeprefix("torch.") if is_rounding else "quantized"
    dtype = next(filter(_is_quantized, names), dtype)
    calls: dict[tuple[object, ...], dict[Side, list[ComparedPair]]] = {}
    for pair in pairs:
        if pair.error is not None and pair.side != "parameter":
            place = pair.model, pair.module, pair.loop, pair.step, pair.call
            calls.setdefault(place, {"input": [], "output": []})[pair.side].append(pair)
    worst: dict[ModulePath, AddedError] = {}
    end = None
    for call in calls.values():
        if not call["output"]:
            continue
        error = _added(call["input"], call["output"], measured)
        if not error.module:
            end = error.output_error
        if not (call["input"] or measured):
            continue  # what was made and what was given cannot be told apart
        path = error.model, error.module
        if path not in worst or worst[path].added < error.added:
            worst[path] = error
    enclosing = {(model, name) for model, module in worst for name in enclosing_names(module)}
    modules = [error for path, error in worst.items() if path not in enclosing]
    modules.sort(key=lambda error: -error.added)
    return LowerPrecision(side, dtype, end, measured, modules)


def find_outliers(
    precision: LowerPrecision, pairs: Sequence[ComparedPair], limit: float
) -> list[Finding]:
    """Return the outputs of modules that add more than lower precision explains, in order."""
    outliers = {
        (error.model, error.module): error for error in precision.modules if error.added > limit
    }
    worst: dict[ModulePath, ComparedPair] = {}
    for pair in pairs:
        path = pair.model, pair.module
        if pair.side != "output" or pair.error is None or path not in outliers:
            continue
        if path not in worst or pair.error > (worst[path].error or 0.0):
            worst[path] = pair
    return [
        replace(
            pair_finding(pair),
            floor=limit,
            explanation=(
                f"The output of {pair.port_module} is off by {pair.error:.2g} and its inputs by "
                f"{outliers[path].input_error:.2g}: it adds more than lower precision explains."
            ),
        )
        for path, pair in worst.items()
    ]


def outlier_finding(pair: ParameterPair) -> Finding:
    """Return the finding of a weight that is off much further than all others."""
    text = (
        f"{pair.port[0].full_name} is off by {pair.error:.2g}, far more than the other weights, "
        "which seem to be rounded to few bits."
    )
    return parameter_finding(pair, "weights", Tolerance().of_parameters(pair.reference), text)


def describe_evened_out(precision: LowerPrecision) -> str | None:
    """Say which module adds far more than rounding to 16 bits, though what follows matches.

    A norm or a softmax may even it out: because this is how the programs are written, or because
    the fault is small enough to hide in the rounding. Two recordings cannot tell.
    """
    outliers = [error for error in precision.modules if error.added > _FLOOR]
    if not outliers:
        return None
    worst, others = outliers[0], len(outliers) - 1
    return (
        f"compare in float32: {worst.module} adds an error of {worst.added:.2g}"
        + (f" ({others} more modules likewise)" if others else "")
        + f", which {precision.dtype} does not explain, though later modules even it out"
    )


def _added(
    inputs: Sequence[ComparedPair], outputs: Sequence[ComparedPair], measured: bool
) -> AddedError:
    given, made = (
        max((pair.error or 0.0 for pair in pairs), default=0.0) for pairs in (inputs, outputs)
    )
    # independent errors add up as squares
    added = made if measured else math.sqrt(max(0.0, made**2 - given**2))
    first = outputs[0]
    names = first.model, first.module, first.port_model, first.port_module
    return AddedError(*names, given, made, made if math.isinf(made) else added)
