"""Modules that no hook expects, as a layer between two others: each is a function of a tensor."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import torch

Tensor = torch.Tensor
Named = namedtuple("Named", "values rest")


@dataclasses.dataclass
class Output:
    values: Tensor
    rest: Any = None


class Quiet(torch.Tensor):
    """A subclass that forgets itself."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class Returning(torch.nn.Module):
    """Returns whatever a function makes of its input."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self._make = make

    def forward(self, x: Tensor) -> Any:
        return self._make(x)


class Odd(torch.nn.Module):
    """Calls a module that returns something odd, and goes on with its input."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner = Returning(make)

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        return x


def loop(x: Tensor) -> list[Any]:
    made: list[Any] = [x]
    made.append(made)
    return made


def nest(x: Tensor, depth: int = 200) -> Any:
    return [nest(x, depth - 1)] if depth else x


def count(x: Tensor) -> Iterator[Tensor]:
    yield from (x, x + 1)


class RaisingAttributes:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class RaisingLength(list):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        raise RuntimeError("no")

    def __len__(self) -> int:
        raise RuntimeError("no")


ODD: dict[str, Callable[[Tensor], Any]] = {
    "nothing": lambda x: None,
    "itself": lambda x: x,
    "a tuple": lambda x: (x, (x, None), "text", 3),
    "a dictionary": lambda x: {"a": x, 1: x, (2, None): [x], "\x1b[31m": x},
    "a named tuple": lambda x: Named(x, [x]),
    "a dataclass": lambda x: Output(x, {"again": x}),
    "a loop": loop,
    "a deep nest": nest,
    "a generator": count,
    "what raises": lambda x: RaisingAttributes(),
    "a list that raises": lambda x: RaisingLength([x]),
    "many": lambda x: [x] * 500,
    "empty": lambda x: x[:0],
    "a scalar": lambda x: x.sum(),
    "booleans": lambda x: x > 0,
    "integers": lambda x: (x * 1e6).to(torch.int64),
    "bytes": lambda x: x.to(torch.uint8),
    "half": lambda x: x.to(torch.bfloat16),
    "eight bits": lambda x: x.to(torch.float8_e4m3fn),
    "complex": lambda x: torch.complex(x, x),
    "a conjugate": lambda x: torch.complex(x, x).conj(),
    "an imaginary part": lambda x: torch.complex(x, x).conj().imag,
    "not finite": lambda x: x * float("nan") + float("inf"),
    "sparse": lambda x: x.to_sparse(),
    "sparse rows": lambda x: x.detach().to_sparse_csr(),
    "meta": lambda x: x.to("meta"),
    "quantised": lambda x: torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8),
    "mkldnn": lambda x: x.detach().to_mkldnn(),
    "jagged": lambda x: torch.nested.nested_tensor([x[0], x[1, :4]], layout=torch.jagged),
    "expanded": lambda x: x[:1, :1].expand(10**5, 10**5),
    "strided": lambda x: x.as_strided((2, 2), (3, 1)),
    "a subclass": lambda x: x.detach().as_subclass(Quiet),
    "a parameter": lambda x: torch.nn.Parameter(x.detach()),
    "freed": lambda x: x.detach().clone().set_(),
    "a tensor of another thread": lambda x: x.detach().share_memory_(),
}


def make_odd(name: str | None) -> torch.nn.Module:
    """Return a layer that returns its input."""
    return Odd(ODD[name]) if name is not None else torch.nn.Identity()
