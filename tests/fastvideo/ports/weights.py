"""Weights that two processes agree on without talking: each tensor follows from the seed and its
name in the reference.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor, nn

State = dict[str, Tensor]


def generator(seed: int, name: str) -> torch.Generator:
    """Random numbers that belong to one name under one seed."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))


def normal(seed: int, name: str, *shape: int) -> Tensor:
    """Standard normal numbers of this shape, fp32, the same in every process."""
    return torch.randn(*shape, generator=generator(seed, name))


# what a parameter's last name says about it, where its number of dimensions alone would mislead
_CENTRE_AND_SPREAD = {
    "scale_shift_table": (0.0, 0.3),
    "modulation": (0.0, 0.3),
    "running_var": (1.0, 0.1),
    "gamma": (1.0, 0.2),
    "alpha": (0.0, 0.1),
    "beta": (0.0, 0.1),
}
_EMBEDDINGS = ("embed_tokens", "token_embedding", "shared")


def weight(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """A weight that neither dies nor explodes: matrices keep the size of what passes, norms vary
    around one, biases are small and never zero (a bias that is zero hides that it is missing).
    """
    value = normal(seed, name, *shape)
    *owners, leaf = name.split(".")
    if leaf in _CENTRE_AND_SPREAD:
        centre, spread = _CENTRE_AND_SPREAD[leaf]
        return centre + spread * (value.abs() if leaf == "running_var" else value)
    if any(owner in _EMBEDDINGS for owner in owners):
        return value
    if len(shape) >= 2:
        return value / math.sqrt(math.prod(shape[1:]))
    if leaf == "weight":  # the only vectors called so are norms'
        return 1 + 0.2 * value
    return 0.1 * value


def reference_state(seed: int, reference: nn.Module) -> State:
    """A checkpoint for the reference, as its authors would have published it: fp32, by the
    reference's names.
    """
    learned = dict(reference.named_parameters())
    measured = {
        name: tensor
        for name, tensor in reference.state_dict().items()
        if name.endswith(("running_mean", "running_var"))
    }
    return {
        name: weight(seed, name, tuple(tensor.shape))
        for name, tensor in (learned | measured).items()
    }


def cast(model: nn.Module, dtype: torch.dtype, keep_fp32: tuple[str, ...] = ()) -> None:
    """Cast as loaders do and `.to()` does not: what a checkpoint holds takes the dtype, tables made
    at construction stay as they were made, and modules whose name has a component in `keep_fp32`
    stay too.
    """
    saved = set(model.state_dict())
    for owner, module in model.named_modules():
        for store in (module._parameters, module._buffers):
            for leaf, tensor in store.items():
                name = f"{owner}.{leaf}" if owner else leaf
                kept = any(component in keep_fp32 for component in name.split("."))
                if tensor is not None and tensor.is_floating_point() and name in saved and not kept:
                    tensor.data = tensor.data.to(dtype)
