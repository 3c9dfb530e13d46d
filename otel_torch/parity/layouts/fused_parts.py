"""Accept fused tensors that are cut part by part, so that the ranks' parts are in another order.

    one process   q0 q1 k0 k1 v0 v1
    two ranks     q0 k0 v0 | q1 k1 v1

They are compared without their order, by statistics.
"""

from __future__ import annotations

from collections.abc import Sequence

from otel_torch.parity.call_graph import enclosing_names
from otel_torch.parity.layouts.judged_places import JudgedPlace
from otel_torch.parity.layouts.mesh_layout import recognize_on_mesh
from otel_torch.parity.parameter_names import pattern
from otel_torch.records import FORWARD_PHASES

_PARAMETERS = ("param.", "param_grad.")


class FusedParts:
    """The modules whose tensors are cut part by part.

    Args:
        count: The number of all ranks.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        # model, module in any block, parameter
        self._parameters: set[tuple[str, str, str]] = set()

    def accept(self, judged: Sequence[JudgedPlace]) -> None:
        """Accept parts in another order inside modules whose outputs are right.

        A parameter stays cut as it is: what an optimizer makes of it may be off by rounding, so
        that its numbers no longer show it.
        """
        accepted = _modules_with_right_outputs(judged)
        for entry in judged:
            model, module, tensor = entry.key.tensor_name
            reference, layout = entry.reference, entry.layout
            if reference is None or layout is None or layout.kind != "parts":
                continue
            name = model, pattern(module), tensor.partition(".")[2]
            is_parameter = tensor.startswith(_PARAMETERS)
            is_known = is_parameter and layout.is_wrong and name in self._parameters
            # also in blocks that are wrong: the same module is cut alike in all
            if is_known or (name[:2] in accepted and entry.has_parts_in_other_order):
                entry.rows, entry.layout = recognize_on_mesh(reference, entry.rows, self._count)
                if is_parameter:
                    self._parameters.add(name)


def _modules_with_right_outputs(judged: Sequence[JudgedPlace]) -> set[tuple[str, str]]:
    """Return (model, module in any block) of parts in another order that do no harm."""
    outputs: dict[tuple[str, str], bool] = {}
    for entry in judged:
        key, module = entry.key, entry.key.module_path
        is_output = key.phase in FORWARD_PHASES and key.tensor.startswith("out")
        if is_output and entry.layout is not None:
            outputs[module] = outputs.get(module, True) and not entry.is_wrong
    accepted = set()
    for entry in judged:
        if entry.has_parts_in_other_order:
            model, name = entry.key.module_path
            around = (outputs.get((model, outer)) for outer in enclosing_names(name))
            if next((is_right for is_right in around if is_right is not None), False):
                accepted.add((model, pattern(name)))
    return accepted
