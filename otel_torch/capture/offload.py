"""Run a model whose layers do not fit on the device together, by FastVideo's layer-wise offload.

Layers live on the CPU. Each is on the device for its own forward, and the next one is copied there
in the meantime. For three layers on a device with streams:

| forward of | compute stream          | copy stream  | on the device |
|------------|-------------------------|--------------|---------------|
| layer 0    | copy 0, run 0, free 0   | copy 1       | 0, 1          |
| layer 1    | wait for 1, run, free 1 | copy 2       | 1, 2          |
| layer 2    | wait for 2, run, free 2 | copy 0       | 2, 0          |
| layer 0    | wait for 0, run, free 0 | copy 1       | 0, 1          |

In FastVideo buffers are not moved, only the first list of layers is offloaded, a skipped layer ends
the run, and changes made by a forward are lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from otel_torch.capture.offloaded_layer import LayerwiseOffloadHook, LayerwiseOffloadState
from otel_torch.process.console import say_once
from otel_torch.sources.modules.hooks import ModuleHookManager


def enable_layerwise_offload(
    model: nn.Module, is_replace: bool = False, *, device: torch.device | str | None = None
) -> None:
    """Keep the entries of every outermost `nn.ModuleList` of `model` on the CPU except while they
    run, and move the rest of the model to the device. Only for inference.

    Tensors that several entries share, and types that cannot be swapped (a DTensor), stay on the
    device; one line logs how many. To end it for a layer:
    `ModuleHookManager.get_from(layer).remove_forward_hook("LayerwiseOffloadHook")`.

    Args:
        is_replace: Whether to replace the hooks that all entries already have.
        device: The device to run on, by default the accelerator; without one, a line is logged and
            nothing is changed. "cpu" makes the same copies in memory, to try it out.

    Raises:
        ValueError: The model has no list of modules.
        AssertionError: With `is_replace`, an entry has no such hook.
    """
    run_device = _choose_device(device)
    if run_device is None:
        say_once(
            "layer-wise offload does nothing: there is no accelerator; "
            "try it in memory with device='cpu'"
        )
        return
    layers = list(_find_layers(model))
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no nn.ModuleList whose entries could be offloaded"
        )
    managers = [ModuleHookManager.get_from_or_default(layer) for layer in layers]
    if is_replace:
        _remove_hooks(model, managers)
    stays = _find_staying(model, layers)
    _move_rest(model, layers, stays, run_device)
    states = _link_states(len(layers), run_device, stays)
    for manager, state in zip(managers, states, strict=True):
        manager.append_forward_hook(LayerwiseOffloadHook(state))


def _choose_device(device: torch.device | str | None) -> torch.device | None:
    wanted = device or torch.accelerator.current_accelerator(check_available=True)
    if wanted is None:
        return None
    chosen = torch.device(wanted)
    if chosen.type != "cpu" and ":" not in str(chosen):
        return torch.device(chosen.type, torch.accelerator.current_device_index())
    return chosen


def _remove_hooks(model: nn.Module, managers: list[ModuleHookManager]) -> None:
    hook_name = LayerwiseOffloadHook.name()
    if not all(manager.get_forward_hook(hook_name) for manager in managers):
        raise AssertionError(f"a layer of {type(model).__name__} has no {hook_name} to replace")
    for manager in managers:
        manager.remove_forward_hook(hook_name)


def _link_states(
    count: int, device: torch.device, stays: frozenset[int]
) -> list[LayerwiseOffloadState]:
    """Return the states of `count` layers, each linked to the next and the last to the first."""
    stream = None if device.type == "cpu" else torch.Stream(device=device)
    states = [LayerwiseOffloadState(stream, device) for _ in range(count)]
    on_device: set[LayerwiseOffloadState] = set()
    for state, following in zip(states, states[1:] + states[:1], strict=True):
        state.next_state = following if following is not state else None
        state.stays, state.on_device = stays, on_device
    return states


def _find_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the entries of all module lists in order, without those of lists inside an entry."""
    for child in model._modules.values():
        if isinstance(child, nn.ModuleList):
            yield from dict.fromkeys(child)
        elif child is not None:
            yield from _find_layers(child)


def _find_staying(model: nn.Module, layers: list[nn.Module]) -> frozenset[int]:
    """Return the identities of tensors in layers that have to stay on the device: shared with
    another layer or with the rest of the model, or of an unknown type.
    """
    layer_tensors = [
        {id(tensor): tensor for tensor in _tensors_of(layer.modules())} for layer in layers
    ]
    inside = {module for layer in layers for module in layer.modules()}
    outside = [module for module in model.modules() if module not in inside]
    holders = Counter({id(tensor) for tensor in _tensors_of(outside)})
    for tensors in layer_tensors:
        holders.update(tensors.keys())
    staying = frozenset(
        identity
        for tensors in layer_tensors
        for identity, tensor in tensors.items()
        if holders[identity] > 1 or type(tensor) not in (nn.Parameter, Tensor)
    )
    if staying:
        say_once(
            f"layer-wise offload of {type(model).__name__}: {len(staying)} tensors stay on the "
            "device (shared, or of a type that cannot be swapped)"
        )
    return staying


def _move_rest(
    model: nn.Module, layers: list[nn.Module], staying: frozenset[int], device: torch.device
) -> None:
    """Move the tensors that are not offloaded to the device."""
    offloaded = {id(tensor) for layer in layers for tensor in _tensors_of(layer.modules())}
    offloaded -= staying
    for tensor in _tensors_of(model.modules()):
        if id(tensor) not in offloaded and tensor.device != device:
            tensor.data = tensor.data.to(device)


def _tensors_of(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    for module in modules:
        for table in (module._parameters, module._buffers):
            yield from (tensor for tensor in table.values() if tensor is not None)
