"""The models of a process, by their roots and names.

A program may make a model for every step. Finding, naming and forgetting one takes the same time
however many there were.
"""

from __future__ import annotations

import heapq
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from otel_torch.sources.modules.module_names import class_name

if TYPE_CHECKING:
    from otel_torch.sources.models.model import Model

# so many models are kept for the metadata after their roots are gone
_GONE_MAX = 100


class ModelTable:
    """Every model that ran. Of those whose roots are gone only the first are kept.

    Loose modules of one class that a program makes again for every step are one model: losses
    without state, and losses whose only state is buffers, such as class weights.

    Attributes:
        forgotten: how many models are gone and not kept.
    """

    def __init__(self) -> None:
        self._models: dict[int, Model] = {}  # by their order
        self._by_root: dict[int, Model] = {}
        self._of_class: Counter[str] = Counter()
        self._stateless: dict[str, Model] = {}
        # leaf models whose roots are gone, by class, as (order, model) in a heap
        self._vacant: defaultdict[str, list[tuple[int, Model]]] = defaultdict(list)
        self._made = self._gone = self.forgotten = 0

    def __iter__(self) -> Iterator[Model]:
        return iter(list(self._models.values()))

    def __bool__(self) -> bool:
        return bool(self._models)

    def find(self, root: nn.Module) -> Model | None:
        model = self._by_root.get(id(root))
        if model is not None and model.root() is root:
            return model
        name = class_name(root)
        if is_stateless(root) and name in self._stateless:
            return self._stateless[name]
        if is_leaf(root) and self._vacant.get(name):
            model = heapq.heappop(self._vacant[name])[1]
            model.root = weakref.ref(root)
            self._by_root[id(root)] = model
            return model
        return None

    def unused_name(self, root: nn.Module) -> str:
        """Return the name of a new model: the root's class, with `#2` for the second one."""
        name = class_name(root)
        return f"{name}#{self._of_class[name] + 1}" if self._of_class[name] else name

    def add(self, model: Model, root: nn.Module) -> None:
        name = class_name(root)
        self._of_class[name] += 1
        model.order = self._made
        self._made += 1
        self._models[model.order] = self._by_root[id(root)] = model
        if model.stateless:
            self._stateless.setdefault(name, model)

    def module_gone(self, model: Model, key: int) -> bool:
        """Forget a model if the module whose id was `key` was its root; return whether it was."""
        if self._by_root.get(key) is not model:
            return False
        del self._by_root[key]
        if model.leaf:
            name = model.name.partition("#")[0]
            if self._stateless.get(name) is not model:
                heapq.heappush(self._vacant[name], (model.order, model))
        elif self._gone < _GONE_MAX:
            self._gone += 1
        else:
            self._models.pop(model.order, None)
            self.forgotten += 1
        return True


def is_stateless(module: nn.Module) -> bool:
    """Return whether a module holds no tensor and no other module."""
    return is_leaf(module) and not module._buffers


def is_leaf(module: nn.Module) -> bool:
    """Return whether a module holds no parameter and no other module."""
    return not (module._modules or module._parameters)
