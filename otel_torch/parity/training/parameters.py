"""The parameters that the two programs train, paired as they were before the first step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from otel_torch.parity.call_graph import Parameter
from otel_torch.parity.parameters import ParameterPair
from otel_torch.parity.sides import Sides
from otel_torch.parity.training.steps import ParameterKey, RecordedTensor

# relative distance of the sketches of equal parameters: rounding to another dtype at most
_SAME = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class TrainedPair:
    """A parameter, or the parts of a fused one, on either side.

    in_order: Whether its elements are in the same order on both sides.
    """

    models: Sides[str]
    keys: Sides[tuple[ParameterKey, ...]]
    in_order: bool

    def of(
        self, tables: Sides[dict[ParameterKey, RecordedTensor]]
    ) -> Sides[list[RecordedTensor] | None]:
        """Return its tensors in a table of either side, None where one is missing."""
        return Sides(
            _look_up(self.keys.reference, tables.reference), _look_up(self.keys.port, tables.port)
        )

    @property
    def names(self) -> Sides[str]:
        """Its first name on either side: `model:module.name`, as the metadata of optimizers has."""
        return Sides(*(full_name(model, keys[0]) for model, keys in zip(*self._sides, strict=True)))

    @property
    def _sides(self) -> tuple[Sides[str], Sides[tuple[ParameterKey, ...]]]:
        return self.models, self.keys


def full_name(model: str, key: ParameterKey) -> str:
    """Return the name of a parameter in the metadata of optimizers.

    >>> full_name("Model", ParameterKey("head", "weight"))
    'Model:head.weight'
    """
    return f"{model}:{'.'.join(filter(None, key))}"


def trained_pairs(pairs: Iterable[ParameterPair], order: Sequence[Parameter]) -> list[TrainedPair]:
    """Return the pairs of parameters; buffers are not trained.

    Args:
        order: The parameters of the reference, in their order.
    """
    number = {id(parameter): index for index, parameter in enumerate(order)}
    return [
        TrainedPair(
            Sides(pair.reference[0].model, pair.port[0].model),
            Sides(_keys(pair.reference), _keys(pair.port)),
            _is_in_order(pair),
        )
        for pair in sorted(pairs, key=lambda pair: number[id(pair.reference[0])])
        if not any(part.is_buffer for part in (*pair.reference, *pair.port))
    ]


def _is_in_order(pair: ParameterPair) -> bool:
    """Return whether equal numbers are in equal places, as far as the sketches tell."""
    first, second = pair.reference[0], pair.port[0]
    if pair.is_fused or pair.how == "transposed":
        return False
    if not pair.equal or first.sketch is None or second.sketch is None:
        return True
    distance = np.linalg.norm(first.sketch - second.sketch)
    return bool(distance <= _SAME * np.linalg.norm(first.sketch))


def _keys(parameters: Sequence[Parameter]) -> tuple[ParameterKey, ...]:
    return tuple(ParameterKey(part.module, part.name) for part in parameters)


def _look_up(
    keys: Sequence[ParameterKey], table: dict[ParameterKey, RecordedTensor]
) -> list[RecordedTensor] | None:
    tensors = [table[key] for key in keys if key in table]
    return tensors if len(tensors) == len(keys) else None
