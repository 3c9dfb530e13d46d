"""Runs a model after a finder of the program has hidden the import of torch or of diffusers.

usage: hide_an_import.py KIND MODULE

KIND is what kind of finder hides MODULE: torch, or the one that diffusers' schedulers are in.
"""

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

HIDDEN = sys.argv[2]


class LoadsItself(MetaPathFinder):
    """Imports the module while it is asked for it. Python then loads it once more."""

    def __init__(self) -> None:
        self.is_loading = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != HIDDEN or self.is_loading:
            return None
        self.is_loading = True
        return importlib.import_module(name).__spec__


class HandsOver(LoadsItself):
    """Imports the module while it is asked for it, and has Python take that one."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = super().find_spec(name, path, target)
        if spec is not None:
            module = sys.modules[name]
            module.__spec__ = spec = ModuleSpec(name, Loaded(module), origin=spec.origin)
            spec.submodule_search_locations = getattr(module, "__path__", None)
        return spec


class Loaded(Loader):
    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        pass


class Instruments(MetaPathFinder):
    """Finds the module without asking any other finder; typeguard and jaxtyping do so."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == HIDDEN else None
        if spec is not None:
            spec.loader = Rewrites(name, spec.origin or "")
        return spec


class Rewrites(SourceFileLoader):
    pass


def hide(kind: str) -> None:
    if kind == "wrapt":
        import wrapt

        wrapt.register_post_import_hook(lambda module: None, HIDDEN)
        return
    finder = {"loads": LoadsItself, "hands_over": HandsOver, "instruments": Instruments}
    where, what = kind.split(" ")
    sys.meta_path.insert({"before": 0, "after": 1}[where], finder[what]())


def denoise(net: Any, sample: Any) -> None:
    """Denoise in 3 steps of 2 forwards."""
    from diffusers import DDIMScheduler

    scheduler = DDIMScheduler()
    scheduler.set_timesteps(3)
    for timestep in scheduler.timesteps:
        guided = net(sample) + net(-sample)
        sample = scheduler.step(guided, timestep, sample).prev_sample


def call(net: Any, sample: Any) -> None:
    """Call the model three times."""
    # a finder that was not asked for torch is asked for the next module
    import colorsys  # noqa: F401

    for _ in range(3):
        net(sample)


if __name__ == "__main__":
    hide(sys.argv[1])
    import torch

    with torch.no_grad():
        run = call if HIDDEN == "torch" else denoise
        run(torch.nn.Linear(2, 2), torch.ones(1, 2))
