"""Prints what recording must not change. The programs know nothing of otel_torch."""

import atexit
import hashlib
import os
import sys

import torch
from torch import nn


def check(*values: object) -> None:
    """Print a line to compare, in one write: several ranks share one standard output."""
    os.write(1, (" ".join(map(str, ("CHECK", *values))) + "\n").encode())


def logged(quantity: str, step: int, value: float | torch.Tensor) -> None:
    """Print what the framework reports of a training step: its loss, a rate, a norm."""
    check("logged", quantity, step, exact(value))


def exact(value: float | torch.Tensor) -> str:
    """Return all bits of a number."""
    return float(value).hex()


def digest(module: nn.Module) -> str:
    """Return a hash of all parameters and buffers; of its own shard for a distributed tensor."""
    sha256 = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        sha256.update(name.encode())
        sha256.update(local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return sha256.hexdigest()[:16]


def random_number() -> int:
    """Return the next number of torch's default generator."""
    return int(torch.randint(0, 2**31, ()).item())


def leave() -> None:
    """End a rank without finalizing the interpreter, in which a thread of gloo may abort it."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)
