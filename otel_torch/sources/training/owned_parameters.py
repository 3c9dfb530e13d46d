"""The parameters that an optimizer updates in a model, by the modules that own them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor, nn

from otel_torch import torch_private
from otel_torch.process.console import say_once
from otel_torch.sources.models.model import Model
from otel_torch.statistics.norms import whole_values

# returns a tensor of a parameter, or None
TensorOf = Callable[[Tensor], Tensor | None]
# a model has as many as it has optimizers
_MAX_KNOWN = 16


@dataclass(eq=False)
class OwnedTensors:
    """Tensors of a model's parameters, those of one module after the other.

    modules: the canonical names, with how many of the tensors each has. parameter_ids, keys: `id`
    of each tensor's parameter, and its name in its module. is_complete: False if other ranks have
    more.
    """

    modules: list[tuple[str, int]]
    tensors: list[Tensor]
    parameter_ids: list[int]
    keys: list[str]
    is_complete: bool

    @cached_property
    def owners(self) -> list[str]:
        """The module of each tensor."""
        return [module for module, count in self.modules for _ in range(count)]

    @cached_property
    def names(self) -> list[str]:
        pairs = zip(self.owners, self.keys, strict=True)
        return [f"{owner}.{key}" if owner else key for owner, key in pairs]


class _OwningModule(NamedTuple):
    """A module with some of its parameters, by their names there."""

    name: str
    module: weakref.ref[nn.Module]
    keys: list[str]


class ParameterOwners:
    """Finds the modules that own parameters, once per model and optimizer.

    A step must not take longer the more modules there are that it does not train.
    """

    def __init__(self) -> None:
        self._owners: weakref.WeakKeyDictionary[
            Model, dict[object, tuple[list[_OwningModule], bool]]
        ]
        self._owners = weakref.WeakKeyDictionary()

    def tensors(
        self, model: Model, parameter_ids: frozenset[int], tensor_of: TensorOf
    ) -> OwnedTensors:
        """Collect one tensor of each of a model's parameters.

        A parameter that several modules hold belongs to the first of them.

        Args:
            parameter_ids: the parameters to look at.
            tensor_of: returns the tensor; None if there is none.
        """
        owners, is_complete = self._owners_of(model, parameter_ids)
        collected = OwnedTensors([], [], [], [], is_complete)
        for owner in owners:
            module, before = owner.module(), len(collected.tensors)
            parameters = {} if module is None else module._parameters
            for key in owner.keys:
                parameter = parameters.get(key)
                tensor = None if parameter is None else tensor_of(parameter)
                if tensor is None:
                    continue
                if (values := whole_values(tensor)) is None:
                    collected.is_complete = False
                    continue
                collected.tensors.append(values)
                collected.parameter_ids.append(id(parameter))
                collected.keys.append(key)
            if (count := len(collected.tensors) - before) > 0:
                collected.modules.append((owner.name, count))
        return collected

    def _owners_of(
        self, model: Model, parameter_ids: frozenset[int]
    ) -> tuple[list[_OwningModule], bool]:
        """Return the owners, and whether this process has all of each parameter they hold."""
        known = self._owners.setdefault(model, {})
        state = len(model.sites), parameter_ids
        if state not in known:
            if len(known) >= _MAX_KNOWN:
                known.clear()
            known[state] = _find_owners(model, parameter_ids)
        return known[state]


def _find_owners(model: Model, parameter_ids: frozenset[int]) -> tuple[list[_OwningModule], bool]:
    owners, has_all, seen = [], True, set[int]()
    for site in list(model.sites.values()):
        module = site.module()
        if module is None:
            continue
        has_all = has_all and not torch_private.is_sharded_by_fsdp1(module)
        keys = []
        for key, parameter in module._parameters.items() if site.names else ():
            if id(parameter) in parameter_ids and id(parameter) not in seen:
                seen.add(id(parameter))
                keys.append(key)
        if keys:
            owners.append(_OwningModule(site.names[0][0], weakref.ref(module), keys))
    return owners, has_all


def say_incomplete(model: Model, what: str) -> None:
    """Say that something of a model cannot be recorded without asking other ranks."""
    say_once(
        f"{model.name}: the {what} of parameters that are spread over several ranks is not "
        "recorded: it would take communication"
    )
