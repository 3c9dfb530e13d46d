"""Runs a model whose layers do not fit on a device together: each is there while it runs, and the
next while it is awaited.

FastVideo's layer-wise offload, by its contract. There buffers stay where they are, only the first
list of layers is taken, a layer that is skipped ends the run, and what a forward changes is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from otel_torch.capture.eager import eager
from otel_torch.console import say_once
from otel_torch.sources.hooks import ForwardHook, ModuleHookManager, TorchHook


class _StateDictHook(TorchHook):
    __slots__ = ("_from_public_api",)  # torch marks what it was given


class LayerwiseOffloadState:
    """The tensors of one layer: at home on the CPU, pinned where the device copies from there; on
    the device when needed.

    async_copy_stream: the device's stream in which the next layer is copied, None for a device
    without streams. next_state: the layer to fetch while this one runs. cpu_named_parameters,
    gpu_named_parameters: parameters and buffers by name, at home and on the device. For inference:
    autograd cannot add a gradient to a parameter that is away. One thread at a time may run the
    model.
    """

    # What is copied in a forward under inference mode must be no tensor of inference mode: a layer
    # that is whole again is trained, and autograd refuses those.

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
        self.stays: frozenset[int] = (
            frozenset()
        )  # the identities of tensors that stay on the device: others use them too
        self.on_device: set[LayerwiseOffloadState] = (
            set()
        )  # of all layers that are linked: those whose tensors are there
        self._versions: dict[str, int] = {}
        self._state_dict_hook: Any = None

    @eager
    @torch.inference_mode(False)
    def on_init(self, module: nn.Module) -> None:
        """Take the tensors of `module` home, and leave an empty one of the same rank in each one's
        place.
        """
        self.module_ref = module
        for name, tensor in self._tensors():
            home = tensor.data.detach().to("cpu", copy=True)
            self.cpu_named_parameters[name] = (
                home.pin_memory() if self.device.type == "cuda" else home
            )
            tensor.data = self._placeholder(tensor)
        if self._state_dict_hook is None:
            hook = _StateDictHook(self._give_whole)
            self._state_dict_hook = module.register_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]

    @eager
    @torch.inference_mode(False)
    def wait_and_replace_params(self) -> None:
        """Put the tensors on the device in their places; waits for a copy that is on its way,
        copies what is not.
        """
        for other in self.on_device - {self}:
            # fetched and then skipped, or left there by a forward that raised
            if other is not self.next_state:
                other.release_gpu_params()
        if self.async_copy_stream is not None:
            torch.accelerator.current_stream(self.device).wait_stream(self.async_copy_stream)
        self.on_device.add(self)
        for name, tensor in self._tensors():
            if name not in self.gpu_named_parameters:
                self.gpu_named_parameters[name] = self.cpu_named_parameters[name].to(
                    self.device, copy=True
                )
            if name not in self._versions:
                tensor.data = self.gpu_named_parameters[name]
                self._versions[name] = tensor._version

    @eager
    @torch.inference_mode(False)
    def prefetch_params(self) -> None:
        """Begin to copy the tensors to the device; those that are there already stay."""
        self.on_device.add(self)
        missing = {
            name: home
            for name, home in self.cpu_named_parameters.items()
            if name not in self.gpu_named_parameters
        }
        stream = self.async_copy_stream
        with nullcontext() if stream is None else stream:
            fetched = {
                name: home.to(self.device, non_blocking=True, copy=True)
                for name, home in missing.items()
            }
        if stream is not None:
            computing = torch.accelerator.current_stream(self.device)
            for tensor in fetched.values():
                tensor.record_stream(
                    computing
                )  # its memory goes to nobody else before the forward is through with it
        self.gpu_named_parameters |= fetched

    @eager
    @torch.inference_mode(False)
    def release_gpu_params(self) -> None:
        """Leave the device; what a forward has changed (a running mean) is copied home first."""
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
        """Put all tensors on the device, to stay."""
        self.wait_and_replace_params()
        self.on_device.discard(self)
        self.cpu_named_parameters.clear()
        self.gpu_named_parameters.clear()
        self._versions.clear()
        if self._state_dict_hook is not None:
            self._state_dict_hook.remove()
            self._state_dict_hook = None

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        if self.module_ref is None:
            return
        for named in (self.module_ref.named_parameters, self.module_ref.named_buffers):
            for name, tensor in named():
                if id(tensor) not in self.stays and self._will_offload(name):
                    yield name, tensor

    def _will_offload(self, name: str) -> bool:
        """Whether the tensor of that name leaves the device; a subclass may keep some."""
        return True

    def _placeholder(self, tensor: Tensor) -> Tensor:
        return torch.empty((0,) * max(tensor.ndim, 1), dtype=tensor.dtype, device=self.device)

    def _give_whole(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        for name, home in self.cpu_named_parameters.items():
            if prefix + name in state and name not in self._versions:
                state[prefix + name] = home


class LayerwiseOffloadHook(ForwardHook):
    """Brings a layer's tensors to the device for its forward. Removing the hook leaves them there."""

    def __init__(self, state: LayerwiseOffloadState) -> None:
        self.state = state

    @classmethod
    def name(cls) -> str:
        return "LayerwiseOffloadHook"

    def on_attach(self, module: nn.Module) -> None:
        self.state.on_init(module)

    def on_detach(self, module: nn.Module) -> None:
        self.state.restore()

    @eager
    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.state.wait_and_replace_params()
        if self.state.next_state is not None:
            self.state.next_state.prefetch_params()
        return args, kwargs

    @eager
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.state.release_gpu_params()
        return output

    @contextmanager
    def mutate_params_scope(self) -> Iterator[None]:
        """Inside, the layer's tensors are whole and on the device, and may be replaced or changed
        (a LoRA merged).
        """
        state = self.state
        state.wait_and_replace_params()
        try:
            yield
        finally:
            module = state.module_ref
            assert module is not None
            state.on_device.discard(state)
            for known in (state.cpu_named_parameters, state.gpu_named_parameters, state._versions):
                known.clear()
            state.on_init(module)


