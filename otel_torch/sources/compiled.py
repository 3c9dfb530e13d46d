"""Records from inside compiled graphs: an operator that the compiler keeps, though it computes nothing.

A hook's Python does not run in a compiled graph. What does is an operator, if the compiler believes that it changes
something: it is given a one-element tensor to change, which also says, without a constant that would make one graph a
layer, whose call it is.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from otel_torch.imports import after_import
from otel_torch.sources.names import core
from otel_torch.sources.values import walk, walk_inputs
from otel_torch.torch_private import unobserved

if TYPE_CHECKING:
    from otel_torch.sources.activations import Activations
    from otel_torch.sources.modules import Model, Site

_sites: list[tuple[weakref.ref[Site], weakref.ref[Activations]]] = []


@unobserved
def number(site: Site, activations: Activations) -> torch.Tensor:
    """A tensor that stands for a site in compiled graphs; int64, shape (1,), on the CPU."""
    _sites.append((weakref.ref(site), weakref.ref(activations)))
    with torch.inference_mode(False), torch.device("cpu"):
        return torch.tensor([len(_sites) - 1], dtype=torch.int64)


def guard_hooks() -> Callable[[], None]:
    """Have the compiler tell modules with our hooks from those of the same class without; returns what ends that.

    By default it does not look: whichever runs first decides for all whether hooks fire.
    """
    before: list[bool] = []

    def guard(config: Any) -> None:
        if hasattr(config, "skip_nnmodule_hook_guards"):
            before.append(config.skip_nnmodule_hook_guards)
            config.skip_nnmodule_hook_guards = False

    call_off = after_import("torch._dynamo.config", guard)

    def restore() -> None:
        call_off()
        if before:
            sys.modules["torch._dynamo.config"].skip_nnmodule_hook_guards = before[0]  # type: ignore[attr-defined]

    return restore


def silent_parts(model: Model, hooked: Callable[[Site], bool]) -> list[tuple[str, list[str]]]:
    """(name, modules inside) of the model's compiled parts out of which nothing came, though `hooked` modules are inside:
    they were compiled before the hooks were there. To be asked after a forward."""
    fired = model.called()
    silent = []
    for site in list(model.sites.values()):
        part = site.module()
        if part is None or not (getattr(part, "_compiled_call_impl", None) or type(part).__name__ == "OptimizedModule"):
            continue
        below = {id(module) for module in part.modules() if type(module).forward is not torch.nn.Module.forward}
        below -= {id(part), id(core(part))}
        inside = [other.name for other in list(model.sites.values()) if other.key in below and hooked(other)]
        own = model.sites.get(id(core(part)))
        if inside and fired.isdisjoint(inside) and own is not None and own.names and (own.name in fired or not hooked(own)):
            silent.append((own.name, inside))
    return silent


@torch.library.custom_op("otel_torch::observe", mutates_args=("site",))
def _observe(tensor: torch.Tensor, site: torch.Tensor, label: str, first: bool, entering: bool) -> None:
    reference, activations = _sites[int(site[0])]
    place, observer = reference(), activations()
    if place is not None and observer is not None:
        observer.seen(place, label, tensor, first=first, entering=entering)


@_observe.register_fake
def _(tensor: torch.Tensor, site: torch.Tensor, label: str, first: bool, entering: bool) -> None:
    return None


def outputs(site: torch.Tensor, output: Any) -> None:
    """Traced into the graph of a module: hand over the tensors of its output when the graph runs."""
    _hand_over(site, list(walk(output, "out")), False)


def inputs(site: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Traced into the graph of a module: hand over the tensors of its inputs when the graph runs."""
    _hand_over(site, list(walk_inputs(args, kwargs)), True)


def _hand_over(site: torch.Tensor, tensors: list[tuple[str, torch.Tensor]], entering: bool) -> None:
    if entering and not tensors:  # all the same a call begins
        tensors = [("", torch.empty(0, device="cpu"))]
    for position, (label, tensor) in enumerate(tensors):
        torch.ops.otel_torch.observe(tensor.detach(), site, label, position == 0, entering)
