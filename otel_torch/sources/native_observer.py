"""Observes ordinary calls without Python; `observer.c` says how, and which calls it leaves to us.

`on_inputs` and `on_output` of `Activations` are the specification: what the compiled functions do
is what those would have done. Both count calls in the same dicts, enter them on the same stack and
add to the same queue, so that each call may be observed by either.
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

# so many positional arguments, and items of a tuple, have labels; Python observes calls with more
_MAX_VALUES = 8
_PLAIN_TYPES = (type(None), bool, int, float, str)

# address of the model's `ForwardState`, site, its names, the recorder's queue, what is measured,
# whether inputs are observed
Place = tuple[int, ModuleSite, list[tuple[str, int]], list[Any], int, bool]
Observe = Callable[..., bool | None]


class NativeObserver:
    """The compiled observer of a session.

    Each function returns True if it has observed the call, and None if it has done nothing. Where
    Python must observe everything, they always return None.

    enter: takes a place, args and kwargs of a call that is about to run, if inputs are recorded.
    leave: takes a place and the output of a call that has run.
    """

    enter: Observe
    leave: Observe

    def __init__(self, session: Session, columns: tuple[str, ...]) -> None:
        """Make the observer. `columns`: those of a row that the statistics need."""
        self.enter = self.leave = _leave_to_python
        self.place_of: Callable[[ModuleSite], Place | None] = lambda site: None
        kernel, wanted = cpu_kernel.load(), flags_for(columns)
        functions = None if kernel is None else kernel.objects
        if functions is None or wanted is None or not _suffices_for(session.settings):
            return
        queue, inputs = session.recorder.pending, "inputs" in session.settings.capture
        self.enter, self.leave = functions.enter, functions.leave
        keyword_labels: dict[str, tuple[str, ...]] = {}

        @torch_private.keep_out_of_frames
        def make_keyword_labels(key: str) -> tuple[str, ...]:
            labels = keyword_labels[key] = _labels_of(f"in.{key}")
            return labels

        functions.set_objects(
            ModuleSite,
            tuple,
            torch_private.graph_task_id,
            "_version",
            True,
            _PLAIN_TYPES,
            _labels_of("out"),
            tuple(_labels_of(f"in[{index}]") for index in range(_MAX_VALUES)),
            keyword_labels,
            make_keyword_labels,
        )
        self.place_of = lambda site: (
            site.model.forward_state.address, site, site.names, queue, wanted, inputs
        )  # fmt: skip


def _labels_of(value: str) -> tuple[str, ...]:
    """Return the label of a value, and those of its items if it is a tuple."""
    return value, *(f"{value}[{index}]" for index in range(_MAX_VALUES))


def _leave_to_python(*arguments: Any) -> None:
    """Observe nothing."""


def _suffices_for(settings: Settings) -> bool:
    """Return whether the settings ask for nothing that only Python observes."""
    is_plain = settings.tensors is None and settings.isolate is None and settings.operations is None
    captured = set(settings.capture)
    return (
        is_plain
        and settings.on_nonfinite != "zoom"
        and captured in ({"outputs"}, {"inputs", "outputs"})
    )
