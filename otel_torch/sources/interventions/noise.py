"""Adds noise of half an ulp to the output of every leaf module (OTEL_TORCH_NOISE).

A reference recorded again with this noise shows how far legal rounding alone moves each tensor.
Smaller differences to a port mean nothing. The noise has its own random generators, so that the
program's random numbers do not change.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from otel_torch.process.console import say_once
from otel_torch.sources.models.model import Model, ModuleSite
from otel_torch.sources.modules.hooks import ModuleHookManager, SessionHook, has_hook, remove_hooks
from otel_torch.sources.modules.module_dict import ModuleDict
from otel_torch.sources.source import Source
from otel_torch.sources.tensors.values import walk
from otel_torch.statistics.unwrap_tensor import unwrap
from otel_torch.torch_private import is_fake, is_traced, unobserved, unseen_by_function_modes

_HOOK = "otel_torch.noise"
# the types that arithmetic rounds to; smaller ones are for storage only
_ROUNDED_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class _Noise:
    """Noise of half an ulp, drawn by generators of its own. seed: 32 bits."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        # half a unit of the largest mantissa, rounded in the tensor's type, moves no element by
        # more than one unit
        noise = self._draw_signs(tensor).mul_(torch.finfo(tensor.dtype).eps / 2)
        noisy = noise.mul_(tensor).add_(tensor)
        # keeps infinities, and the largest number, which masks use, from becoming infinite
        return torch.where(noisy.isfinite(), noisy, tensor)

    def _draw_signs(self, like: torch.Tensor) -> torch.Tensor:
        device = like.device
        generator = self._generators.get(device)
        if generator is None:
            generator = torch.Generator(device).manual_seed(self._seed)
            self._generators[device] = generator
        signs = torch.empty(like.shape, dtype=like.dtype, device=device)
        return signs.random_(0, 2, generator=generator).mul_(2).sub_(1)


class NoisyResults:
    """Adds noise in place to the results of operations, where their graph is recorded.

    So the run with noise has the same graph, and each operation its own floor. seed: at least 1.
    """

    def __init__(self, seed: int) -> None:
        self._noise = _Noise(seed)

    def __call__(self, result: Any) -> None:
        """Change what an operation has made; a tensor, or several."""
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and _is_rounded(tensor) and _is_strided(tensor):
                self._change(tensor)

    @unobserved
    def _change(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self._noise.of(tensor))


class _LeafHook(SessionHook):
    """Adds noise to the output of one leaf module."""

    hook_name = _HOOK

    def __init__(self, seed: int, path: str) -> None:
        # 32 bits, the most that torch's CPU generator uses
        digest = hashlib.blake2b(f"{seed} {path}".encode(), digest_size=4).digest()
        self._path, self._noise = path, _Noise(int.from_bytes(digest, "little"))

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if torch.compiler.is_compiling():
            if torch.compiler.is_dynamo_compiling():
                # runs in the compiler and leaves nothing in the graph
                torch._dynamo.comptime.comptime(_report_compiled)
            return output
        try:
            return self._add_noise(output)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            say_once(f"{self._path} gets no noise: {reason}")
            return output

    @unseen_by_function_modes
    def _add_noise(self, value: Any) -> Any:
        """Return the value with noise on all floating-point tensors in tuples, lists and dicts."""
        if isinstance(value, torch.Tensor):
            return self._add_noise_to_tensor(value)
        if type(value) in (tuple, list):
            return type(value)(self._add_noise(item) for item in value)
        if isinstance(value, tuple) and hasattr(value, "_make"):
            return value._make(self._add_noise(item) for item in value)
        if type(value) is dict:
            return {key: self._add_noise(item) for key, item in value.items()}
        if any(_is_rounded(tensor) for _, tensor in walk(value, "out")):
            say_once(f"{self._path} gets no noise: it returns a {type(value).__name__}")
        return value

    def _add_noise_to_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if not _is_rounded(tensor):
            return tensor
        if is_traced():
            say_once("OTEL_TORCH_NOISE: modules that are traced get no noise")
            return tensor
        if _is_strided(tensor) or _is_shard_of_known_values(tensor):
            return _NoisyValues.apply(tensor, self._noisy)  # type: ignore[no-any-return]
        kind = f"{type(tensor).__name__} ({tensor.layout})"
        say_once(f"{self._path} gets no noise: unsupported tensor type {kind}")
        return tensor

    @unobserved
    def _noisy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a strided tensor or a DTensor with noise."""
        if not _is_strided(tensor):
            shard: Any = tensor
            whole: torch.Tensor = type(shard).from_local(
                self._noisy(shard.to_local()), shard.device_mesh, shard.placements,
                run_check=False, shape=shard.shape, stride=shard.stride(),
            )  # fmt: skip
            return whole
        return self._noise.of(tensor)


class _NoisyValues(torch.autograd.Function):
    """Changes a tensor's values by noise, which neither gradients nor modes of the program see."""

    @staticmethod
    def forward(
        context: Any, tensor: torch.Tensor, noisy: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        return noisy(tensor)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return gradients[0], None


def _is_strided(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is an ordinary one whose memory can be read."""
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_plain and unwrap(tensor).values is not None


def _is_shard_of_known_values(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a DTensor that no addition over the ranks completes."""
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is None or not isinstance(tensor, distributed.DTensor):
        return False
    return not any(placement.is_partial() for placement in tensor.placements)


def _is_rounded(tensor: torch.Tensor) -> bool:
    return not is_fake(tensor) and tensor.dtype in _ROUNDED_DTYPES and not tensor.is_meta


def _report_compiled(context: Any) -> None:
    say_once(
        "OTEL_TORCH_NOISE: modules in compiled code get no noise, so the noise floor is too low; "
        "set TORCHDYNAMO_DISABLE=1 to run them eagerly"
    )


class Jitter(Source):
    """Attaches the noise to the leaves of every model, recorded or not.

    An unrecorded model may compute the inputs of a recorded one. seed: at least 1.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._attached: ModuleDict[bool] = ModuleDict()

    def attach(self, model: Model, sites: list[ModuleSite]) -> None:
        """Attach the noise to the leaves among `sites`.

        Call this after observers were attached, so that they see the same values as the program.
        """
        say_once(
            f"OTEL_TORCH_NOISE={self._seed}: outputs of leaf modules are changed by half a unit "
            "in the last place"
        )
        for site in sites:
            module = site.module()
            if module is None or module._modules or not site.names:
                continue
            if has_hook(module, _LeafHook.name()):
                continue
            try:
                hook = _LeafHook(self._seed, f"{model.name}/{site.names[0][0]}")
                ModuleHookManager.get_from_or_default(module).append_forward_hook(hook)
                self._attached[module] = True
            except Exception as error:
                say_once(
                    f"{model.name}: {type(module).__name__} takes no hook and gets no noise "
                    f"({type(error).__name__})"
                )

    def uninstall(self) -> None:
        remove_hooks(self._attached, _HOOK)
        self._attached.clear()
