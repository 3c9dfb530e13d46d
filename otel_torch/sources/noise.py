"""Half a unit in the last place on every leaf's output: how far legal arithmetic alone takes a
model from itself.

A reference that is recorded once more like this gives the floor below which a difference means
nothing. The noise is of its own generators, so that the program's random numbers stay what they
were.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from otel_torch.console import say_once
from otel_torch.sources.hooks import ForwardHook, ModuleHookManager, remove_hooks
from otel_torch.sources.modules import Model, ModuleSite
from otel_torch.sources.source import Source
from otel_torch.sources.values import walk
from otel_torch.statistics.graph_capture import is_capturing
from otel_torch.torch_private import is_fake

_HOOK = "otel_torch.noise"
# what arithmetic rounds to; smaller types only store
_ROUNDED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class _LeafHook(ForwardHook):
    """Jitters what one leaf returns."""

    def __init__(self, seed: int, place: str) -> None:
        # 32 bits: torch's generator on the CPU takes no more
        self._seed = int.from_bytes(
            hashlib.blake2b(f"{seed} {place}".encode(), digest_size=4).digest(), "little"
        )
        self._place = place
        self._generators: dict[torch.device, torch.Generator] = {}

    @classmethod
    def name(cls) -> str:
        return _HOOK

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if torch.compiler.is_compiling():
            if torch.compiler.is_dynamo_compiling():
                torch._dynamo.comptime.comptime(
                    _say_compiled
                )  # run by the compiler, not a part of the graph
            return output
        try:
            return self._jittered(output)
        except Exception as error:
            say_once(
                f"{self._place} gets no noise: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            )
            return output

    def _jittered(self, value: Any) -> Any:
        """The value with every floating-point tensor in a tuple, list or dict changed."""
        if isinstance(value, torch.Tensor):
            return self._jitter(value)
        if type(value) in (tuple, list):
            return type(value)(self._jittered(item) for item in value)
        if isinstance(value, tuple) and hasattr(value, "_make"):
            return value._make(self._jittered(item) for item in value)
        if type(value) is dict:
            return {key: self._jittered(item) for key, item in value.items()}
        if any(_is_rounded(tensor) for _, tensor in walk(value, "out")):
            say_once(f"{self._place} gets no noise: it returns a {type(value).__name__}")
        return value

    def _jitter(self, tensor: torch.Tensor) -> torch.Tensor:
        if not _is_rounded(tensor):
            return tensor
        signs = self._signs(tensor)
        if signs is None:
            say_once(
                f"{self._place} gets no noise: nothing can be added to its {type(tensor).__name__} ({tensor.layout})"
            )
            return tensor
        # half a unit of the largest mantissa, rounded in the tensor's own type: no element moves by
        # more than one unit
        moved = tensor + tensor * signs.mul_(torch.finfo(tensor.dtype).eps / 2)
        # infinities stay, and the largest number, with which masks are made, does not become one
        return torch.where(moved.isfinite(), moved, tensor)

    def _signs(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """1 and -1 by chance, like `tensor`; None for a kind of tensor that has no place for them."""
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided:
            return self._draw(tensor) if not (tensor.is_cuda and is_capturing()) else None
        distributed = sys.modules.get("torch.distributed.tensor")
        if (
            distributed is None
            or not isinstance(tensor, distributed.DTensor)
            or any(p.is_partial() for p in tensor.placements)
        ):
            return None
        with torch.no_grad():
            local = self._draw(tensor.to_local())
            mesh, placements = tensor.device_mesh, tensor.placements
            whole: torch.Tensor = distributed.DTensor.from_local(
                local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
            )
            return whole

    def _draw(self, like: torch.Tensor) -> torch.Tensor:
        generator = self._generators.get(like.device)
        if generator is None:
            generator = self._generators[like.device] = torch.Generator(like.device).manual_seed(
                self._seed
            )
        signs = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        return signs.random_(0, 2, generator=generator).mul_(2).sub_(1)


def _is_rounded(tensor: torch.Tensor) -> bool:
    return tensor.dtype in _ROUNDED and not tensor.is_meta and not is_fake(tensor)


def _say_compiled(context: Any) -> None:
    say_once(
        "OTEL_TORCH_NOISE: modules inside compiled code get no noise, which makes the floor too low; "
        "TORCHDYNAMO_DISABLE=1 runs them eagerly"
    )


class Jitter(Source):
    """Puts the noise on the leaves of every model that runs, recorded or not: what enters a
    recorded one had it too. seed: of the noise, from 1 on.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._attached: Any = WeakIdKeyDictionary()

    def attach(self, model: Model, sites: list[ModuleSite]) -> None:
        """Have the leaves among `sites` jitter their outputs; to be called after their observers
        were attached, which then see what the program gets.
        """
        say_once(
            f"OTEL_TORCH_NOISE={self._seed}: outputs of leaf modules are changed by half a unit in the last place"
        )
        for site in sites:
            module = site.module()
            if module is None or module._modules or not site.names:
                continue
            try:
                hook = _LeafHook(self._seed, f"{model.name}/{site.names[0][0]}")
                ModuleHookManager.get_from_or_default(module).append_forward_hook(hook)
                self._attached[module] = True
            except Exception as error:
                say_once(
                    f"{model.name}: {type(module).__name__} takes no hook and gets no noise ({type(error).__name__})"
                )

    def uninstall(self) -> None:
        """Take the noise off again."""
        remove_hooks(self._attached, _HOOK)
        self._attached.clear()
