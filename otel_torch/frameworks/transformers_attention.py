"""Support for attention in transformers: where tokens are captured, it is recorded as a module.

Engines have a module `attn` that receives the rotated queries and keys. transformers calls a
function with them, which no module returns. That function is recorded as if it were one:

    layers.0.self_attn.attn   query, key, value   of the new tokens
    layers.0.self_attn.attn   out                 likewise, what o_proj receives

All have the shape (requests, tokens, heads x width).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from otel_torch import session
from otel_torch.frameworks.patches import Patches
from otel_torch.sources.modules.module_dict import ModuleDict
from otel_torch.sources.modules.module_names import children_of, part_finders
from otel_torch.sources.modules.uncalled_roots import method_codes, with_inner

_NAME = "attn"
_patches = Patches()

Attend = Callable[..., Any]


class Attention(nn.Module):
    """The attention function of one module, as a module."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, compute: Callable[[], Any]) -> Any:
        """Return the output of the function, which `compute` calls with tensors of its own."""
        return compute()


class _Cache(threading.local):
    """The newest keys and values of this thread, and the cache's keys that they have become."""

    cached: Tensor | None = None
    new: tuple[Tensor, Tensor] | None = None


_attentions: ModuleDict[Attention] = ModuleDict()
_cache = _Cache()


def _parts(module: nn.Module) -> dict[str, nn.Module] | None:
    """Return the children of a module that calls the function, and the function as one of them."""
    cls: Any = type(module)
    if not _calls_function(cls) or _NAME in module._modules:
        return None
    attention = _attentions.get(module)
    if attention is None:
        attention = _attentions[module] = Attention()
    return {**children_of(module), _NAME: attention}


@functools.cache
def _calls_function(cls: type) -> bool:
    codes = (code for method in method_codes(cls) for code in with_inner(method))
    return any("ALL_ATTENTION_FUNCTIONS" in code.co_names for code in codes)


def _noting_new_keys(update: Callable[..., Any]) -> Callable[..., Any]:
    """Return a cache's `update` that also notes the new keys and values."""

    def note(cache: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        cached = update(cache, keys, values, *args, **kwargs)
        if isinstance(cached, tuple) and not torch.compiler.is_compiling():
            _cache.cached, _cache.new = cached[0], (keys, values)
        return cached

    return note


def _recording(get: Callable[..., Attend]) -> Callable[..., Attend]:
    """Return a `get_interface` whose attention functions are recorded."""

    def look_up(*args: Any, **kwargs: Any) -> Attend:
        attend = get(*args, **kwargs)
        return attend if torch.compiler.is_compiling() else _recorded(attend)

    return look_up


@functools.lru_cache(maxsize=32)
def _recorded(attend: Attend) -> Attend:
    @functools.wraps(attend)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        attention, rows = _attentions.get(module), _new_rows(*args[:3])
        if attention is None or rows is None:
            return attend(module, *args, **kwargs)
        result = None

        def compute() -> Tensor | None:
            nonlocal result
            result = attend(module, *args, **kwargs)
            return _output_rows(result)

        attention(*rows, compute=compute)
        return result

    return call


def _new_rows(*tensors: Any) -> list[Tensor] | None:
    """Return the new queries, keys and values by token, None if they are not known.

    Args:
        tensors: Query, key and value, of shape (requests, heads, tokens, width).
    """
    cached, new = _cache.cached, _cache.new
    _cache.cached = _cache.new = None
    if new is not None and len(tensors) == 3 and tensors[1] is cached:
        tensors = tensors[0], *new
    lengths = {tensor.shape[2] for tensor in tensors if _has_heads(tensor)}
    if not all(map(_has_heads, tensors)) or len(tensors) < 3 or len(lengths) > 1:
        return None
    return [tensor.detach().transpose(1, 2).flatten(2) for tensor in tensors]


def _output_rows(result: Any) -> Tensor | None:
    """Return the output by token; its shape is (requests, tokens, heads, width)."""
    output = result[0] if isinstance(result, tuple) else result
    return output.detach().flatten(2) if _has_heads(output) else None


def _has_heads(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.dim() == 4


def _is_wanted() -> bool:
    current = session.current()
    return current is not None and "tokens" in current.settings.capture


def _watch_caches(module: ModuleType) -> None:
    if _is_wanted():
        _patches.replace(module.Cache, "update", _noting_new_keys)


def _watch_attention(module: ModuleType) -> None:
    interface = getattr(module, "AttentionInterface", None)  # not in older versions
    if _is_wanted() and hasattr(interface, "get_interface"):
        _patches.add(part_finders, _parts)
        _patches.replace(interface, "get_interface", _recording)


uninstall = _patches.restore

HOOKS = {
    "transformers.cache_utils": _watch_caches,
    "transformers.modeling_utils": _watch_attention,
}
