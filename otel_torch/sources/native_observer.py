"""Observes ordinary calls without Python; `observer.c` says how, and which calls it leaves to us.

`Activations.on_output` is the specification: whatever the compiled function does, that would have
done. Both count calls in the same dicts and add to the same queue, so that they may alternate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otel_torch import torch_private
from otel_torch.session import Session
from otel_torch.settings import Settings
from otel_torch.sources.models import ModuleSite
from otel_torch.statistics import cpu_kernel
from otel_torch.statistics.measure import flags_for

# the items of a tuple that have labels of their own; a longer one is left to Python
_MAX_TENSORS = 8
_LABELS = ("out", *(f"out[{index}]" for index in range(_MAX_TENSORS)))

# address of the model's `ForwardState`, site, its names, the recorder's queue, what is measured
Place = tuple[int, ModuleSite, list[tuple[str, int]], list[Any], int]


class NativeObserver:
    """The compiled observer of a session.

    observe: takes a place and an output. Returns True if it has observed the call, and None if it
    has done nothing. place_of: what it needs to know about a site.
    """

    def __init__(self, session: Session, columns: tuple[str, ...]) -> None:
        """Make the observer; where Python must observe everything, one that does nothing.

        Args:
            columns: the columns of a row that the statistics need.
        """
        kernel, wanted = cpu_kernel.load(), flags_for(columns)
        functions = None if kernel is None else kernel.objects
        self.observe: Callable[[Place | None, Any], bool | None] = _leave_to_python
        self.place_of: Callable[[ModuleSite], Place | None] = lambda site: None
        if functions is None or wanted is None or not _suffices_for(session.settings):
            return
        queue = session.recorder.pending
        self.observe = functions.make_observe(
            ModuleSite, tuple, torch_private.graph_task_id, _LABELS, True
        )
        self.place_of = lambda site: (
            site.model.forward_state.address, site, site.names, queue, wanted
        )  # fmt: skip


def _leave_to_python(place: Place | None, output: Any) -> None:
    """Observe nothing."""


def _suffices_for(settings: Settings) -> bool:
    """Return whether the settings ask for nothing that only Python observes."""
    is_plain = settings.tensors is None and settings.isolate is None and settings.operations is None
    return is_plain and settings.on_nonfinite != "zoom" and set(settings.capture) == {"outputs"}
