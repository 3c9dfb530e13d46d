"""Observes ordinary calls without Python; `observer.c` says how, and which calls it leaves to us.

`on_inputs` and `on_output` of `Activations` are the specification: what the compiled functions do
is what those would have done. Both count calls in the same dicts, enter them on the same stack and
add to the same queue, so that each call may be observed by either.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from otel_torch import torch_private
from otel_torch.session import Session
from otel_torch.settings import INCLUDED_CAPTURES, Settings
from otel_torch.sources.models.model import ModuleSite
from otel_torch.sources.tensors.module_signature import ModuleSignature, signature_of
from otel_torch.sources.tensors.tensor_reader import TensorReader
from otel_torch.statistics import cpu_kernel
from otel_torch.statistics.measure import flags_for

# so many positional arguments, and items of a tuple, have labels; Python observes calls with more
_MAX_VALUES = 8
_PLAIN_TYPES = (type(None), bool, int, float, str)

# settings of OTEL_TORCH_CAPTURE, with what they include
_CAPTURES = ({"outputs"}, {"inputs", "outputs"}, {"parity", *INCLUDED_CAPTURES["parity"]})

Observe = Callable[..., bool | None]


class ModulePlace(NamedTuple):
    """Where a module's calls are observed; `observer.c` reads these fields (native_layout.py).

    forward: address of the model's `ForwardState`. queue: the recorder's pending rows. wanted: what
    is measured. inputs: whether they are observed. The last three are only for parity.
    """

    forward: int
    site: ModuleSite
    names: list[tuple[str, int]]
    queue: list[Any]
    wanted: int
    inputs: bool
    module: weakref.ref[nn.Module]
    module_class: type | None
    signature: ModuleSignature | None


class NativeObserver:
    """The compiled observer of a session.

    Each function returns True if it has observed the call, and None if it has done nothing. Where
    Python must observe everything, they always return None.

    enter: takes a place, args and kwargs of a call that is about to run, if inputs are recorded.
    leave: takes a place and the output of a call that has run.
    """

    enter: Observe
    leave: Observe

    def __init__(
        self,
        session: Session,
        columns: tuple[str, ...],
        reader: TensorReader,
        next_index: Callable[[], int],
    ) -> None:
        """Make the observer.

        Args:
            columns: those of a row that the statistics need.
            next_index: the clock of calls.
        """
        self.enter = self.leave = _leave_to_python
        self.place_of: Callable[[ModuleSite], ModulePlace | None] = lambda site: None
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
            site_type=ModuleSite,
            tuple_type=tuple,
            bytes_type=bytes,
            graph_task=torch_private.graph_task_id,
            handled=True,
            plain_types=_PLAIN_TYPES,
            output_labels=_labels_of("out"),
            argument_labels=tuple(_labels_of(f"in[{index}]") for index in range(_MAX_VALUES)),
            keyword_labels=keyword_labels,
            make_keyword_labels=make_keyword_labels,
            identify=torch_private.keep_out_of_frames(reader.identities.of),
            next_index=next_index,
            measurement_name="measurement",
            is_counted_name="counts_changes",
        )

        def place_of(site: ModuleSite) -> ModulePlace:
            module = site.module() if reader.parity else None
            return ModulePlace(
                site.model.forward_state.address,
                site,
                site.names,
                queue,
                wanted,
                inputs,
                site.module,
                None if module is None else type(module),
                None if module is None else signature_of(module),
            )

        self.place_of = place_of


def _labels_of(value: str) -> tuple[str, ...]:
    """Return the label of a value, and those of its items if it is a tuple."""
    return value, *(f"{value}[{index}]" for index in range(_MAX_VALUES))


def _leave_to_python(*arguments: Any) -> None:
    """Observe nothing."""


def _suffices_for(settings: Settings) -> bool:
    """Return whether the settings ask for nothing that only Python observes."""
    is_plain = settings.tensors is None and settings.isolate is None and settings.operations is None
    return is_plain and settings.on_nonfinite != "zoom" and set(settings.capture) in _CAPTURES
