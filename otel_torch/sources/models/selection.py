"""Selects the models and modules that are recorded.

The settings are OTEL_TORCH_MODELS, OTEL_TORCH_MODULES and OTEL_TORCH_EXCLUDE.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import nn

from otel_torch.rendering.near_name import near_name
from otel_torch.settings import Settings

if TYPE_CHECKING:
    from otel_torch.sources.models.model import Model, ModuleSite


class ModuleSelection:
    """The models and modules that the settings select."""

    def __init__(self, settings: Settings) -> None:
        self._models = settings.models
        self._modules = settings.modules
        self._exclude = settings.exclude

    def has_model(self, name: str) -> bool:
        return self._models is None or bool(self._models.search(name))

    def has_module(self, name: str) -> bool:
        """Return whether modules of that canonical name are selected."""
        if self._modules is not None and not self._modules.search(name):
            return False
        return self._exclude is None or not self._exclude.search(name)

    def near_name(self, names: Iterable[str]) -> str:
        """Return what OTEL_TORCH_MODULES may have meant, if it matches none of the names."""
        return "" if self._modules is None else near_name(self._modules.pattern, names)

    def has_site(self, site: ModuleSite) -> bool:
        return any(self.has_module(name) for name, _ in site.names)

    def sites(self, model: Model, sites: list[ModuleSite]) -> list[ModuleSite]:
        if not self.has_model(model.name):
            return []
        return [site for site in sites if self.has_site(site)]

    def modules(self, model: Model) -> Iterator[tuple[str, nn.Module]]:
        """Yield (canonical name, module) for a model's modules that are selected by that name."""
        for site in list(model.sites.values()):
            module = site.module()
            if module is not None and site.names and self.has_module(site.names[0][0]):
                yield site.names[0][0], module
