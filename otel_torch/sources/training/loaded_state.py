"""Notices weights that a program loads and does not train on: it overwrites them, or has loaded
them into an instance of the model that never runs.

A few elements of three parameters stand for all. What is on a device is not looked at.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from otel_torch.process.console import say_once
from otel_torch.sources.models.model import Model
from otel_torch.sources.modules.module_names import core
from otel_torch.sources.replacements import Replacements
from otel_torch.statistics.unwrap_tensor import host_values
from otel_torch.torch_private import unobserved

_ELEMENTS = 64
# loads that are remembered: a program may load one in each step
_MOST_LOADS = 64
# a weight that was cast to half precision after loading is the same one
_CAST = 0.02


@dataclass(slots=True, eq=False)
class _Load:
    """A state that was loaded into a module. `probes`: elements of some parameters by name;
    `is_empty`: whether none of its names is one of the module's.
    """

    module: weakref.ref[nn.Module]
    kind: str
    probes: dict[str, Tensor]
    is_empty: bool


class LoadedStates:
    """The states that a program has loaded into modules before they trained."""

    def __init__(self, has_run: Callable[[nn.Module], bool]) -> None:
        self._has_run = has_run
        self._loads: list[_Load] = []

    def install(self, replacements: Replacements) -> None:
        """Watch `load_state_dict` of every module."""
        replacements.replace(nn.Module, "load_state_dict", self._wrap_load)

    def _wrap_load(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def load_state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = load(module, *args, **kwargs)
            self._loaded(module, result)
            return result

        return load_state_dict

    def _loaded(self, module: nn.Module, result: Any) -> None:
        try:
            if len(self._loads) < _MOST_LOADS:
                module = core(module)
                probes, is_empty = _probes_of(module), _is_empty(module, result)
                load = _Load(weakref.ref(module), type(module).__qualname__, probes, is_empty)
                self._loads = [known for known in self._loads if known.module() is not module]
                self._loads += [load] if probes else []
        except Exception as error:
            say_once(f"a loaded state is not followed: {type(error).__name__}: {error}")

    @unobserved
    def of(self, model: Model) -> LoadedState:
        root, loads = model.root(), self._loads
        own = [load for load in loads if load.module() is root]
        if root is None or not loads:
            return LoadedState([], self._has_run)
        if own:
            is_overwritten = not own[0].is_empty and _all_differ(own[0], root)
            return LoadedState([], self._has_run, is_overwritten, own[0].is_empty)
        kind = type(root).__qualname__
        elsewhere = [load for load in loads if load.kind == kind and _all_differ(load, root)]
        return LoadedState([load.module for load in elsewhere], self._has_run)


@dataclass(slots=True)
class LoadedState:
    """What became of the states that were loaded for a model."""

    elsewhere: list[weakref.ref[nn.Module]]
    has_run: Callable[[nn.Module], bool]
    is_overwritten: bool = False
    is_empty: bool = False

    def describe(self) -> dict[str, Any]:
        """Return the model's part of the metadata."""
        modules = [module for reference in self.elsewhere if (module := reference()) is not None]
        idle = len(self.elsewhere) > 0 and not any(map(self.has_run, modules))
        return {
            **({"overwritten": True} if self.is_overwritten else {}),
            **({"nothing_loaded": True} if self.is_empty else {}),
            **({"loaded_elsewhere": True} if idle else {}),
        }


@unobserved
def _probes_of(module: nn.Module) -> dict[str, Tensor]:
    probes = {name: elements for name, elements in _named_elements(module) if _tells(elements)}
    names = list(probes)
    chosen = {index for index in (0, len(names) // 2, len(names) - 1) if names}
    return {names[index]: probes[names[index]].clone() for index in sorted(chosen)}


def _named_elements(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the first elements of the parameters that the host can read."""
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() and (values := host_values(parameter)) is not None:
            yield name, values.reshape(-1)[:_ELEMENTS].float()


def _tells(elements: Tensor) -> bool:
    """Return whether a parameter would show a load: one of equal numbers may begin with them."""
    return elements.numel() > 1 and bool((elements != elements[0]).any())


def _is_empty(module: nn.Module, result: Any) -> bool:
    """Return whether a state has names, and none of them is one of the module's."""
    missing = set(getattr(result, "missing_keys", ()))
    names = {name for name, _ in module.named_parameters()}
    return bool(getattr(result, "unexpected_keys", ())) and bool(names) and names <= missing


def _all_differ(load: _Load, module: nn.Module) -> bool:
    """Return whether no parameter that was loaded has its numbers in a module."""
    now = dict(_named_elements(module))
    pairs = ((values, now.get(name)) for name, values in load.probes.items())
    return all(
        elements is not None
        and elements.shape == values.shape
        and not torch.allclose(elements, values, rtol=_CAST, atol=1e-6)
        for values, elements in pairs
    )
