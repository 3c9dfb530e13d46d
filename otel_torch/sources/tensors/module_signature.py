"""What a parity record says of its module: the class, and how forward names the arguments."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from otel_torch.sources.modules.module_names import class_name
from otel_torch.sources.tensors.values import argument_name, argument_names


class ModuleSignature(NamedTuple):
    """The class of a module and the names of the positional parameters of its forward.

    >>> ModuleSignature("MLP", ("x", "mask")).argument("in[1]")
    'mask'
    """

    class_name: str
    parameters: tuple[str, ...]

    def argument(self, label: str) -> str | None:
        """Return the name of an input; None for an output, or an input without a name."""
        return argument_name(label, self.parameters) if label.startswith("in") else None


def signature_of(module: nn.Module) -> ModuleSignature:
    return ModuleSignature(class_name(module), tuple(argument_names(module)))
