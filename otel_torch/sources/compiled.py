"""Records from inside compiled graphs: an operator that the compiler keeps, though it computes nothing.

A hook's Python does not run in a compiled graph. What does is an operator, if the compiler believes that it changes
something: it is given a one-element tensor to change, which also says, without a constant that would make one graph a
layer, whose call it is.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from otel_torch.torch_private import unobserved
from otel_torch.sources.values import walk, walk_inputs

if TYPE_CHECKING:
    from otel_torch.sources.activations import Activations
    from otel_torch.sources.modules import Site

_sites: list[tuple[weakref.ref[Site], weakref.ref[Activations]]] = []


@unobserved
def number(site: Site, activations: Activations) -> torch.Tensor:
    """A tensor that stands for a site in compiled graphs; int64, shape (1,), on the CPU."""
    _sites.append((weakref.ref(site), weakref.ref(activations)))
    with torch.inference_mode(False), torch.device("cpu"):
        return torch.tensor([len(_sites) - 1], dtype=torch.int64)


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
    for position, (label, tensor) in enumerate(tensors):
        torch.ops.otel_torch.observe(tensor.detach(), site, label, position == 0, entering)
