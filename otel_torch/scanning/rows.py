"""What a scan found out, as plain data: who runs a forward without its numbers fills these rows,
who reports on it reads them.

For they would import each other otherwise. Knows no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor. shape: a size that depends on the data is -1, and then `bytes` is None. dtype:
    without `torch.`. requires_grad: whether it has a gradient in a backward pass. number: the same
    for the same tensor by identity, in order of first sight, as `value` in a recording; None for
    what was not seen passing.
    """

    label: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int | None
    requires_grad: bool = False
    number: int | None = None


@dataclass(slots=True)
class Call:
    """One call of one module, with everything that happened inside it.

    call: how often the module had run before in this forward. order: place among all calls, by
    entering, from 0. depth: how many other calls it lies in. parameter_bytes, buffer_bytes: of the
    module and all in it. flops: floating-point operations of matrix products, convolutions and
    attention, a multiply-add counted as two; a lower bound where `dynamic` (sizes depend on the
    data). finished: False where the scan ended in here. selected: whether a session would record
    the call.
    """

    module: str
    class_name: str
    call: int
    order: int
    depth: int
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    parameter_bytes: int
    buffer_bytes: int
    flops: int = 0
    dynamic: bool = False
    finished: bool = False
    selected: bool = True


@dataclass(slots=True)
class Module:
    """One module of the model, called or not. parameters, buffers: its own, without those of the
    modules in it; a shared module has them under the first of its names.
    """

    name: str
    class_name: str
    parameter_bytes: int
    buffer_bytes: int
    parameters: tuple[Value, ...]
    buffers: tuple[Value, ...] = ()
    selected: bool = True


@dataclass(slots=True)
class Forward:
    """A forward of a model that was not run.

    model: the class of the root. modules: each of its names once; calls: in order of entering.
    flops: of all of it, a lower bound where `dynamic`, as in `Call`. ended: None, or where and why
    the forward could not go on; failed: it ended with an error that a real run has too, not because
    a value was asked for.
    """

    model: str
    modules: list[Module]
    calls: list[Call]
    parameter_bytes: int
    buffer_bytes: int
    flops: int
    dynamic: bool
    ended: str | None
    failed: bool
