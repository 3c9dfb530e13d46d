"""Records from inside compiled graphs: an operator that the compiler keeps, though it computes
nothing.

A hook's Python does not run in a compiled graph. What does is an operator, if the compiler believes
that it changes something: it is given a one-element tensor to change, which also says, without a
constant that would make one graph a layer, whose call it is. It is defined by its schema, not by
`custom_op`, whose layers of Python cost 15 us a call.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from otel_torch.console import say_once
from otel_torch.sources.module_names import core
from otel_torch.sources.values import walk, walk_inputs
from otel_torch.startup.import_hooks import after_import
from otel_torch.torch_private import is_exporting, unobserved

if TYPE_CHECKING:
    from otel_torch.sources.modules import Model, ModuleSite


class Observer(Protocol):
    """Who is told what compiled programs hand over."""

    def seen(
        self,
        place: Any,
        tensors: list[tuple[str, torch.Tensor]],
        *,
        entering: bool,
        differentiable: bool,
    ) -> None:
        """The tensors of a call, with their labels: those that enter it, or those that leave.
        place: as given to `number`. differentiable: whether gradients would flow, of which nothing
        is seen.
        """


class _Place(weakref.ref[Any]):
    """A place, which is not kept alive, and who is told of it: one object each, for the garbage
    collector counts them.
    """

    __slots__ = ("number", "observer")

    number: int
    observer: weakref.ref[Observer]


_places: dict[int, _Place] = {}
_numbers = itertools.count()
# distributed tensors, which refuse operators that torch does not know: empty until the program
# imports them
_shards: tuple[type, ...] = ()


def number(place: Any, observer: Observer) -> torch.Tensor:
    """A tensor that stands for a place (a site) in compiled graphs; int64, shape (1,), on the CPU.
    Keeps neither alive.
    """
    return numbers([place], observer)[0]


@unobserved
def numbers(places: Sequence[Any], observer: Observer) -> list[torch.Tensor]:
    """The same for many places, in a fifth of the time: that of one goes into saying what holds for
    all.
    """
    told, found = weakref.ref(observer), list(itertools.islice(_numbers, len(places)))
    for one, place in zip(found, places, strict=True):
        kept = _places[one] = _Place(place, _forget)
        kept.number, kept.observer = one, told
    with torch.inference_mode(False):
        # each with memory of its own: views of one tensor would alias each other in a graph
        return [
            one.clone() for one in torch.tensor(found, dtype=torch.int64, device="cpu")[:, None]
        ]


def _forget(place: _Place) -> None:
    _places.pop(place.number, None)


_guarding: list[
    object
] = []  # who wants the compiler to look at hooks, and what it was told before the first of them came
_told_before: list[bool] = []


def guard_hooks() -> Callable[[], None]:
    """Have the compiler tell modules with our hooks from those of the same class without; returns
    what ends that.

    By default it does not look: whichever runs first decides for all whether hooks fire. Whoever
    asks first need not end last.
    """
    asked = object()

    def guard(config: Any) -> None:
        if hasattr(config, "skip_nnmodule_hook_guards"):
            if not _guarding:
                _told_before[:] = [config.skip_nnmodule_hook_guards]
            _guarding.append(asked)
            config.skip_nnmodule_hook_guards = False

    def know_shards(distributed: Any) -> None:
        global _shards
        _shards = (distributed.DTensor,)

    waiting = [
        after_import("torch._dynamo.config", guard),
        after_import("torch.distributed.tensor", know_shards),
    ]

    def restore() -> None:
        for call_off in waiting:
            call_off()
        if asked in _guarding:
            _guarding.remove(asked)
            if not _guarding:
                sys.modules["torch._dynamo.config"].skip_nnmodule_hook_guards = _told_before[0]  # type: ignore[attr-defined]

    return restore


def silent_parts(model: Model, hooked: Callable[[ModuleSite], bool]) -> list[tuple[str, list[str]]]:
    """(name, modules inside) of the model's compiled parts out of which nothing came, though
    `hooked` modules are inside: they were compiled before the hooks were there. To be asked after a
    forward.
    """
    fired = model.calls.modules()
    silent = []
    for site in list(model.sites.values()):
        part = site.module()
        if part is None or not (
            getattr(part, "_compiled_call_impl", None) or type(part).__name__ == "OptimizedModule"
        ):
            continue
        below = {
            id(module)
            for module in part.modules()
            if type(module).forward is not torch.nn.Module.forward
        }
        below -= {id(part), id(core(part))}
        inside = [
            other.name
            for other in list(model.sites.values())
            if other.key in below and hooked(other)
        ]
        own = model.sites.get(id(core(part)))
        if (
            inside
            and fired.isdisjoint(inside)
            and own is not None
            and own.names
            and (own.name in fired or not hooked(own))
        ):
            silent.append((own.name, inside))
    return silent


# `site` is changed for the compiler only. Any layout will do: no tensor is copied to be looked at
_SCHEMA = "observe(Tensor[] tensors, Tensor(a!) site, str[] labels, bool entering, bool differentiable) -> ()"
_operators: Any = torch.library
_library = _operators.Library("otel_torch", "FRAGMENT")
# a CUDA graph would replay the kernels and not the call: inductor cuts its graphs there
_library.define(
    _SCHEMA,
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe),
)


def _observe(
    tensors: list[torch.Tensor],
    site: torch.Tensor,
    labels: list[str],
    entering: bool,
    differentiable: bool,
) -> None:
    known = _places.get(int(site.item()))
    place, observer = (None, None) if known is None else (known(), known.observer())
    if place is not None and observer is not None:
        observer.seen(
            place,
            list(zip(labels, tensors, strict=True)),
            entering=entering,
            differentiable=differentiable,
        )


def _observe_batches(
    info: Any, dims: Any, tensors: list[torch.Tensor], *others: Any
) -> tuple[None, None]:
    """Inside vmap: all samples as one tensor."""
    torch.ops.otel_torch.observe.default(tensors, *others)
    return None, None


_library.impl("observe", _observe, "CompositeExplicitAutograd")
_library.impl(
    "observe", _operators.fallthrough_kernel, "Autograd"
)  # there is nothing to differentiate
_operators.register_fake("otel_torch::observe", lambda *arguments: None, lib=_library)
_operators.register_vmap("otel_torch::observe", _observe_batches, lib=_library)


def outputs(site: torch.Tensor, output: Any) -> None:
    """Have the graph that is being traced report the tensors of a module's output when it runs.

    Leaves an exported program alone: that is the user's product.
    """
    if not is_exporting():
        _hand_over(site, walk(output, "out"), False)


def inputs(site: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Have the graph that is being traced report the tensors of a module's inputs when it runs."""
    if not is_exporting():
        _hand_over(site, walk_inputs(args, kwargs), True)


def hidden_gradient() -> None:
    """Traced into a compiled backward pass in the place of a hook on a gradient: no record can be
    made there.
    """
    torch._dynamo.comptime.comptime(_say_hidden_gradient)


def _say_hidden_gradient(context: Any) -> None:
    say_once(
        "gradients inside a compiled backward pass are not recorded; switch compiled autograd off to record them"
    )


def _hand_over(site: torch.Tensor, found: list[tuple[str, torch.Tensor]], entering: bool) -> None:
    differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for _, tensor in found)
    tensors = [tensor.to_local() if isinstance(tensor, _shards) else tensor for _, tensor in found]  # type: ignore[attr-defined]
    torch.ops.otel_torch.observe.default(
        tensors, site, [label for label, _ in found], entering, differentiable
    )
