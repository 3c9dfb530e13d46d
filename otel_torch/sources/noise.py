"""Half a unit in the last place on every leaf's output: how far legal arithmetic alone takes a model from itself.

A reference that is recorded once more like this gives the floor below which a difference means nothing. The noise is of its
own generators, so that the program's random numbers stay what they were.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from otel_torch.console import say_once
from otel_torch.sources.hooks import ForwardHook, ModuleHookManager
from otel_torch.sources.modules import Model, Site

_HOOK = "otel_torch.noise"


class _LeafHook(ForwardHook):
    """Jitters what one leaf returns."""

    def __init__(self, seed: int, place: str) -> None:
        self._seed = seed ^ zlib.crc32(place.encode()) << 20
        self._generators: dict[torch.device, torch.Generator] = {}

    @classmethod
    def name(cls) -> str:
        return _HOOK

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if torch.compiler.is_compiling():
            return output
        return self._jittered(output)

    def _jittered(self, value: Any) -> Any:
        """The value with every floating-point tensor in a plain tuple, list or dict changed."""
        if isinstance(value, torch.Tensor):
            return self._jitter(value)
        if type(value) in (tuple, list):
            return type(value)(self._jittered(item) for item in value)
        if type(value) is dict:
            return {key: self._jittered(item) for key, item in value.items()}
        return value

    def _jitter(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.is_meta or tensor.layout is not torch.strided:
            return tensor
        unit = torch.finfo(tensor.dtype).eps / 2
        generator = self._generators.get(tensor.device)
        if generator is None:
            generator = self._generators[tensor.device] = torch.Generator(tensor.device).manual_seed(self._seed)
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        signs = torch.randint(0, 2, local.shape, generator=generator, device=tensor.device, dtype=torch.int8)
        # in float64, for there is nothing between 1 and its neighbour in the tensor's own type
        wide = torch.float32 if tensor.device.type == "mps" else torch.float64
        factor = (signs.to(wide) * 2 - 1).mul_(unit).add_(1)
        if local is not tensor:
            return tensor * factor.to(tensor.dtype)
        return (tensor.to(wide) * factor).to(tensor.dtype)


class Jitter:
    """Puts the noise on the leaves of every model that runs. seed: of the noise, from 1 on."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._attached: Any = WeakIdKeyDictionary()

    def attach(self, model: Model, sites: list[Site]) -> None:
        """Have the leaves among `sites` jitter their outputs; to be called after their observers were attached, which then
        see what the program gets."""
        say_once(f"OTEL_TORCH_NOISE={self._seed}: outputs of leaf modules are changed by half a unit in the last place")
        for site in sites:
            module = site.module()
            if module is None or module._modules or not site.names:
                continue
            try:
                hook = _LeafHook(self._seed, f"{model.name}/{site.names[0][0]}")
                ModuleHookManager.get_from_or_default(module).append_forward_hook(hook)
                self._attached[module] = True
            except Exception as error:
                say_once(f"{model.name}: {type(module).__name__} takes no hook and gets no noise ({type(error).__name__})")

    def detach(self) -> None:
        """Take the noise off again."""
        for module in list(self._attached.keys()):
            manager = ModuleHookManager.get_from(module)
            if manager is not None and manager.get_forward_hook(_HOOK) is not None:
                manager.remove_forward_hook(_HOOK)
                manager.remove_if_empty()
        self._attached.clear()
