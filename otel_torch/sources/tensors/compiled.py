"""Observes tensors inside compiled graphs, by an operator that the compiler does not remove.

The Python of a hook does not run in a compiled graph. When a hook is traced, it adds the operator
`otel_torch::observe` to the graph, which passes the tensors of a module call to an observer. The
operator declares that it changes its argument `site`, a one-element tensor, so that the compiler
keeps it. The element says which module is called; a constant would make the compiler generate a
graph for each layer. The operator is defined by its schema, because the Python layers of
`custom_op` take 15 us per call.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from otel_torch.process.console import say_once
from otel_torch.process.import_hooks import after_import
from otel_torch.sources.modules.module_names import all_modules, class_forward, core
from otel_torch.sources.tensors.values import walk, walk_inputs
from otel_torch.torch_private import call_past_dispatcher, is_exporting, unobserved

if TYPE_CHECKING:
    from otel_torch.sources.models.model import Model, ModuleSite


class Observer:
    """Receives the tensors that compiled graphs observe."""

    def observe_ordinary(
        self, site: Any, tensors: list[torch.Tensor], labels: list[str], entering: bool
    ) -> bool:
        """Observe a call that needs nothing else; False leaves it to `on_compiled_tensors`."""
        return False

    def on_compiled_tensors(
        self,
        site: Any,
        tensors: list[tuple[str, torch.Tensor]],
        *,
        entering: bool,
        differentiable: bool,
    ) -> None:
        """Called with the inputs (`entering`) or outputs of a call, as (label, tensor).

        Args:
            site: the object that was given to `site_tensor`.
            differentiable: whether gradients flow through the call. They are not observed.
        """
        raise NotImplementedError


class _SiteRef(weakref.ref[Any]):
    """A weak reference to a site, with its key in `_sites` and its observer.

    One object per site, because the garbage collector traverses them all.
    """

    __slots__ = ("key", "observer")

    key: int
    observer: weakref.ref[Observer]


_sites: dict[int, _SiteRef] = {}
_keys = itertools.count()
# the types of distributed tensors, which reject operators that torch does not know; empty until the
# program imports them
_dtensor_types: tuple[type, ...] = ()


def site_tensor(site: Any, observer: Observer) -> torch.Tensor:
    """Return a tensor that identifies a site in compiled graphs: int64, shape (1,), on the CPU.

    Keeps neither the site nor the observer alive.
    """
    return site_tensors([site], observer)[0]


@unobserved
def site_tensors(sites: Sequence[Any], observer: Observer) -> list[torch.Tensor]:
    """Return `site_tensor` for many sites, in a fifth of the time."""
    observer_ref = weakref.ref(observer)
    keys = list(itertools.islice(_keys, len(sites)))
    for key, site in zip(keys, sites, strict=True):
        site_ref = _sites[key] = _SiteRef(site, _drop_site)
        site_ref.key, site_ref.observer = key, observer_ref
    with torch.inference_mode(False):
        rows = torch.tensor(keys, dtype=torch.int64, device="cpu")[:, None]
        # each with its own memory: views of one tensor would alias each other in a graph
        return [row.clone() for row in rows]


def _drop_site(site_ref: _SiteRef) -> None:
    _sites.pop(site_ref.key, None)


# those that have asked for guards on hooks, and the setting before the first of them
_guarding: list[object] = []
_skipped_before: list[bool] = []


def guard_hooks() -> Callable[[], None]:
    """Have the compiler guard on hooks of modules; return a function that ends this.

    By default it does not, so that the first of two modules of a class that runs decides for both
    whether hooks are called. Callers may end in any order.
    """
    caller = object()

    def enable_guards(config: Any) -> None:
        if hasattr(config, "skip_nnmodule_hook_guards"):
            if not _guarding:
                _skipped_before[:] = [config.skip_nnmodule_hook_guards]
            if caller not in _guarding:
                _guarding.append(caller)
            config.skip_nnmodule_hook_guards = False

    def set_dtensor_types(distributed: Any) -> None:
        global _dtensor_types
        _dtensor_types = (distributed.DTensor,)

    cancel_waiting = [
        after_import("torch._dynamo.config", enable_guards),
        after_import("torch.distributed.tensor", set_dtensor_types),
    ]

    def restore() -> None:
        for cancel in cancel_waiting:
            cancel()
        if caller in _guarding:
            _guarding.remove(caller)
            if not _guarding:
                config: Any = sys.modules["torch._dynamo.config"]
                config.skip_nnmodule_hook_guards = _skipped_before[0]

    return restore


def silent_parts(
    model: Model, is_hooked: Callable[[ModuleSite], bool]
) -> list[tuple[str, list[str]]]:
    """Find compiled parts of a model that were compiled before their modules had hooks.

    Call this after a forward pass. Returns (name of the part, names of its hooked modules) for each
    part in which no hooked module was observed.
    """
    observed = model.calls.modules()
    sites = list(model.sites.values())
    silent = []
    for site in sites:
        part = site.module()
        if part is None or not _is_compiled(part):
            continue
        inner = core(part)
        inside = _ids_of_submodules(part) - {id(part), id(inner)}
        hooked = [
            candidate.name
            for candidate in sites
            if candidate.key in inside and is_hooked(candidate)
        ]
        inner_site = model.sites.get(id(inner))
        if not hooked or not observed.isdisjoint(hooked):
            continue
        if inner_site is None or not inner_site.names:
            continue
        if inner_site.name in observed or not is_hooked(inner_site):
            silent.append((inner_site.name, hooked))
    return silent


def _is_compiled(module: torch.nn.Module) -> bool:
    is_wrapper = type(module).__name__ == "OptimizedModule"
    return is_wrapper or bool(getattr(module, "_compiled_call_impl", None))


def _ids_of_submodules(module: torch.nn.Module) -> set[int]:
    """Return the ids of the modules inside `module` that have a forward."""
    default = class_forward(torch.nn.Module)
    return {id(part) for part in all_modules(module) if class_forward(type(part)) is not default}


# `site` is not really changed; the compiler has to believe so
_SCHEMA = (
    "observe(Tensor[] tensors, Tensor(a!) site, str[] labels, bool entering, bool grad_enabled, "
    "bool differentiable) -> ()"
)
_operators: Any = torch.library
_library = _operators.Library("otel_torch", "FRAGMENT")
# flexible_layout: no tensor is copied for the operator. cudagraph_unsafe: a CUDA graph would not
# replay the call, so inductor splits its graphs there
_library.define(
    _SCHEMA,
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe),
)


def _observe(
    tensors: list[torch.Tensor],
    site: torch.Tensor,
    labels: list[str],
    entering: bool,
    grad_enabled: bool,
    differentiable: bool,
) -> None:
    site_ref = _sites.get(int(site.item()))
    if site_ref is None:
        return
    site_object, observer = site_ref(), site_ref.observer()
    if site_object is None or observer is None:
        return
    if not observer.observe_ordinary(site_object, tensors, labels, entering):
        # a graph with a backward pass computes without gradients, but the program does not
        with torch.enable_grad() if grad_enabled else nullcontext():
            observer.on_compiled_tensors(
                site_object,
                list(zip(labels, tensors, strict=True)),
                entering=entering,
                differentiable=differentiable,
            )


def _observe_in_vmap(
    info: Any, dims: Any, tensors: list[torch.Tensor], *arguments: Any
) -> tuple[None, None]:
    """Observe all samples as one tensor."""
    torch.ops.otel_torch.observe.default(tensors, *arguments)
    return None, None


_library.impl("observe", _observe, "CompositeExplicitAutograd")
call_past_dispatcher(torch.ops.otel_torch.observe.default, _observe)
# nothing to differentiate
_library.impl("observe", _operators.fallthrough_kernel, "Autograd")
_operators.register_fake("otel_torch::observe", lambda *arguments: None, lib=_library)
_operators.register_vmap("otel_torch::observe", _observe_in_vmap, lib=_library)


def observe_outputs(site: torch.Tensor, output: Any) -> None:
    """Add to the graph being traced: observe the tensors of a module's output.

    Does nothing in `torch.export`, whose graph belongs to the user.
    """
    if not is_exporting():
        _observe_tensors(site, walk(output, "out"), False)


def observe_inputs(site: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Add to the graph being traced: observe the tensors of a module's inputs.

    Does nothing in `torch.export`, whose graph belongs to the user.
    """
    if not is_exporting():
        _observe_tensors(site, walk_inputs(args, kwargs), True)


def report_compiled_gradient() -> None:
    """Log, while a backward pass is compiled, that its gradients are not recorded."""
    torch._dynamo.comptime.comptime(_report_compiled_gradient)


def _report_compiled_gradient(context: Any) -> None:
    say_once(
        "gradients inside a compiled backward pass are not recorded; "
        "switch compiled autograd off to record them"
    )


def _observe_tensors(
    site: torch.Tensor, labeled: list[tuple[str, torch.Tensor]], entering: bool
) -> None:
    grad_enabled = torch.is_grad_enabled()
    differentiable = grad_enabled and any(tensor.requires_grad for _, tensor in labeled)
    tensors = [
        tensor.to_local() if isinstance(tensor, _dtensor_types) else tensor  # type: ignore[attr-defined]
        for _, tensor in labeled
    ]
    labels = [label for label, _ in labeled]
    torch.ops.otel_torch.observe.default(
        tensors, site, labels, entering, grad_enabled, differentiable
    )
