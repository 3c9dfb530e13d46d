"""Knows which modules contain which, and so the root of each: its outermost container."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import nn

from otel_torch.sources.modules.module_dict import ModuleDict
from otel_torch.sources.modules.module_names import children_of, parts
from otel_torch.sources.modules.uncalled_roots import running_owner


class Containers:
    """The containers of every module, by identity, because modules may compare equal.

    >>> inner = nn.Linear(1, 1)
    >>> outer = nn.Sequential(nn.Sequential(inner))
    >>> containers = Containers()
    >>> containers.add(outer[0], inner), containers.add(outer, outer[0])
    (True, True)
    >>> containers.root_of(inner) is outer
    True
    """

    def __init__(self) -> None:
        self._of: ModuleDict[list[weakref.ref[nn.Module]]] = ModuleDict()

    def add(self, container: nn.Module, child: nn.Module) -> bool:
        """Note that `container` has got `child`; return whether that is new.

        Raises:
            TypeError: the child takes no weak references.
        """
        references = self._of.setdefault(child, [])
        references[:] = [reference for reference in references if reference() is not None]
        if any(reference() is container for reference in references):
            return False
        references.append(weakref.ref(container))
        return True

    def choose_root(self, module: nn.Module) -> nn.Module:
        """Return the outermost container to which a call of `module` belongs.

        Of several, the one of which a method is running, or else the one that was built first.
        """
        roots = self._roots_of(module)
        if len(roots) == 1:
            return roots[0]
        return running_owner(roots) or roots[0]

    def _roots_of(self, module: nn.Module) -> list[nn.Module]:
        """Return every outermost container of a module, in the order in which they were built."""
        roots, reached = [], {id(module): module}
        pending = [module]
        while pending:
            inner = pending.pop(0)
            containers = list(self._containers_of(inner))
            if not containers:
                roots.append(inner)
            pending += [container for container in containers if id(container) not in reached]
            reached.update((id(container), container) for container in containers)
        # none, if modules contain each other
        return roots or [self.root_of(module)]

    def sliced_root(self, container: nn.Module) -> nn.Module | None:
        """Return the model of which `container` is a slice, or None if it is not a slice.

        `vgg.features[:16](x)` makes a new Sequential for every call, whose modules all belong to
        `vgg`. Calls pass through it, and no record names it.
        """
        if type(container) is not nn.Sequential:
            return None
        common: nn.Module | None = None
        for child in children_of(container).values():
            root = self.root_of(child, ignore=container)
            if root is child or root is not (common or root):
                return None  # at the first: finding a root takes as long as its container is wide
            common = root
        return common

    def root_of(self, module: nn.Module, ignore: nn.Module | None = None) -> nn.Module:
        """Return the outermost container of a module, found without `ignore`."""
        visited = {id(module), id(ignore)}
        while (container := self._container_of(module, visited)) is not None:
            visited.add(id(container))
            module = container
        return module

    def _container_of(self, module: nn.Module, visited: set[int]) -> nn.Module | None:
        for container in self._containers_of(module):
            if id(container) not in visited:
                return container
        return None

    def _containers_of(self, module: nn.Module) -> Iterator[nn.Module]:
        for reference in self._of.get(module) or ():
            container: nn.Module | None = reference()
            if container is not None and any(
                child is module for child in parts(container).values()
            ):
                yield container