def enable_layerwise_offload(
    model: nn.Module, is_replace: bool = False, *, device: torch.device | str | None = None
) -> None:
    """Keep the entries of every outermost `nn.ModuleList` of `model` on the CPU, but while they
    run; the rest of the model moves to the device. For inference.

    device: where the model runs, by default the accelerator; without one, a line says so and
    nothing happens. "cpu" makes the same copies in memory, for a try. is_replace: each entry has
    such a hook already, which is replaced; raises AssertionError where one has not. Raises
    ValueError where the model has no list of modules. A tensor that several entries hold, or one of
    a type that cannot be swapped (a DTensor), stays on the device, and a line says so.
    `ModuleHookManager.get_from(layer).remove_forward_hook("LayerwiseOffloadHook")` ends it for a
    layer.
    """
    wanted = device or torch.accelerator.current_accelerator(check_available=True)
    if wanted is None:
        say_once(
            "layer-wise offload does nothing: there is no accelerator; device='cpu' tries it in memory"
        )
        return
    found = torch.device(wanted)
    if found.type != "cpu" and ":" not in str(found):
        found = torch.device(found.type, torch.accelerator.current_device_index())
    layers = list(_layers(model))
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no nn.ModuleList whose entries could be offloaded"
        )
    managers = [ModuleHookManager.get_from_or_default(layer) for layer in layers]
    hook_name = LayerwiseOffloadHook.name()
    if is_replace and not all(manager.get_forward_hook(hook_name) for manager in managers):
        raise AssertionError(
            f"a layer of {type(model).__name__} has no {hook_name} that could be replaced"
        )
    if is_replace:
        for manager in managers:
            manager.remove_forward_hook(hook_name)
    stays = _staying(model, layers)
    _move_rest(model, layers, stays, found)
    stream = None if found.type == "cpu" else torch.Stream(device=found)
    states = [LayerwiseOffloadState(stream, found) for _ in layers]
    on_device: set[LayerwiseOffloadState] = set()
    for state, following in zip(states, states[1:] + states[:1], strict=True):
        state.next_state = following if following is not state else None
        state.stays, state.on_device = stays, on_device
    for manager, state in zip(managers, states, strict=True):
        manager.append_forward_hook(LayerwiseOffloadHook(state))


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """The entries of the lists of modules, in order; not those of lists inside them."""
    for child in model._modules.values():
        if isinstance(child, nn.ModuleList):
            yield from dict.fromkeys(child)
        elif child is not None:
            yield from _layers(child)


def _staying(model: nn.Module, layers: list[nn.Module]) -> frozenset[int]:
    """The identities of tensors of layers that stay on the device: of another layer's or of the
    rest too, or strange.
    """
    of_layers = [{id(one): one for one in _all(layer.modules())} for layer in layers]
    inside = {module for layer in layers for module in layer.modules()}
    rest = {id(one) for one in _all(module for module in model.modules() if module not in inside)}
    holders = Counter(identity for tensors in (*of_layers, rest) for identity in tensors)
    staying = frozenset(
        identity
        for tensors in of_layers
        for identity, one in tensors.items()
        if holders[identity] > 1 or type(one) not in (nn.Parameter, Tensor)
    )
    if staying:
        say_once(
            f"layer-wise offload of {type(model).__name__}: {len(staying)} tensors stay on the device "
            "(held by several, or of a type that cannot be swapped)"
        )
    return staying


def _move_rest(
    model: nn.Module, layers: list[nn.Module], staying: frozenset[int], device: torch.device
) -> None:
    """Move what is in no layer, and what stays, to the device."""
    leaving = {id(one) for layer in layers for one in _all(layer.modules())} - staying
    for tensor in _all(model.modules()):
        if id(tensor) not in leaving and tensor.device != device:
            tensor.data = tensor.data.to(device)


def _all(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    for module in modules:
        for table in (module._parameters, module._buffers):
            yield from (tensor for tensor in table.values() if tensor is not None)
