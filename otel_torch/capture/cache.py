"""Cache what modules take and return, and look it up by the model's own tree, as nnsight's `Cache`
does.

In nnsight an unknown name gives an empty cache, later in-place operations change what is cached, a
dataclass keeps its graph alive, and a cast turns token ids into floats.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from otel_torch.capture.cache_dict import CacheDict
from otel_torch.capture.cache_entry import CacheEntry
from otel_torch.capture.disk_spill import DiskSpill
from otel_torch.capture.hook_names import unique_hook_name
from otel_torch.capture.module_choice import ModuleChoice, choose_modules
from otel_torch.capture.module_paths import without_root
from otel_torch.capture.tensor_structure import join_tensors, replace_leaves
from otel_torch.process.gc_pause import gc_paused
from otel_torch.rendering.notebook import notebook_html
from otel_torch.sources.modules.hooks import ForwardHook, ModuleHookManager, remove_hook
from otel_torch.sources.modules.module_names import named_modules
from otel_torch.sources.tensors import compiled

_CPU = torch.device("cpu")
_PROVIDER = re.compile(r"(.*?)\.?(output|input|inputs)(\.i\d+)?")


class CacheFull(RuntimeError):
    """A cache would exceed its `max_bytes`."""


class Cache(compiled.Observer):
    """Cache the outputs and optionally the inputs of modules, from `attach` until `detach`.

        with Cache(["h.0", model.head], include_inputs=True).attach(model) as cache:
            model(tokens)
        cache.model.h[0].output, cache["h.0"].input

    Tensors are copied when the module is called, so later operations do not change them.
    Containers keep their types.

    Args:
        modules: Modules of the model, their names (with or without the leading `model.`), or
            compiled patterns for `re.search` on the names; None for all.
        device: The device of the copies; None for each tensor's own.
        dtype: The dtype of the copies of floating-point tensors; None for each tensor's own.
        detach: Whether the copies are detached from the graph.
        rename: `{"h": "layers"}` renames every component `h`, `{"h.0": "first"}` one module; the
            old names remain valid.
        alias: `{"first": "h.0"}`, the inverse of `rename`.
        max_bytes: Memory limit for all copies. Beyond it, `overflow="error"` raises CacheFull in
            the forward; `overflow="disk"` writes further copies to a temporary folder and reads
            them on access (needs safetensors).
    """

    Entry = CacheEntry

    def __init__(
        self,
        modules: Iterable[ModuleChoice] | ModuleChoice | None = None,
        device: torch.device | str | None = _CPU,
        dtype: torch.dtype | None = None,
        detach: bool = True,
        include_output: bool = True,
        include_inputs: bool = False,
        rename: Mapping[str, str] | None = None,
        alias: Mapping[str, str] | None = None,
        *,
        max_bytes: int | None = None,
        overflow: str = "error",
    ) -> None:
        if overflow not in ("error", "disk"):
            raise ValueError(f"overflow={overflow!r}: use 'error' or 'disk'")
        if not (include_output or include_inputs):
            raise ValueError(
                "a cache without outputs and inputs would stay empty; "
                "set include_output or include_inputs"
            )
        if isinstance(modules, (nn.Module, str, re.Pattern)):
            modules = [modules]
        self.modules = None if modules is None else list(modules)
        self.device = None if device is None else torch.device(device)
        self.dtype, self.detach_tensors = dtype, detach
        self.include_output, self.include_inputs = include_output, include_inputs
        self.max_bytes = max_bytes
        self.bytes = 0
        self.cache = CacheDict(rename=rename, alias=alias)
        self._spill = DiskSpill() if overflow == "disk" else None
        self._hooks: list[_CacheOutputHook] = []
        self._stop_guarding: Callable[[], None] = lambda: None

    # -- attaching

    @gc_paused()
    def attach(self, model: nn.Module) -> Cache:
        """Start caching calls of `model`. Use the result in a `with`, or call `detach`.

        Raises ValueError for a module, name or pattern that the model does not have.
        """
        named = named_modules(model)
        self.cache.add_names(name for name, _ in named)
        chosen = choose_modules(model, named, self.modules, self.cache.resolve)
        if not self._hooks:
            self._stop_guarding = compiled.guard_hooks()
        hook_class = _CacheCallHook if self.include_inputs else _CacheOutputHook
        hooks = [hook_class(self, module, name) for module, name in chosen.items()]
        for hook, number in zip(hooks, compiled.site_tensors(hooks, self), strict=True):
            hook.number = number
            ModuleHookManager.get_from_or_default(hook.module).append_forward_hook(hook)
            self._hooks.append(hook)
        return self

    def detach(self) -> None:
        """Remove all hooks. Cached values remain."""
        for hook in self._hooks:
            remove_hook(hook.module, hook.name())
        # a call that raised is still on the stack
        _calls.stack = [(hook, entry) for hook, entry in _calls.stack if hook.cache is not self]
        self._hooks.clear()
        self._stop_guarding()
        self._stop_guarding = lambda: None

    def __repr__(self) -> str:
        state = f"attached to {len(self._hooks)} modules" if self._hooks else "not attached"
        return f"Cache({state}, {len(self.cache)} modules with calls, {self.bytes:,} bytes)"

    def _repr_html_(self) -> str:
        return notebook_html([repr(self)]) + self.cache._repr_html_()

    def __enter__(self) -> CacheDict:
        if not self._hooks:
            raise RuntimeError(
                "this cache is not attached to a model; "
                "write `with Cache(…).attach(model) as cache:`"
            )
        return self.cache

    def __exit__(self, *error: object) -> None:
        self.detach()

    # -- caching

    def add(self, provider: str, value: Any) -> None:
        """Cache a value under nnsight's name for it, `<module>.output` or `<module>.input`.

        A trailing `.i0` is ignored. An input is `(args, kwargs)` and starts a new entry; an output
        completes the last entry that has none. Raises ValueError for any other name.
        """
        match = _PROVIDER.fullmatch(provider)
        if match is None:
            raise ValueError(f"{provider!r} names neither an output nor an input of a module")
        name = without_root(match[1])
        if match[2] == "output":
            self.add_output(self.cache.last_without_output(name), name, value)
        else:
            self.add_inputs(name, *value)

    def add_inputs(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CacheEntry | None:
        """Cache the inputs of a call; return its entry, or None if inputs are not cached."""
        if not self.include_inputs:
            return None
        return self.cache.append(name, CacheEntry(inputs=self._copy((args, dict(kwargs)))))

    def add_output(self, entry: CacheEntry | None, name: str, output: Any) -> None:
        """Cache the output of a call, in its entry if it has one."""
        if self.include_output:
            copied = self._copy(output)
            if entry is None:
                self.cache.append(name, CacheEntry(output=copied))
            else:
                entry.set_output(copied)

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value)
        copies: dict[int, Any] = {}  # a tensor that occurs twice is copied once

        def copy_once(tensor: Tensor) -> Any:
            if id(tensor) not in copies:
                copies[id(tensor)] = self._copy_tensor(tensor)
            return copies[id(tensor)]

        return replace_leaves(value, Tensor, copy_once)

    def _copy_tensor(self, tensor: Tensor) -> Any:
        source = tensor.detach() if self.detach_tensors else tensor
        # only floating-point tensors are cast: token ids stay integers
        dtype = self.dtype if self.dtype is not None and source.is_floating_point() else None
        if dtype is None and (self.device is None or source.device == self.device):
            copied = source.clone()
        else:
            # `to` knows that "cuda" is the device of a tensor on "cuda:0"
            device = source.device if self.device is None else self.device
            copied = source.to(device, dtype or source.dtype, copy=True)
        return self._store(copied)

    def _store(self, tensor: Tensor) -> Any:
        """Return the tensor, or its file if it exceeds the budget."""
        size = tensor.numel() * tensor.element_size()
        if self.max_bytes is None or self.bytes + size <= self.max_bytes:
            self.bytes += size
            return tensor
        if self._spill is None:
            raise CacheFull(
                f"the cache holds {self.bytes:,} bytes and another {size:,} would exceed "
                f"max_bytes={self.max_bytes:,}; choose fewer modules, raise max_bytes, "
                "or set overflow='disk'"
            )
        return self._spill.save(tensor)

    def on_compiled_tensors(
        self,
        place: _CacheOutputHook,
        tensors: list[tuple[str, Tensor]],
        *,
        entering: bool,
        differentiable: bool,
    ) -> None:
        """Cache the tensors of a call inside a compiled graph."""
        name = place.title
        if entering:
            args = tuple(tensor for label, tensor in tensors if not label.startswith("in."))
            kwargs = {
                label.removeprefix("in."): tensor
                for label, tensor in tensors
                if label.startswith("in.")
            }
            self.add_inputs(name, args, kwargs)
        else:
            entry = self.cache.last_without_output(name) if self.include_inputs else None
            self.add_output(entry, name, join_tensors(tensors))


# -- hooks


class _OpenCalls(threading.local):
    """The calls under way in this thread, outermost first, with their entries."""

    def __init__(self) -> None:
        self.stack: list[tuple[_CacheOutputHook, CacheEntry | None]] = []


_calls = _OpenCalls()


class _CacheOutputHook(ForwardHook):
    """Pass the outputs of one module to a cache."""

    number: Tensor  # identifies this hook in compiled graphs

    def __init__(self, cache: Cache, module: nn.Module, title: str) -> None:
        self.cache, self.module, self.title = cache, module, title
        self._unique_name = unique_hook_name("cache")

    def name(self) -> str:  # type: ignore[override]
        return self._unique_name

    def post_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if not torch.compiler.is_compiling():
            self.cache.add_output(self.pop_entry(), self.title, output)
        else:
            compiled.observe_outputs(self.number, output)

    def pop_entry(self) -> CacheEntry | None:
        """Return the entry of the call that ends, or None for a new entry."""
        return None


class _CacheCallHook(_CacheOutputHook):
    """Pass the inputs and outputs of one module to a cache.

    A cache of outputs alone does without, so that its modules have no pre-hook.
    """

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not torch.compiler.is_compiling():
            _calls.stack.append((self, self.cache.add_inputs(self.title, args, kwargs)))
        else:
            compiled.observe_inputs(self.number, args, kwargs)
        return args, kwargs

    def pop_entry(self) -> CacheEntry | None:
        stack = _calls.stack
        for depth in reversed(range(len(stack))):
            if stack[depth][0] is self:
                entry = stack[depth][1]
                del stack[depth:]  # calls above it have raised
                return entry
        return None
