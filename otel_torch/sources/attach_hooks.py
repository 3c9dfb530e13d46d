"""The order in which the sources put their hooks on a module.

Hooks nest: what is attached first runs outermost. Isolation replaces inputs after the observers saw
them and outputs after the observers saw those, so its two hooks surround theirs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_torch.session import Session
from otel_torch.sources.events import RunEvents

if TYPE_CHECKING:  # most runs need only some of these
    from otel_torch.sources.interventions.isolation import Isolation
    from otel_torch.sources.interventions.noise import Jitter
    from otel_torch.sources.interventions.upcast import Upcast
    from otel_torch.sources.models.inventory import Inventory
    from otel_torch.sources.models.model import Model, ModuleSite
    from otel_torch.sources.nonfinite.watch import NonFiniteWatch
    from otel_torch.sources.tensors.activations import Activations
    from otel_torch.sources.tensors.operations import Operations


class HookAttacher:
    """Attaches the hooks of all sources to the modules that a session finds."""

    def __init__(
        self,
        session: Session,
        events: RunEvents,
        activations: Activations,
        inventory: Inventory,
        *,
        isolation: Isolation | None,
        jitter: Jitter | None,
        upcast: Upcast | None,
        operations: Operations | None,
        nonfinite_watch: NonFiniteWatch | None,
    ) -> None:
        self._session = session
        self._activations = activations
        self._inventory = inventory
        self._isolation = isolation
        self._jitter = jitter
        self._upcast = upcast
        self._operations = operations
        self._nonfinite_watch = nonfinite_watch
        events.modules_found.append(self.attach)

    def attach(self, model: Model, sites: list[ModuleSite]) -> None:
        """Attach every hook that the new `sites` of a model need."""
        settings = self._session.settings
        # A rank that neither writes nor exports gets no hook.
        is_recorded = settings.activations and any(
            sink.has_destination for sink in self._session.recorder.sinks
        )
        selected = self._activations.selection.sites(model, sites) if is_recorded else []
        if self._isolation is not None:
            self._isolation.attach_around(model, selected)
        if is_recorded:
            self._activations.attach(model, sites)
            if "parity" in settings.capture:
                self._inventory.add(model, sites, self._activations.is_observed)
        if self._isolation is not None:
            self._isolation.attach_within(model, selected)
        if self._jitter is not None and settings.activations:
            # On every rank, recorded or not, or the ranks would diverge.
            self._jitter.attach(model, sites)
        if self._upcast is not None and settings.activations:
            self._upcast.attach(model, sites)
        if self._operations is not None:
            self._operations.attach(model, selected)
        if self._nonfinite_watch is not None and selected:
            self._nonfinite_watch.attach(model, sites)
