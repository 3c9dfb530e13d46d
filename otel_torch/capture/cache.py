"""Keeps what chosen modules take and return, found again by the model's own tree: nnsight's
`Cache`.

There a name that does not exist gives an empty cache, what a later operation changes in place is
changed in the cache too, a dataclass keeps its graph alive, and a cast turns token ids into floats.
"""

from __future__ import annotations

import difflib
import itertools
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from otel_torch.capture import cache_dict
from otel_torch.capture.cache_dict import CacheDict
from otel_torch.capture.names import without_root
from otel_torch.capture.spill import Spill
from otel_torch.capture.structure import flat_value, replace_leaves
from otel_torch.gc_pause import uncollected
from otel_torch.sources import compiled
from otel_torch.sources.hooks import ForwardHook, ModuleHookManager, remove_hook
from otel_torch.sources.module_names import named_modules

Modules = nn.Module | str | re.Pattern[str]
_CPU = torch.device("cpu")


class CacheFull(RuntimeError):
    """A cache would take more than its `max_bytes`."""


class Cache:
    """Keeps the outputs, and if asked the inputs, of modules, from `attach` until `detach`.

    modules: which, as modules of the model, their names (with or without the leading `model.`), or
    compiled patterns (`re.search` on the name); None for all. device: where copies are kept, None
    for where the tensor is. dtype: what floating tensors are cast to. detach: without their graph.
    rename: {"h": "layers"} for a component wherever it stands, {"h.0": "first"} for one module;
    both names work afterwards. alias: {"first": "h.0"}, the other way round. max_bytes: what the
    copies may take; beyond it `overflow` decides: "error" raises CacheFull in the forward, "disk"
    keeps the rest in a temporary folder, and reads it when asked (needs safetensors).

        with Cache(["h.0", model.head], include_inputs=True).attach(model) as cache:
            model(tokens)
        cache.model.h[0].output, cache["h.0"].input

    A tensor is copied when it is seen, so that no later operation changes it. Every container is
    kept as it is.
    """

    Entry = cache_dict.Entry

    def __init__(
        self,
        modules: Iterable[Modules] | Modules | None = None,
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
            raise ValueError(f"overflow={overflow!r}: 'error' or 'disk'")
        if not (include_output or include_inputs):
            raise ValueError("a cache of neither outputs nor inputs would stay empty")
        if isinstance(modules, (nn.Module, str, re.Pattern)):
            modules = [modules]
        self.modules = None if modules is None else list(modules)
        self.device = None if device is None else torch.device(device)
        self.dtype, self.detach_tensors = dtype, detach
        self.include_output, self.include_inputs = include_output, include_inputs
        self.max_bytes = max_bytes
        self.bytes = 0
        self.cache = CacheDict(rename=rename, alias=alias)
        self._spill = Spill() if overflow == "disk" else None
        self._hooks: list[_CacheHook] = []
        self._unguard: Callable[[], None] = lambda: None

    # -- attaching
    # ----------------------------------------------------------------------------------------------

    @uncollected()
    def attach(self, model: nn.Module) -> Cache:
        """Keep what passes `model` from now on; use the result in a `with`, or call `detach`.

        Raises ValueError for a name or pattern that matches no module, with what may have been
        meant, and for a module that is not in the model.
        """
        named = named_modules(model)
        self.cache.learn(name for name, _ in named)
        chosen = self._choose(model, named)
        if not self._hooks:
            self._unguard = compiled.guard_hooks()
        kind = (
            _CallHook if self.include_inputs else _CacheHook
        )  # without a hook in front of forward where nobody needs it
        hooks = [kind(self, module, name) for module, name in chosen.items()]
        for hook, number in zip(hooks, compiled.numbers(hooks, self), strict=True):
            hook.number = number
            ModuleHookManager.get_from_or_default(hook.module).append_forward_hook(hook)
            self._hooks.append(hook)
        return self

    def detach(self) -> None:
        """Remove every hook; what was kept stays."""
        for hook in self._hooks:
            remove_hook(hook.module, hook.name())
        _calls.open = [
            (hook, entry) for hook, entry in _calls.open if hook.cache is not self
        ]  # what raised
        self._hooks.clear()
        self._unguard()
        self._unguard = lambda: None

    def __enter__(self) -> CacheDict:
        if not self._hooks:
            raise RuntimeError(
                "this cache is on no model: write `with Cache(…).attach(model) as cache:`"
            )
        return self.cache

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.detach()

    def _choose(self, model: nn.Module, named: list[tuple[str, nn.Module]]) -> dict[nn.Module, str]:
        """The modules to hook, each with its first name."""
        first = {module: name for name, module in reversed(named)}
        if self.modules is None:
            return dict(reversed(first.items()))
        chosen: dict[nn.Module, str] = {}
        for wanted in self.modules:
            if isinstance(wanted, nn.Module):
                if wanted not in first:
                    raise ValueError(
                        f"{type(wanted).__name__} is no module of {type(model).__name__}"
                    )
                chosen[wanted] = first[wanted]
                continue
            found = {
                module: first[module] for name, module in named if self._is_meant(wanted, name)
            }
            if not found:
                raise ValueError(_no_match(wanted, model, [name for name, _ in named]))
            chosen |= found
        return chosen

    def _is_meant(self, wanted: str | re.Pattern[str], name: str) -> bool:
        if isinstance(wanted, re.Pattern):
            return bool(wanted.search(name))
        return self.cache.resolve(wanted) == name

    # -- keeping
    # ----------------------------------------------------------------------------------------------

    def add(self, provider: str, value: Any) -> None:
        """Keep a value under `<module>.output` or `<module>.input`, as nnsight names providers (a
        trailing `.i0` is ignored). An input, `(args, kwargs)`, begins a new entry; an output ends
        the last that has none. Raises ValueError for any other provider.
        """
        match = re.fullmatch(r"(.*?)\.?(output|input|inputs)(\.i\d+)?", provider)
        if match is None:
            raise ValueError(f"{provider!r} names neither an output nor an input of a module")
        name = without_root(match[1])
        if match[2] == "output":
            self.left(self.cache.last_without_output(name), name, value)
        else:
            self.entered(name, *value)

    def entered(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> cache_dict.Entry | None:
        """A module begins a call; the entry that its output belongs to, None where inputs are not
        kept.
        """
        return (
            self.cache.append(name, cache_dict.Entry(inputs=self._kept((args, dict(kwargs)))))
            if self.include_inputs
            else None
        )

    def left(self, entry: cache_dict.Entry | None, name: str, output: Any) -> None:
        """A module ends a call."""
        if self.include_output:
            kept = self._kept(output)
            if entry is None:
                self.cache.append(name, cache_dict.Entry(output=kept))
            else:
                entry.set_output(kept)

    def _kept(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._copy(value)
        copies: dict[int, Any] = {}  # a tensor that stands in a value twice is one

        def once(tensor: Tensor) -> Any:
            if id(tensor) not in copies:
                copies[id(tensor)] = self._copy(tensor)
            return copies[id(tensor)]

        return replace_leaves(value, Tensor, once)

    def _copy(self, tensor: Tensor) -> Any:
        kept = tensor.detach() if self.detach_tensors else tensor
        # nothing but floating numbers is cast: token ids stay whole
        dtype = self.dtype if self.dtype is not None and kept.is_floating_point() else None
        if dtype is None and (self.device is None or kept.device == self.device):
            kept = kept.clone()
        else:  # "cuda" is where a tensor on "cuda:0" is already
            kept = kept.to(
                kept.device if self.device is None else self.device, dtype or kept.dtype, copy=True
            )
        return self._within_budget(kept)

    def _within_budget(self, tensor: Tensor) -> Any:
        size = tensor.numel() * tensor.element_size()
        if self.max_bytes is None or self.bytes + size <= self.max_bytes:
            self.bytes += size
            return tensor
        if self._spill is None:
            raise CacheFull(
                f"the cache holds {self.bytes:,} bytes and another {size:,} would pass max_bytes={self.max_bytes:,}; "
                "choose fewer modules, raise it, or give overflow='disk'"
            )
        return self._spill.put(tensor)

    def seen(
        self,
        place: _CacheHook,
        tensors: list[tuple[str, Tensor]],
        *,
        entering: bool,
        differentiable: bool,
    ) -> None:
        """A compiled program hands over what a module takes or returns: a tensor, or a list of all
        tensors in it.
        """
        if entering:
            named = {
                label.removeprefix("in."): tensor
                for label, tensor in tensors
                if label.startswith("in.")
            }
            by_place = tuple(tensor for label, tensor in tensors if not label.startswith("in."))
            self.entered(place.title, by_place, named)
        else:
            self.left(
                self.cache.last_without_output(place.title) if self.include_inputs else None,
                place.title,
                flat_value(tensors),
            )


_numbers = itertools.count()


class _Calls(threading.local):
    def __init__(self) -> None:
        self.open: list[tuple[_CacheHook, cache_dict.Entry | None]] = []


_calls = _Calls()


class _CacheHook(ForwardHook):
    """Hands a cache what one module returns."""

    number: Tensor  # what stands for it in compiled graphs

    def __init__(self, cache: Cache, module: nn.Module, title: str) -> None:
        self.cache, self.module, self.title = cache, module, title
        self._own_name = f"otel_torch.cache.{next(_numbers)}"

    def name(self) -> str:  # type: ignore[override]
        """A module may be in several caches."""
        return self._own_name

    def post_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if not torch.compiler.is_compiling():
            self.cache.left(self.entry(), self.title, output)
        else:
            compiled.outputs(self.number, output)

    def entry(self) -> cache_dict.Entry | None:
        """The entry to which the output of the call that ends belongs, None for one of its own."""
        return None


class _CallHook(_CacheHook):
    """Hands a cache the calls of one module: what it takes, and what it returns for that."""

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not torch.compiler.is_compiling():
            _calls.open.append((self, self.cache.entered(self.title, args, kwargs)))
        else:
            compiled.inputs(self.number, args, kwargs)
        return args, kwargs

    def entry(self) -> cache_dict.Entry | None:
        for depth in reversed(range(len(_calls.open))):
            if _calls.open[depth][0] is self:
                entry = _calls.open[depth][1]
                del _calls.open[depth:]  # what is above it has raised
                return entry
        return None


def _no_match(wanted: str | re.Pattern[str], model: nn.Module, names: list[str]) -> str:
    text = wanted.pattern if isinstance(wanted, re.Pattern) else wanted
    close = difflib.get_close_matches(
        without_root(text), [name for name in names if name], n=3, cutoff=0.5
    )
    meant = (
        f"; did you mean {' or '.join(map(repr, close))}?"
        if close
        else f"; there are {len(names)}, see named_modules()"
    )
    return f"no module of {type(model).__name__} matches {text!r}{meant}"
