"""One cached call of a module, in memory or partly on disk."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from otel_torch.capture.describe_value import describe_value
from otel_torch.capture.disk_spill import SpilledTensor
from otel_torch.capture.tensor_structure import first_argument, replace_leaves


class CacheEntry:
    """One call of a module; `output` or `inputs` is None where it was not cached."""

    __slots__ = ("_inputs", "_output", "has_output")

    def __init__(
        self, output: Any = None, inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    ) -> None:
        self._output, self._inputs = output, inputs
        self.has_output = output is not None

    @property
    def output(self) -> Any:
        """The module's return value."""
        return _load_spilled(self._output)

    @property
    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The call's `(args, kwargs)`."""
        inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = _load_spilled(self._inputs)
        return inputs

    @property
    def input(self) -> Any:
        """The first positional argument, else the first keyword argument, or None."""
        args, kwargs = self.inputs or ((), {})
        return first_argument(args, kwargs)

    def set_output(self, output: Any) -> None:
        """Complete the entry of a call whose inputs were cached first."""
        self._output, self.has_output = output, True

    def describe(self) -> str:
        """Return dtypes and shapes, such as `(float32[1, 3]) → float32[1, 2]`."""
        parts = [describe_value(self._output)] if self.has_output else []
        if self._inputs is not None:
            args, kwargs = self._inputs
            arguments = [describe_value(value) for value in args]
            arguments += [f"{key}={describe_value(value)}" for key, value in kwargs.items()]
            parts.insert(0, f"({', '.join(arguments)}) →")
        return " ".join(parts)

    def __repr__(self) -> str:
        return f"Entry({self.describe()})"

    def __getstate__(self) -> Any:
        return self.output, self.inputs, self.has_output

    def __setstate__(self, state: Any) -> None:
        self._output, self._inputs, self.has_output = state


def _load_spilled(value: Any) -> Any:
    loaded = False

    def load(tensor: SpilledTensor) -> Tensor:
        nonlocal loaded
        loaded = True
        return tensor.load()

    whole = replace_leaves(value, SpilledTensor, load)
    return whole if loaded else value  # a value in memory is the same object every time
