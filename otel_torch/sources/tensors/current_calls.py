"""The current calls of recorded modules: in each thread, and in compiled graphs.

Calls are kept on a stack only if inputs are recorded. Otherwise a call is not known before it ends.
"""

from __future__ import annotations

import itertools

from otel_torch import torch_private
from otel_torch.sources.models.model import Model, ModuleSite
from otel_torch.sources.models.selection import ModuleSelection
from otel_torch.sources.modules import call_stack
from otel_torch.sources.modules.call_stack import EnteredCall
from otel_torch.sources.modules.module_names import class_name
from otel_torch.sources.steps.calls import StepCalls
from otel_torch.sources.steps.forwards import ForwardContext
from otel_torch.sources.tensors.tensor_reader import RecordedCall


class CurrentCalls:
    """Names and numbers calls, and keeps those that have not ended."""

    def __init__(self, selection: ModuleSelection, inputs: bool, parity: bool) -> None:
        self._selection, self._inputs, self._parity = selection, inputs, parity
        # by model and module: the call that a compiled graph is in
        self._compiled: dict[tuple[str, str], RecordedCall] = {}
        self.clock = itertools.count()  # of entries and exits

    def make(
        self,
        site: ModuleSite,
        number: int | None = None,
        name: str | None = None,
        context: ForwardContext | None = None,
    ) -> RecordedCall | None:
        """Return a call of a site, or None if the step is not recorded.

        Args:
            number: of a call that has been counted; by default this is a new call.
            name: of the module; by default that within the running container.
            context: the forward that it is a part of; by default the model's newest.
        """
        model = site.model
        context = model.forward_context if context is None else context
        if context is None:
            return None
        phase, counts = _phase_and_counts(model, context)
        name = site.name if name is None else name
        if number is None:
            number = model.calls.count(counts, name)
        if not context.recording:
            return None
        # a module is hooked if one of its models and names is selected
        is_recorded = (len(site.names) == 1 and type(site) is ModuleSite) or (
            self._selection.has_model(model.name) and self._selection.has_module(name)
        )
        return RecordedCall(
            model.name,
            name,
            context.step,
            number,
            context.loop,
            phase,
            context.branch,
            is_recorded,
            step_scope=context.active.scope,
        )

    def enter(self, site: ModuleSite, call: RecordedCall) -> None:
        """Put a call on this thread's stack."""
        entered, depth = call_stack.thread_state.entered, len(call_stack.current())
        while entered and entered[-1][1] >= depth:
            entered.pop()  # its forward raised
        if self._parity:
            call.entry_index, call.class_name = next(self.clock), _class_of(site)
            # may belong to another model: a pipeline's text encoder can be called inside a forward
            call.parent_index = _innermost_index()
        times = [call.entry_index, None, call.parent_index] if self._parity else None
        entered.append(EnteredCall(site, depth, call, None, times, ()))

    def leave(self, site: ModuleSite) -> RecordedCall | None:
        """Take the site's call off this thread's stack."""
        entered = call_stack.thread_state.entered
        for index in reversed(range(len(entered))):
            if entered[index][0] is site:
                innermost = EnteredCall(*entered[index])
                call = self._call_of(innermost)
                del entered[index:]  # the calls above it raised
                if innermost.times is not None and call is not None:
                    call.exit_index = innermost.times[1] = next(self.clock)
                return call
        return self.make(site)  # the hook was attached during the call

    def _call_of(self, entered: EnteredCall) -> RecordedCall | None:
        """Return an entered call; one that only has a number has unknown inputs."""
        call = entered.call
        if not isinstance(call, int):
            return call
        made = self.make(entered.site, call, context=entered.context)
        if made is not None:
            made.inputs = None
            if entered.times is not None:
                made.entry_index, made.exit_index, made.parent_index = entered.times
                made.class_name = _class_of(entered.site)
        return made

    def current(self, site: ModuleSite) -> RecordedCall | None:
        """Return the call of a site that this thread is in, or None if it is not recorded."""
        call: RecordedCall | None
        if self._inputs:
            entered = call_stack.thread_state.entered
            if not entered or entered[-1][0] is not site:
                return None
            call = self._call_of(EnteredCall(*entered[-1]))
            return call if call is not None and call.is_recorded else None
        context = site.model.forward_context
        if context is None:
            return None
        # the observer counts the call when it ends
        number = _phase_and_counts(site.model, context)[1].next_number(site.name)
        call = self.make(site, number)
        return call if call is not None and call.is_recorded else None

    def enter_compiled(self, site: ModuleSite) -> RecordedCall | None:
        """Return a new call of a site in a compiled graph."""
        return self._make_compiled(site, None)

    def leave_compiled(self, site: ModuleSite) -> RecordedCall | None:
        """Return the call of a site in a compiled graph, which ends now."""
        call = self._compiled.get((site.model.name, self._compiled_name(site)))
        if call is None:
            return self._make_compiled(site, self._latest_number(site))
        if self._parity:
            call.exit_index = next(self.clock)
        return call

    def _make_compiled(self, site: ModuleSite, number: int | None) -> RecordedCall | None:
        name = self._compiled_name(site)
        key, call = (site.model.name, name), self.make(site, number, name)
        if call is None:
            self._compiled.pop(key, None)
            return None
        if self._inputs:
            self._compiled[key] = call
        if self._parity:
            call.class_name, call.entry_index = _class_of(site), next(self.clock)
            call.parent_index = self._compiled_parent_index(call)
        return call

    def _compiled_name(self, site: ModuleSite) -> str:
        """Return the name of a site: for a shared module, that within the container that runs."""
        if self._parity and len(site.names) > 1:
            for name, _ in site.names:
                container = self._compiled.get((site.model.name, name.rpartition(".")[0]))
                if container is not None and container.exit_index is None:
                    return name
        return site.name

    def _compiled_parent_index(self, call: RecordedCall) -> int | None:
        """Return the entry index of the enclosing call, found by name.

        A compiler may reorder the calls in a graph.
        """
        name = call.module
        while name:
            name = name.rpartition(".")[0]
            parent = self._compiled.get((call.model, name))
            if parent is not None and parent.exit_index is None:
                return parent.entry_index
        return _innermost_index()

    @staticmethod
    def _latest_number(site: ModuleSite) -> int:
        context = site.model.forward_context
        if context is None:
            return 0
        return _phase_and_counts(site.model, context)[1].next_number(site.name) - 1


def _innermost_index() -> int | None:
    """Return the entry index of the call that this thread is in, in a parity recording."""
    entered = call_stack.thread_state.entered
    times = EnteredCall(*entered[-1]).times if entered else None
    return None if times is None else times[0]


def _phase_and_counts(model: Model, context: ForwardContext) -> tuple[str, StepCalls]:
    """Return the phase of a call made now, and the counts of calls in it."""
    if torch_private.graph_task_id() == -1:
        return context.phase, context.calls
    return "recompute", model.calls.of("recompute", context.loop, context.step)


def _class_of(site: ModuleSite) -> str:
    module = site.module()
    return "" if module is None else class_name(module)
