"""Causes inside a small function: another activation, another epsilon, a norm without its weight.

The function is computed again from the tensor before it, in every variant of a table. If one
variant yields the reference's tensor and another one the port's, the two names are the cause.
Without elements an activation is told from its extremes: its maximum is the function of the
largest input.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otel_torch.parity.diagnosis.clues import Clues, Measured, parameters_of
from otel_torch.parity.finding import Cause

Array = NDArray[Any]
Function = Callable[[Array], Array]

# a function that fits is this close (relative L2 of elements, relative difference of extremes)
_EXACT, _EXACT_EXTREME = 1e-5, 3e-6
# the latest tensors of the same size are tried as the input, and as the factor of a gate
_MOST_INPUTS = 6
_MOST_ELEMENTS = 2**21
_EPSILONS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 1e-12, 0.0)
_GROUPS = (8, 32, 16, 4, 2, 64, 1)

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * x))


def _softplus(x: Array) -> Array:
    return np.logaddexp(0, x)


ACTIVATIONS: dict[str, Function] = {
    "GELU (erf)": lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
    "GELU (tanh)": lambda x: (
        0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "quick GELU": lambda x: x * _sigmoid(1.702 * x),
    "SiLU": lambda x: x * _sigmoid(x),
    "ReLU": lambda x: np.maximum(x, 0),
    "squared ReLU": lambda x: np.maximum(x, 0) ** 2,
    "leaky ReLU (0.01)": lambda x: np.where(x > 0, x, 0.01 * x),
    "leaky ReLU (0.2)": lambda x: np.where(x > 0, x, 0.2 * x),
    "ELU": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "Mish": lambda x: x * np.tanh(_softplus(x)),
    "softplus": _softplus,
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "no activation": lambda x: x,
}


def activation(clues: Clues) -> Cause | None:
    """The two programs use different activations."""
    for candidate in _inputs(clues):
        if clues.elements is not None and candidate.elements is not None:
            names = [_by_elements(candidate.elements, side, clues) for side in clues.elements]
        else:
            names = [_by_extremes(candidate, side, clues) for side in (clues.reference, clues.port)]
        if None not in names and names[0] != names[1]:
            return Cause("activation", True, f"the port uses {names[1]}, the reference {names[0]}")
    return None


def gate(clues: Clues) -> Cause | None:
    """The two programs activate different factors of a product, or with different functions."""
    if clues.elements is None:
        return None
    inputs = [candidate for candidate in _inputs(clues) if candidate.elements is not None]
    gates = [_gate_of(inputs, side, clues) for side in clues.elements]
    reference, port = gates
    if reference is None or port is None or reference == port:
        return None
    names = [f"{name}({first}) × {second}" for name, first, second in (port, reference)]
    return Cause("activation", True, f"the port computes {names[0]}, the reference {names[1]}")


def norm(clues: Clues) -> Cause | None:
    """The two programs normalize with different constants or different formulas."""
    role = clues.role
    if role is None or clues.elements is None or clues.tensors is None or not role.call.inputs:
        return None
    given = clues.tensors.reference.of_role(role.call.inputs[0])
    if given is None or given.size != clues.elements[0].size or given.size > _MOST_ELEMENTS:
        return None
    given = given.astype(np.float64)
    named = parameters_of(clues.parameters.reference, role.call.module_path)
    read = clues.tensors.reference.of_parameter
    weight, bias = (None if name not in named else read(named[name]) for name in ("weight", "bias"))
    variants = list(_norms(given, weight, bias))
    names = [
        next((name for name, make in variants if _is_close(make(), side, clues)), None)
        for side in clues.elements
    ]
    if None in names or names[0] == names[1]:
        return None
    return Cause("norm", True, f"the port computes {names[1]}, the reference {names[0]}")


def _inputs(clues: Clues) -> Iterator[Measured]:
    """Yield the latest earlier tensors of this size that are not integers."""
    latest = reversed(clues.same_size)
    for count, candidate in enumerate(latest):
        if count == _MOST_INPUTS or candidate.numel > _MOST_ELEMENTS:
            return
        yield candidate


def _by_elements(given: Array, result: Array, clues: Clues) -> str | None:
    given = given.reshape(result.shape)
    if np.iscomplexobj(given) or np.iscomplexobj(result):
        return None
    return next(
        (
            name
            for name, function in ACTIVATIONS.items()
            if _is_close(function(given), result, clues)
        ),
        None,
    )


def _by_extremes(given: Measured, result: Measured, clues: Clues) -> str | None:
    """Return the only activation whose extremes fit, or None."""
    low, high = given.extremes
    result_low, result_high = result.extremes
    if not np.isfinite([low, high, result_low, result_high]).all() or low >= 0 or high < 0.5:
        return None
    slack = max(_EXACT_EXTREME, clues.limit)
    fitting = [
        name
        for name, function in ACTIVATIONS.items()
        if _fits(function, (low, high), (result_low, result_high), slack)
    ]
    return fitting[0] if len(fitting) == 1 else None


def _fits(
    function: Function, given: tuple[float, float], result: tuple[float, float], slack: float
) -> bool:
    low, high = given
    with np.errstate(all="ignore"):
        largest = float(function(np.array([high]))[0])
        below = function(np.linspace(low, 0, 20_001))
        smallest, at_low = float(below.min()), float(below[0])
    if abs(result[1] - largest) > slack * abs(largest):
        return False
    # a minimum inside the range is rarely hit exactly: no result is below it, some are near it
    margin = slack * max(abs(smallest), 1e-3)
    if abs(smallest - at_low) <= margin:
        return abs(result[0] - at_low) <= margin
    return smallest - margin <= result[0] <= 0.9 * smallest


def _gate_of(
    inputs: Sequence[Measured], result: Array, clues: Clues
) -> tuple[str, str, str] | None:
    """Return the activation, what it is applied to, and the other factor."""
    for name, function in ACTIVATIONS.items():
        for activated, factor in itertools.permutations(inputs, 2):
            given, other = (np.reshape(side.elements, result.shape) for side in (activated, factor))  # type: ignore[arg-type]
            if _is_close(function(given) * other, result, clues):
                return name, activated.name, factor.name
    return None


def _norms(
    given: Array, weight: Array | None, bias: Array | None
) -> Iterator[tuple[str, Callable[[], Array]]]:
    """Yield (name, function) of the variants, the usual ones first."""
    channels = given.shape[1] if given.ndim > 2 else 0
    groups = [groups for groups in _GROUPS if channels and channels % groups == 0]
    fits = all(numbers is None or numbers.shape == given.shape[-1:] for numbers in (weight, bias))
    kinds = ("layer", "RMS") if fits else ()
    for epsilon in _EPSILONS:
        for scale_name, scale in _scales(weight):
            for kind in kinds:
                for shift_name, shift in _shifts(bias):
                    name = f"a {kind} norm with epsilon {epsilon:g}{scale_name}{shift_name}"
                    yield name, _normalizer(given, kind == "layer", epsilon, scale, shift)
    for epsilon in _EPSILONS:
        for count in groups:
            name = f"a norm of {count} groups with epsilon {epsilon:g}"
            yield name, _group_normalizer(given, count, epsilon, weight, bias)


def _scales(weight: Array | None) -> Iterable[tuple[str, Array | float]]:
    if weight is None:
        return [("", 1.0)]
    return [("", weight), (" and weight 1 + w", 1 + weight), (" without its weight", 1.0)]


def _shifts(bias: Array | None) -> Iterable[tuple[str, Array | float]]:
    return [("", 0.0)] if bias is None else [("", bias), (" without its bias", 0.0)]


def _normalizer(
    given: Array, is_centered: bool, epsilon: float, scale: Array | float, shift: Array | float
) -> Callable[[], Array]:
    def make() -> Array:
        centered = given - given.mean(-1, keepdims=True) if is_centered else given
        square = np.mean(centered**2, axis=-1, keepdims=True)
        normalized: Array = centered / np.sqrt(square + epsilon) * scale + shift
        return normalized

    return make


def _group_normalizer(
    given: Array, groups: int, epsilon: float, weight: Array | None, bias: Array | None
) -> Callable[[], Array]:
    def make() -> Array:
        parts = given.reshape(given.shape[0], groups, -1)
        centered = parts - parts.mean(-1, keepdims=True)
        square = np.mean(centered**2, axis=-1, keepdims=True)
        result: Array = (centered / np.sqrt(square + epsilon)).reshape(given.shape)
        shape = (1, -1, *[1] * (given.ndim - 2))
        for numbers, combine in ((weight, np.multiply), (bias, np.add)):
            if numbers is not None and numbers.size == given.shape[1]:
                result = combine(result, numbers.reshape(shape))
        return result

    return make


def _is_close(made: Array, result: Array, clues: Clues) -> bool:
    """Return whether a recomputed tensor is a recorded one but for rounding."""
    result = result.reshape(made.shape)
    size = float(np.linalg.norm(result))
    with np.errstate(all="ignore"):
        distance = float(np.linalg.norm(made - result))
    difference = float(np.linalg.norm(clues.elements[1] - clues.elements[0]))  # type: ignore[index]
    slack = max(_EXACT / 10, clues.limit) * size
    return distance <= min(slack, 0.1 * difference) if math.isfinite(distance) else False
