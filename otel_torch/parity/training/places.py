"""Where a wrong gradient was made: the module whose backward pass turned right gradients wrong.

The gradient of a tensor is made by what uses the tensor. So a wrong gradient of an output, with all
gradients before it right, names the module that takes the output as its input:

    forward     embed ── x ──▶ act ── y ──▶ head
    backward    ∂x wrong ◀── act ◀── ∂y right          act is at fault

If the output goes to no recorded module, or to several, the code between them is at fault, and the
place is the output itself.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from otel_torch.parity.call_graph import Sketch, enclosing_names
from otel_torch.parity.training.gradients import GradientPair
from otel_torch.parity.training.step_context import Place
from otel_torch.parity.training.steps import GradientKey, RecordedStep, RecordedTensor, gradient_key

# how close the difference of two gradients is to another gradient if that was left out or added
_COLLINEAR = 0.02
# what rounding leaves of a sum minus its terms, relative to it
_SUM = 1e-5


class _Use(NamedTuple):
    """A call that takes a tensor as its input."""

    module: str
    tensor: str
    call: int


class ForwardUses:
    """Which modules took the output of which module, in the forwards of one side of a step.

    A sum of an output and another tensor, as after a residual connection, passes on its gradient as
    it is: what takes the sum counts as taking the output.
    """

    def __init__(self, step: RecordedStep) -> None:
        self._values: dict[GradientKey, int] = {}
        self._uses: dict[int, list[_Use]] = {}
        self._final: set[int] = set()  # values that the model returns
        self._tensors: dict[int, RecordedTensor] = {}
        self._computed: list[int] = []  # values that no module returned
        for row in step.forward_rows():
            record = row.record
            if record.value is None:
                continue
            key = gradient_key(record)
            if key is not None:
                self._values[key] = record.value
                if not record.module:
                    self._final.add(record.value)
            elif record.tensor.startswith("in"):
                use = _Use(record.module, record.tensor, record.call or 0)
                self._uses.setdefault(record.value, []).append(use)
                if record.value not in self._tensors:
                    self._computed.append(record.value)
            self._tensors.setdefault(record.value, row)

    def is_final(self, key: GradientKey) -> bool:
        """Return whether the model returns an output, so that the loss is made of it."""
        return self._values.get(key) in self._final

    def of(self, key: GradientKey) -> list[_Use]:
        """Return the innermost calls that an output enters."""
        uses = self._all(key)
        outer = {name for use in uses for name in enclosing_names(use.module)}
        return [use for use in uses if use.module not in outer]

    def _all(self, key: GradientKey) -> list[_Use]:
        value = self._values.get(key, -1)
        uses = self._uses.get(value, [])
        return uses or next((self._uses[total] for total in self._sums_with(value)), [])

    def _sums_with(self, value: int) -> Iterator[int]:
        """Yield the computed values that are a value plus another recorded one."""
        term = self._tensors.get(value)
        if term is None or term.sketch is None:
            return
        alike = {
            number: tensor.sketch
            for number, tensor in self._tensors.items()
            if tensor.numel == term.numel and tensor.sketch is not None
        }
        for total in self._computed:
            if total not in alike or total == value:
                continue
            remainder = alike[total] - term.sketch
            size = float(np.linalg.norm(alike[total]))
            others = np.stack([sketch for number, sketch in alike.items() if number != total])
            if np.linalg.norm(others - remainder, axis=1).min(initial=np.inf) <= _SUM * size:
                yield total

    def sources(self, key: GradientKey) -> list[GradientKey]:
        """Return the outputs that the call of an output takes as inputs."""
        values = {
            value
            for value, uses in self._uses.items()
            if any((use.module, use.call) == (key.module, key.call) for use in uses)
        }
        return [source for source, value in self._values.items() if value in values]

    def maker(self, key: GradientKey, has_other_path: bool) -> Place:
        """Return what made the gradient of an output: its only user, else the code behind it.

        Args:
            has_other_path: Whether the gradient is off by what reaches it beside the innermost
                user, so that the code around that is at fault.
        """
        innermost = self.of(key)
        if len(innermost) != 1:
            return output_place(key)
        use = innermost[0]
        if has_other_path:
            around = list(enclosing_names(use.module))[:-1]
            containers = [
                other for name in around for other in self._all(key) if other.module == name
            ]
            if not containers:
                return output_place(key)
            use = containers[0]
        return Place(use.module, f"grad_{use.tensor}", "input", use.call)


def output_place(key: GradientKey) -> Place:
    """Return the place of the gradient that reaches an output."""
    return Place(key.module, key.tensor, "output", key.call)


def has_other_path(
    pair: GradientPair, right: Sequence[GradientPair], users: Container[str]
) -> bool:
    """Return whether a wrong gradient is off by a right one, which reaches it beside the module.

    For example, a residual connection carries the gradient of a block's output to its input.

    Args:
        users: The modules that take the tensor; the gradients of their outputs pass through them.
    """
    reference, port = _sketch(pair.reference), _sketch(pair.port)
    if reference is None or port is None:
        return False
    difference = port - reference
    size = float(np.linalg.norm(difference))
    for other in right:
        sketch = _sketch(other.reference)
        if other.keys is None or other.keys.reference.module in users:
            continue
        if sketch is None or other.reference[0].numel != pair.reference[0].numel:
            continue
        norm = float(np.linalg.norm(sketch))
        if size and norm and abs(float(difference @ sketch)) > (1 - _COLLINEAR) * size * norm:
            return True
    return False


def _sketch(tensors: Sequence[RecordedTensor]) -> Sketch | None:
    return tensors[0].sketch if len(tensors) == 1 else None
