"""Records the gradients of module outputs, by hooks on the tensors.

Hooks on tensors, unlike torch's backward hooks on modules, work for dicts and dataclasses and where
the next module changes its input in place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from otel_torch import torch_private
from otel_torch.sources.tensors import compiled
from otel_torch.sources.tensors.tensor_measurer import TensorMeasurer
from otel_torch.sources.tensors.tensor_reader import RecordedCall


class GradientObserver:
    """Puts hooks on tensors, which measure their gradients."""

    def __init__(self, measurer: TensorMeasurer) -> None:
        self._measurer = measurer
        # by model and module: the (loop, step) of the latest call, and the hooks on its leaves
        self._leaf_hooks: dict[
            tuple[str, str], tuple[tuple[int, int], dict[tuple[int, str], _GradientHook]]
        ] = {}

    @torch_private.unseen_by_function_modes
    def watch(self, call: RecordedCall, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Record the gradients of a call's outputs when a backward pass computes them."""
        backward = RecordedCall(
            call.model,
            call.module,
            call.step,
            call.call,
            call.loop,
            "backward",
            call.branch,
            class_name=call.class_name,
            step_scope=call.step_scope,
        )
        for label, tensor in tensors:
            if tensor.requires_grad:
                hook = _GradientHook(self._measurer, backward, "grad" + label.removeprefix("out"))
                if not tensor.is_leaf:
                    tensor.register_hook(hook)  # type: ignore[no-untyped-call]
                elif hook.key not in self._leaf_hooks_of(call):
                    # (recomputation returns the same leaf again)
                    hook.remove = tensor.register_hook(hook).remove  # type: ignore[no-untyped-call]
                    self._leaf_hooks_of(call)[hook.key] = hook

    def _leaf_hooks_of(self, call: RecordedCall) -> dict[tuple[int, str], _GradientHook]:
        """Return the hooks on leaves in this step, after removing those of an earlier step.

        A leaf is for instance a parameter that its module returns. It outlives the graph, and so
        does a hook on it.
        """
        step, hooks = self._leaf_hooks.get((call.model, call.module), (None, {}))
        if step != (call.loop, call.step):
            for hook in hooks.values():
                hook.remove()
            hooks = {}
            self._leaf_hooks[call.model, call.module] = (call.loop, call.step), hooks
        return hooks

    def remove_hooks(self) -> None:
        for _, hooks in self._leaf_hooks.values():
            for hook in hooks.values():
                hook.remove()
        self._leaf_hooks.clear()


class _GradientHook:
    """Measures a tensor's gradient.

    Further backward passes through the same call give `grad#2`, `grad#3`.
    """

    __torch_unserializable__ = True  # no warning where the program saves the tensor

    def __init__(self, measurer: TensorMeasurer, call: RecordedCall, label: str) -> None:
        self.call = call
        self.key = call.call, label
        self.count = 0
        self.remove: Callable[[], None] = lambda: None
        self._measurer, self._label = measurer, label

    @torch_private.keep_out_of_frames
    def __call__(self, gradient: torch.Tensor | None) -> None:
        if torch.compiler.is_compiling():  # compiled autograd
            compiled.report_compiled_gradient()
            return
        if gradient is None:  # what a compiled backward pass returns for an output without one
            return
        self.count += 1
        self.remove()
        label = self._label if self.count == 1 else f"{self._label}#{self.count}"
        self._measurer.add(self.call, [(label, gradient)])
