"""How the ports get the reference's weights."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


def shaken(model: Model) -> Model:
    """Move biases and norms away from 0 and 1, which would hide half of all faults."""
    model.eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter += 0.1 * torch.randn(parameter.shape)
    return model


class Functional(nn.Module):
    """A port without layers: it holds the reference's state under flat names."""

    def __init__(self, reference: nn.Module) -> None:
        super().__init__()
        for name, tensor in reference.state_dict().items():
            if tensor.is_floating_point():
                copied = nn.Parameter(tensor.clone(), requires_grad=False)
                self.register_parameter(name.replace(".", "_"), copied)

    def w(self, *name: object) -> Tensor:
        return getattr(self, "_".join(map(str, name)).replace(".", "_"))
