"""Write a program statement by statement: each one is computed with numpy and put into a graph."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from otel_torch.graph.builder import GraphBuilder
from otel_torch.graph.graph import PUT, Graph
from tests.graph.sketches import ROUNDOFF, measure, round_to_bfloat16


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value of a program under construction."""

    array: np.ndarray
    index: int


def softmax(array: np.ndarray) -> np.ndarray:
    shifted = np.exp(array - array.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def silu(array: np.ndarray) -> np.ndarray:
    return array / (1 + np.exp(-array))


# name -> what it computes from operands and arguments
COMPUTES: dict[str, Any] = {
    "mm": lambda a, b: a @ b,
    "addmm": lambda c, a, b: a @ b + c,
    "add": lambda a, b: a + b,
    "add.scalar": lambda a, s: a + np.float32(s),
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "mul.scalar": lambda a, s: a * np.float32(s),
    "addcmul": lambda c, a, b: c + a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "exp": np.exp,
    "tanh": np.tanh,
    "sin": np.sin,
    "round": np.round,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "square": lambda a: a * a,
    "sigmoid": lambda a: 1 / (1 + np.exp(-a)),
    "silu": silu,
    "silu_backward": lambda d, a: d * (1 / (1 + np.exp(-a))) * (1 + a * (1 - 1 / (1 + np.exp(-a)))),
    "relu": lambda a: np.maximum(a, 0),
    "softmax": softmax,
    "sum": lambda a, axis: a.sum(axis, keepdims=True),
    "mean": lambda a, axis: a.mean(axis, keepdims=True),
    "where": lambda m, a, s: np.where(m, a, np.float32(s)),
    "gt": lambda a, b: a > b,
    "le": lambda a, b: a <= b,
    "sub.scalar": lambda a, s: a - s,
    "add.int": lambda a, s: a + s,
    "logical_and": lambda a, b: a & b,
    "rms_norm": lambda a, w, e: a / np.sqrt((a * a).mean(-1, keepdims=True) + np.float32(e)) * w,
    "sdpa": lambda q, k, v, m, s: softmax(q @ np.swapaxes(k, -1, -2) * np.float32(s) + m) @ v,
}
MOVES: dict[str, Any] = {
    "reshape": lambda a, shape: a.reshape(shape),
    "transpose": lambda a, axes: np.transpose(a, axes),
    "slice": lambda a, axis, start, stop: np.take(a, range(start, stop), axis),
    "cat": lambda *a: np.concatenate(a[:-1], a[-1]),
    "expand": lambda a, shape: np.broadcast_to(a, shape).copy(),
    "roll": lambda a, shift, axis: np.roll(a, shift, axis),
}


@dataclass(slots=True)
class Writer:
    """Writes one program.

    Args:
        dtype: What results of computations are rounded to.
        file: Name of the source file in lines.
        noise: Seed of errors of half a rounding in each result; None for none.
        put: What values are to be instead, by their numbers.
        has_rows: Whether the rows of values are measured, too.

    Attributes:
        arrays: All values, by their numbers.
    """

    dtype: str = "float32"
    file: str = "reference.py"
    noise: int | None = None
    put: dict[int, np.ndarray] = field(default_factory=dict)
    has_rows: bool = False
    arrays: list[np.ndarray] = field(default_factory=list)
    builder: GraphBuilder = field(default_factory=GraphBuilder)
    line: str = ""
    inside: int = -1
    _leaves: dict[str, Tensor] = field(default_factory=dict)

    def at(self, line: str) -> Writer:
        """Set the line of the statements that follow."""
        self.line = line
        return self

    def leaf(self, name: str, array: np.ndarray, kind: str = "parameter") -> Tensor:
        """Return a leaf; the same name is the same value."""
        if name not in self._leaves:
            if kind == "parameter" and self.dtype == "bfloat16":
                array = round_to_bfloat16(array)
            self._leaves[name] = self._value(array, None, leaf=kind, name=name)
        return self._leaves[name]

    def op(self, name: str, *operands: Any, to: str | None = None) -> Tensor:
        """Compute a statement; tensors among the operands are read, the rest are arguments."""
        compute = COMPUTES.get(name) or MOVES[name]
        arrays = [item.array if isinstance(item, Tensor) else item for item in operands]
        result = np.asarray(compute(*arrays))
        if name not in MOVES:
            result = self._rounded(result)
        return self._made(name, operands, result)

    def cast(self, tensor: Tensor) -> Tensor:
        """Round a value to bfloat16."""
        return self._made("to", (tensor, "bfloat16"), round_to_bfloat16(tensor.array), "bfloat16")

    def put_there(self, array: np.ndarray) -> Tensor:
        """Return a value that a trial has put in the place of the program's own."""
        return self._value(array, None, maker=self.builder.add_node(PUT, [], line=self._line()))

    def end(self, name: str, tensor: Tensor) -> None:
        """Return a value."""
        self.builder.add_end(name, tensor.index)

    def finish(self) -> Graph:
        """Return the graph."""
        return self.builder.finish()

    def _rounded(self, array: np.ndarray) -> np.ndarray:
        if array.dtype.kind != "f":
            return array
        if self.noise is not None:
            self.noise += 1
            half = np.random.default_rng(self.noise).uniform(-0.5, 0.5, array.shape)
            array = array * (1 + 2 * ROUNDOFF[self.dtype] * half)
        array = array.astype(np.float32)
        return round_to_bfloat16(array) if self.dtype == "bfloat16" else array

    def _made(
        self, name: str, operands: tuple[Any, ...], result: np.ndarray, dtype: str | None = None
    ) -> Tensor:
        reads = [item.index for item in operands if isinstance(item, Tensor)]
        plain = [None if isinstance(item, Tensor) else item for item in operands]
        node = self.builder.add_node(
            name,
            reads,
            arguments=json.dumps(plain),
            moves=name in MOVES,
            casts=name == "to",
            line=self._line(),
            inside=self.inside,
            is_of_angles=name == "sin",
            rounds_to_whole=name == "round",
        )
        return self._value(result, dtype, maker=node)

    def _value(self, array: np.ndarray, dtype: str | None, **fields: Any) -> Tensor:
        array = self.put.get(len(self.arrays), array)
        self.arrays.append(array)
        content = self._content(array, dtype)
        return Tensor(array, self.builder.add_value(line=self._line(), **fields, **content))

    def _line(self) -> tuple[str, str]:
        return self.file, self.line

    def _content(self, array: np.ndarray, dtype: str | None = None) -> dict[str, Any]:
        sketch, statistics, nonfinite = measure(array)
        kind = {"f": dtype or self.dtype, "i": "int64", "b": "bool"}[array.dtype.kind]
        rows = array.reshape(-1, array.shape[-1]) if self.has_rows and array.ndim else None
        return {
            "shape": array.shape,
            "dtype": kind,
            "roundoff": ROUNDOFF[kind],
            "sketch": sketch,
            "rows": None if rows is None else np.stack([measure(row)[0] for row in rows]),
            "statistics": statistics,
            "nonfinite": nonfinite,
        }
