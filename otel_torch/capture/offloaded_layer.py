"""Move the tensors of one layer between the CPU and the device around its forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from otel_torch.capture.disable_compile import disable_compile
from otel_torch.sources.modules.hooks import ForwardHook, TorchHook


class _StateDictHook(TorchHook):
    __slots__ = ("_from_public_api",)  # set by torch


class LayerwiseOffloadState:
    """The tensors of one layer, on the CPU or on the device.

    Only for inference: autograd cannot add a gradient to a parameter that is on the CPU. Only one
    thread at a time may run the model.

    Args:
        async_copy_stream: The stream in which the next layer is copied; None for a device without
            streams.
        next_state: The layer to fetch while this one runs.

    Attributes:
        cpu_named_parameters: Parameters and buffers by name on the CPU, pinned for a CUDA device.
        gpu_named_parameters: The same on the device, while they are there.
        stays: Identities of tensors that always stay on the device because others use them too.
        on_device: The layers whose tensors are on the device; one set for all linked layers.
    """

    # Copies are made outside inference mode: autograd refuses inference tensors, and a layer that
    # has been restored may be trained.

    def __init__(
        self,
        async_copy_stream: torch.Stream | None,
        device: torch.device,
        next_state: LayerwiseOffloadState | None = None,
    ) -> None:
        self.async_copy_stream = async_copy_stream
        self.device = device
        self.next_state = next_state
        self.cpu_named_parameters: dict[str, Tensor] = {}
        self.gpu_named_parameters: dict[str, Tensor] = {}
        self.module_ref: nn.Module | None = None
        self.stays: frozenset[int] = frozenset()
        self.on_device: set[LayerwiseOffloadState] = set()
        self._versions: dict[str, int] = {}  # of the tensors in place, to see changes
        self._state_dict_hook: Any = None

    @disable_compile
    @torch.inference_mode(False)
    def on_init(self, module: nn.Module) -> None:
        """Move the tensors of `module` to the CPU and leave empty ones of equal rank in their
        place.
        """
        self.module_ref = module
        for name, tensor in self._tensors():
            cpu_tensor = tensor.data.detach().to("cpu", copy=True)
            if self.device.type == "cuda":
                cpu_tensor = cpu_tensor.pin_memory()
            self.cpu_named_parameters[name] = cpu_tensor
            tensor.data = self._placeholder(tensor)
        if self._state_dict_hook is None:
            hook = _StateDictHook(self._complete_state_dict)
            self._state_dict_hook = module.register_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]

    @disable_compile
    @torch.inference_mode(False)
    def wait_and_replace_params(self) -> None:
        """Put the tensors on the device in place: wait for those being copied, copy the others."""
        for state in self.on_device - {self}:
            # prefetched and then skipped, or not released by a forward that raised
            if state is not self.next_state:
                state.release_gpu_params()
        if self.async_copy_stream is not None:
            torch.accelerator.current_stream(self.device).wait_stream(self.async_copy_stream)
        self.on_device.add(self)
        for name, tensor in self._tensors():
            if name not in self.gpu_named_parameters:
                cpu_tensor = self.cpu_named_parameters[name]
                self.gpu_named_parameters[name] = cpu_tensor.to(self.device, copy=True)
            if name not in self._versions:
                tensor.data = self.gpu_named_parameters[name]
                self._versions[name] = tensor._version

    @disable_compile
    @torch.inference_mode(False)
    def prefetch_params(self) -> None:
        """Start copying the tensors to the device, except those that are there already."""
        self.on_device.add(self)
        missing = {
            name: cpu_tensor
            for name, cpu_tensor in self.cpu_named_parameters.items()
            if name not in self.gpu_named_parameters
        }
        stream = self.async_copy_stream
        with nullcontext() if stream is None else stream:
            fetched = {
                name: cpu_tensor.to(self.device, non_blocking=True, copy=True)
                for name, cpu_tensor in missing.items()
            }
        if stream is not None:
            compute_stream = torch.accelerator.current_stream(self.device)
            for tensor in fetched.values():
                # keeps the allocator from reusing the memory while the forward uses it
                tensor.record_stream(compute_stream)
        self.gpu_named_parameters |= fetched

    @disable_compile
    @torch.inference_mode(False)
    def release_gpu_params(self) -> None:
        """Free the tensors on the device; first copy to the CPU what a forward has changed, such as
        a running mean.
        """
        for name, tensor in self._tensors():
            version = self._versions.get(name)
            if version is not None:
                if tensor._version != version:
                    self.cpu_named_parameters[name].copy_(tensor.data)
                tensor.data = self._placeholder(tensor)
        self.gpu_named_parameters.clear()
        self._versions.clear()
        self.on_device.discard(self)

    def restore(self) -> None:
        """Put all tensors on the device permanently."""
        self.wait_and_replace_params()
        self.on_device.discard(self)
        self.forget_tensors()
        if self._state_dict_hook is not None:
            self._state_dict_hook.remove()
            self._state_dict_hook = None

    def forget_tensors(self) -> None:
        """Drop all references to tensors; the module keeps those that are in place."""
        self.cpu_named_parameters.clear()
        self.gpu_named_parameters.clear()
        self._versions.clear()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        if self.module_ref is None:
            return
        for named in (self.module_ref.named_parameters, self.module_ref.named_buffers):
            for name, tensor in named():
                if id(tensor) not in self.stays and self._will_offload(name):
                    yield name, tensor

    def _will_offload(self, name: str) -> bool:
        """Return whether the tensor of that name is offloaded. Subclasses may override this."""
        return True

    def _placeholder(self, tensor: Tensor) -> Tensor:
        return torch.empty((0,) * max(tensor.ndim, 1), dtype=tensor.dtype, device=self.device)

    def _complete_state_dict(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        for name, cpu_tensor in self.cpu_named_parameters.items():
            if prefix + name in state and name not in self._versions:
                state[prefix + name] = cpu_tensor


class LayerwiseOffloadHook(ForwardHook):
    """Bring a layer's tensors to the device for its forward. Removing the hook keeps them there."""

    def __init__(self, state: LayerwiseOffloadState) -> None:
        self.state = state

    @classmethod
    def name(cls) -> str:
        return "LayerwiseOffloadHook"

    def on_attach(self, module: nn.Module) -> None:
        self.state.on_init(module)

    def on_detach(self, module: nn.Module) -> None:
        self.state.restore()

    @disable_compile
    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.state.wait_and_replace_params()
        if self.state.next_state is not None:
            self.state.next_state.prefetch_params()
        return args, kwargs

    @disable_compile
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.state.release_gpu_params()
        return output

    @contextmanager
    def mutate_params_scope(self) -> Iterator[None]:
        """Hold the layer's tensors on the device; inside, they may be changed or replaced, for
        example to merge a LoRA.
        """
        state = self.state
        state.wait_and_replace_params()
        try:
            yield
        finally:
            module = state.module_ref
            assert module is not None
            state.on_device.discard(state)
            state.forget_tensors()
            state.on_init(module)
