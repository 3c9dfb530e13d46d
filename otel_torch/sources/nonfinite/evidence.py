"""What is seen of a call at the moment its first NaN or Inf is seen, which tells who produced it.

Afterwards a call's inputs are gone. They are examined once, in the hook, for the call and for every
call around it, and only on a CPU: a device would have to be waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from otel_torch.sources.models.model import ModuleSite
from otel_torch.sources.modules.call_stack import running_calls
from otel_torch.sources.tensors.parameter_data import value_of
from otel_torch.sources.tensors.values import walk_inputs
from otel_torch.statistics.measure import measure
from otel_torch.statistics.row_layout import RANGE, largest_magnitude, nonfinite_kind
from otel_torch.torch_private import unobserved

# a kind of `nonfinite_kind`, "finite", or "unknown" where a device would have to be waited for
Kind = Literal["finite", "NaN", "Inf", "-Inf", "unknown"]


@dataclass(frozen=True, slots=True)
class Examined:
    """A tensor by its name in the call: `in[0]`, `weight`. `largest`: its largest |x|."""

    name: str
    kind: Kind
    largest: float


@dataclass(frozen=True, slots=True)
class EnclosingCall:
    """A call that was running, with its inputs. `site`: where its module is."""

    site: ModuleSite
    model: str
    module: str
    inputs: tuple[Examined, ...]

    @property
    def bad_input(self) -> Examined | None:
        """The first input with a NaN or +Inf, if any."""
        return next((tensor for tensor in self.inputs if tensor.kind in ("NaN", "Inf")), None)

    @property
    def is_known(self) -> bool:
        """Whether all inputs could be examined."""
        return all(tensor.kind != "unknown" for tensor in self.inputs)


@unobserved
def examine_running_calls(outputs: Iterable[Tensor]) -> list[EnclosingCall]:
    """Return the calls that this thread is in, innermost first, with their inputs.

    Args:
        outputs: what the innermost call returned. An input that it changed in place is not known.
    """
    written = {_memory(tensor) for tensor in outputs}
    calls = []
    for site, args, kwargs in running_calls():
        inputs = tuple(
            Examined(label, "unknown", 0.0)
            if _memory(tensor) in written and _was_written(tensor)
            else examine(label, tensor)
            for label, tensor in walk_inputs(args, kwargs)
            if tensor.is_floating_point() or tensor.is_complex()
        )
        calls.append(EnclosingCall(site, site.model.name, site.name, inputs))
    return calls


@unobserved
def examine_weights(module: nn.Module, recurse: bool) -> list[Examined]:
    """Return the parameters and buffers of a module on a CPU, and of what it contains."""
    return [examine(name, tensor) for name, tensor in _weights(module, recurse)]


def _weights(module: nn.Module, recurse: bool) -> Iterator[tuple[str, Tensor]]:
    named = (*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse))
    for name, tensor in named:
        value = value_of(tensor)
        if value is not None and value.is_floating_point():
            yield name, value


def examine(name: str, tensor: Tensor) -> Examined:
    """Return what a tensor is, if it is on a CPU."""
    row = measure(tensor, RANGE).row if tensor.is_cpu else None
    if row is None or isinstance(row, Tensor):
        return Examined(name, "unknown" if tensor.numel() else "finite", 0.0)
    kind: Kind = nonfinite_kind(row) or "finite"  # type: ignore[assignment]  # one of its strings
    return Examined(name, kind, largest_magnitude(row))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _was_written(tensor: Tensor) -> bool:
    """Return whether a tensor may have been changed in place since it was made."""
    return tensor.is_inference() or bool(tensor._version)
