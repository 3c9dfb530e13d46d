"""Support for Keras on torch: layers belong to their model, and shapes are learned by warm-ups.

A functional or sequential model keeps its layers in a list that torch does not know, beside a
dictionary of all its parameters. Keras runs models on made-up tensors to learn their shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

from torch import nn

from otel_torch.frameworks.patches import Patches
from otel_torch.sources.modules.call_stack import unwatched
from otel_torch.sources.modules.module_names import children_of, part_finders
from otel_torch.sources.steps.warm_ups import warming_up

_patches = Patches()
_layer_class: type | None = None

# a sequential model's copy of itself, whose layers are its own
_INNER_MODEL = "_functional"


@contextmanager
def _learning_shapes() -> Iterator[None]:
    """Begin no model: a layer that is run alone here belongs to one that is being built."""
    with warming_up(), unwatched():
        yield


def _ignore_symbols(backend: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call of a layer that learns shapes if it is called on symbolic tensors."""

    def run(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if backend.any_symbolic_tensors(args, kwargs):
            with _learning_shapes():
                return call(layer, *args, **kwargs)
        return call(layer, *args, **kwargs)

    return run


def _watch_layers(module: ModuleType) -> None:
    global _layer_class
    if issubclass(module.Layer, nn.Module):  # Keras runs on torch
        _layer_class = module.Layer
        _patches.add(part_finders, _parts)
        _patches.replace(module.Layer, "__call__", partial(_ignore_symbols, module.backend))


def _parts(module: nn.Module) -> dict[str, nn.Module] | None:
    """Return the layers of a layer, by attribute or else by the name that Keras gives them.

    Its parameters come last, because those of its layers are among them.
    """
    if _layer_class is None or not isinstance(module, _layer_class):
        return None
    layers: Any = module.__dict__.get("_layers") or ()
    children = {
        name: child
        for name, child in children_of(module).items()
        if not (layers and name == _INNER_MODEL)
    }
    parameters = children.pop("_torch_params", None)
    registered = set(map(id, children.values()))
    children |= {layer.name: layer for layer in layers if id(layer) not in registered}
    return children if parameters is None else children | {"_torch_params": parameters}


uninstall = _patches.restore

HOOKS = {
    "keras.src.backend.torch.core": lambda module: _patches.replace(
        module, "compute_output_spec", _learning_shapes()
    ),
    "keras.src.layers.layer": _watch_layers,
}
