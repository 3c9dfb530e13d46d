"""The result of a scan as plain data: filled by the code that runs a forward without numbers, read
by the code that estimates costs and prints reports.

Knows nothing of torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScannedTensor:
    """One tensor of a call or a module.

    Args:
        shape: A size that depends on the data is -1; then `bytes` is None.
        dtype: Without `torch.`.
        requires_grad: Whether it has a gradient in a backward pass.
        number: Identifies the tensor, numbered in the order in which tensors are first seen, as
            `value` in a recording; None for a tensor that was not passed to a module.
    """

    label: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int | None
    requires_grad: bool = False
    number: int | None = None


@dataclass(slots=True)
class ScannedCall:
    """One call of one module, including everything inside it.

    Args:
        call: How many times the module had been called before in this forward.
        order: Index among all calls, in the order in which they start.
        depth: The number of enclosing calls.
        parameter_bytes, buffer_bytes: Of the module and its submodules.
        flops: Floating-point operations of matrix products, convolutions and attention; a
            multiply-add counts as two. A lower bound if `dynamic`.
        dynamic: Whether sizes depend on the data.
        finished: False if the scan stopped inside this call.
        selected: Whether a session would record the call.
    """

    module: str
    class_name: str
    call: int
    order: int
    depth: int
    inputs: tuple[ScannedTensor, ...]
    outputs: tuple[ScannedTensor, ...]
    parameter_bytes: int
    buffer_bytes: int
    flops: int = 0
    dynamic: bool = False
    finished: bool = False
    selected: bool = True


@dataclass(slots=True)
class ScannedModule:
    """One module of the model, called or not.

    Args:
        parameter_bytes, buffer_bytes: Of the module and its submodules.
        parameters, buffers: The direct ones, without those of submodules. A shared module has them
            under the first of its names.
        selected: Whether a session would record the module.
    """

    name: str
    class_name: str
    parameter_bytes: int
    buffer_bytes: int
    parameters: tuple[ScannedTensor, ...]
    buffers: tuple[ScannedTensor, ...] = ()
    selected: bool = True


@dataclass(slots=True)
class ScannedForward:
    """A forward that was scanned and not run.

    Args:
        model: The class of the root module.
        modules: All modules; a shared one once for each of its names.
        calls: In the order in which they start.
        flops, dynamic: Of the whole forward, as in `ScannedCall`.
        ended: Where and why the scan stopped early, or None.
        failed: Whether it stopped with an error that a real run would raise too, and not because it
            needed a value.
    """

    model: str
    modules: list[ScannedModule]
    calls: list[ScannedCall]
    parameter_bytes: int
    buffer_bytes: int
    flops: int
    dynamic: bool
    ended: str | None
    failed: bool
