"""Pair the outputs that both programs compute in a training step, so that their gradients compare.

By the matched modules, then by equal names, then by equal numbers. Only outputs that hold the same
numbers are paired: a container may return something else in another program, and the gradients of
different tensors differ.
"""

from __future__ import annotations

from collections.abc import Iterator

from otel_torch.parity.modules import ModulePath
from otel_torch.parity.sides import Sides
from otel_torch.parity.training.steps import GradientKey, RecordedStep, RecordedTensor, gradient_key
from otel_torch.parity.training.tensors import distance

# outputs of paired modules that differ by less are the same tensor, and others if they do
_SAME, _SURELY_SAME = 0.1, 1e-3


def pair_outputs(
    steps: Sides[RecordedStep], matched: dict[ModulePath, ModulePath]
) -> dict[GradientKey, GradientKey]:
    """Return the port's output of each output of the reference that has a counterpart.

    Args:
        matched: Module of the reference -> module of the port.
    """
    outputs = steps.map(_outputs)
    pairs: dict[GradientKey, GradientKey] = {}
    for key, output in outputs.reference.items():
        for candidate in _named_alike(key, steps, matched):
            if _are_same(output, outputs.port.get(candidate), _SAME):
                pairs.setdefault(key, candidate)
    taken = set(pairs.values())
    remaining = {key: output for key, output in outputs.port.items() if key not in taken}
    for key, output in outputs.reference.items():
        if key not in pairs:
            equal = [k for k, port in remaining.items() if _are_same(output, port, _SURELY_SAME)]
            if equal:
                pairs[key] = equal[0]
                del remaining[equal[0]]
    return pairs


def _named_alike(
    key: GradientKey, steps: Sides[RecordedStep], matched: dict[ModulePath, ModulePath]
) -> Iterator[GradientKey]:
    match = matched.get((steps.reference.model, key.module))
    if match is not None and match[0] == steps.port.model:
        yield key._replace(module=match[1])
    else:
        yield key


def _outputs(step: RecordedStep) -> dict[GradientKey, RecordedTensor]:
    """Return the outputs of a step's forwards, by the keys of their gradients."""
    outputs: dict[GradientKey, RecordedTensor] = {}
    for row in step.forward_rows():
        key = gradient_key(row.record)
        if key is not None:
            outputs.setdefault(key, row)
    return outputs


def _are_same(reference: RecordedTensor, port: RecordedTensor | None, limit: float) -> bool:
    if port is None or reference.numel != port.numel or not reference.l2 > 0:
        return False
    gap = distance([reference], [port], True)
    return gap is not None and gap <= limit * reference.l2
