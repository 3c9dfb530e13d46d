"""Where an operation runs, and what the tensors are called that none has made."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from otel_torch import torch_private
from otel_torch.graph.graph import PROGRAM
from otel_torch.sources.models.model import Model, ModuleSite
from otel_torch.sources.modules import call_stack
from otel_torch.sources.operations.program_values import memory_of
from otel_torch.sources.steps.forwards import ForwardContext, Inputs
from otel_torch.sources.tensors.tensor_reader import RecordedCall
from otel_torch.sources.tensors.values import argument_name, argument_names, walk_inputs

UPDATE, BACKWARD, RECOMPUTE = "update", "backward", "recompute"


# memory, offset and sizes
_Part = tuple[int, int, tuple[int, ...]]


class LeafName(NamedTuple):
    """What a leaf is called.

    Attributes:
        module: Whose parameter or buffer it is, None for other leaves.
        line: Which line passes an input; None for other leaves.
    """

    leaf: str
    name: str
    model: str
    module: str | None
    line: int | None = None


class _Calls(threading.local):
    """The numbered module calls that a thread is in: (depth of the call stack, site, number)."""

    def __init__(self) -> None:
        self.entered: list[tuple[int, ModuleSite, int]] = []


class Places:
    """The places of one session."""

    def __init__(self) -> None:
        self.is_stepping = False  # an optimizer steps
        self._context: ForwardContext | None = None
        self._first_model = PROGRAM
        self._calls = _Calls()
        self._counts: dict[tuple[str, str, str, int, int], int] = {}
        self._cached: dict[tuple[Any, ...], RecordedCall] = {}
        self._names: dict[_Part, LeafName] = {}
        self._named: WeakKeyDictionary[Model, int] = WeakKeyDictionary()

    # -- calls

    def begin_forward(
        self, model: Model, context: ForwardContext, inputs: Inputs, line: int | None
    ) -> None:
        """Note the step of an outermost forward, and what its inputs and parameters are called."""
        if self._context is None:
            self._first_model = model.name
        self._context = context
        self._cached.clear()
        self._name_parameters(model)
        names = [] if inputs.module is None else argument_names(inputs.module)
        for label, tensor in walk_inputs(inputs.args, inputs.kwargs):
            name = argument_name(label, names) or label
            self._add_name(tensor, LeafName("input", name, model.name, None, line))

    def enter(self, site: ModuleSite) -> None:
        """Number a call of a module, which begins."""
        context = self._context
        if context is None:
            return
        key = site.model.name, site.name, self._phase(True), context.loop, context.step
        number = self._counts.get(key, 0)
        self._counts[key] = number + 1
        self._calls.entered.append((len(call_stack.current()), site, number))

    def leave(self) -> None:
        """Note the end of the innermost call that was numbered."""
        if self._calls.entered:
            self._calls.entered.pop()

    @property
    def has_begun(self) -> bool:
        """Whether any model has been called yet; what runs before prepares the program."""
        return self._context is not None

    @property
    def is_outermost(self) -> bool:
        """Whether this thread is in no more than one call."""
        return len(call_stack.current()) <= 1

    def current_call(self) -> RecordedCall:
        """Return the module call that runs in this thread, or one of no module."""
        stack = call_stack.current()
        entered = self._calls.entered
        while entered and entered[-1][0] > len(stack):
            entered.pop()  # its forward has raised
        phase = self._phase(bool(stack))
        if not stack:
            return self._call(self._first_model, "", 0, phase)
        site, number = stack[-1], 0
        if entered and entered[-1][1] is site:
            number = entered[-1][2]
        return self._call(site.model.name, site.name if site.names else "", number, phase)

    def _phase(self, is_in_module: bool) -> str:
        if torch_private.graph_task_id() != -1:
            return RECOMPUTE if is_in_module else BACKWARD
        if self.is_stepping:
            return UPDATE
        return "forward" if self._context is None else self._context.phase

    def _call(self, model: str, module: str, number: int, phase: str) -> RecordedCall:
        key = model, module, number, phase
        call = self._cached.get(key)
        if call is None:
            context = self._context
            if context is None:
                call = RecordedCall(model, module, 0, number, 0, phase, None)
            else:
                call = RecordedCall(
                    model, module, context.step, number, context.loop, phase, context.branch,
                    step_scope=context.active.scope,
                )  # fmt: skip
            self._cached[key] = call
        return call

    def update_of(self, model: Model) -> RecordedCall:
        """Return the place of what an optimizer has made of a model."""
        return self._call(model.name, "", 0, UPDATE)

    def in_phase(self, call: RecordedCall, phase: str) -> RecordedCall:
        """Return the same call in another phase."""
        return self._call(call.model, call.module, call.call, phase)

    def in_module(self, call: RecordedCall, module: str, model: str | None = None) -> RecordedCall:
        """Return the place of a parameter of a module, in the phase of a call."""
        return self._call(call.model if model is None else model, module, 0, call.phase)

    # -- names

    def forget_names(self) -> None:
        """Forget what tensors are called: their memory may hold others by now."""
        self._names.clear()
        self._named.clear()

    def _name_parameters(self, model: Model) -> None:
        if self._named.get(model) == len(model.sites):
            return
        self._named[model] = len(model.sites)
        for module_name, module in named_sites(model):
            for leaf, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        self._add_name(tensor, LeafName(leaf, name, model.name, module_name))

    def _add_name(self, tensor: torch.Tensor, name: LeafName) -> None:
        self._names.setdefault(_part_of(torch_private.local_part(tensor)), name)

    def name_of(self, tensor: torch.Tensor) -> LeafName:
        """Return what a tensor is called that no operation has made."""
        name = self._names.get(_part_of(tensor))
        if name is not None:
            return name
        for site in reversed(call_stack.current()):
            module = site.module()
            if module is not None and (attribute := _attribute_holding(module, tensor)):
                leaf = _leaf_of(module, attribute)
                return LeafName(leaf, attribute, site.model.name, site.name if site.names else "")
        return LeafName("attribute", "", "", None)


def named_sites(model: Model) -> list[tuple[str, nn.Module]]:
    """Return (canonical name, module) of each module of a model."""
    sites = [(site, site.module()) for site in list(model.sites.values())]
    return [
        (site.names[0][0], module) for site, module in sites if module is not None and site.names
    ]


def _part_of(tensor: torch.Tensor) -> _Part:
    """Return what tells a tensor from others that live: its memory, and which part it shows."""
    try:
        offset = int(tensor.storage_offset())
    except (RuntimeError, NotImplementedError):
        offset = 0
    return memory_of(tensor), offset, tuple(tensor.shape)


def _attribute_holding(module: nn.Module, tensor: torch.Tensor) -> str:
    """Return which attribute of a module the tensor is, by name; "" if it is none."""
    tables: Sequence[dict[str, Any]] = (module._parameters, module._buffers, module.__dict__)
    for table in tables:
        for name, value in table.items():
            if value is tensor:
                return name
    return ""


def _leaf_of(module: nn.Module, name: str) -> str:
    if name in module._parameters:
        return "parameter"
    return "buffer" if name in module._buffers else "attribute"
