"""Collect the gradients of a module's output through hooks on its tensors.

A backward hook on the module, as tensor_tracker uses it, inserts an extra node into the graph:
in-place operations after the module then fail, and outputs in dicts have no gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from otel_torch.capture.tensor_structure import replace_leaves

_OnGradients = Callable[[Sequence[Tensor | None]], None]


@dataclass(frozen=True)
class _GradientIndex:
    """Placeholder for the gradient of one tensor in a structured value."""

    index: int


class GradientWatch:
    """The gradient hooks of one tracker."""

    def __init__(self) -> None:
        # tensor -> (its version when it was watched, the callbacks for its gradient)
        self._callbacks: Any = WeakIdKeyDictionary()

    def watch(self, output: Any, on_gradients: Callable[[Any], None]) -> None:
        """Call `on_gradients` with the gradients of `output` once a backward pass has them all.

        They are structured as `output`, and a tuple for a single tensor, as in torch's own backward
        hooks. The gradient of a tensor that the backward pass did not use is None.
        """
        tensors: list[Tensor] = []

        def add(tensor: Tensor) -> Any:
            if not tensor.requires_grad:
                return None
            tensors.append(tensor)
            return _GradientIndex(len(tensors) - 1)

        template = replace_leaves(output, Tensor, add)
        if isinstance(output, Tensor):
            template = (template,)

        def fill_in(gradients: Sequence[Tensor | None]) -> None:
            filled = replace_leaves(template, _GradientIndex, lambda leaf: gradients[leaf.index])
            on_gradients(filled)

        if len(tensors) == 1:
            self._watch_tensor(tensors[0], fill_in)
        elif tensors:
            torch.autograd.graph.register_multi_grad_hook(tensors, fill_in)

    def _watch_tensor(self, tensor: Tensor, on_gradients: _OnGradients) -> None:
        # a module may return the output of its last submodule: the outer one comes first in a
        # backward pass
        version, callbacks = self._callbacks.get(tensor, (None, []))
        if version == tensor._version:
            callbacks.insert(0, on_gradients)
            return
        callbacks = [on_gradients]
        self._callbacks[tensor] = tensor._version, callbacks

        def call_all(gradient: Tensor) -> None:
            for callback in callbacks:
                callback([gradient])

        tensor.register_hook(call_all)  # type: ignore[no-untyped-call]
