"""Track which tensors were compared, to warn about those that were not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from otel_torch.parity.align import Alignment
from otel_torch.parity.finding import UncomparedTensor
from otel_torch.parity.loaded_recording import LoadedRecording
from otel_torch.parity.modules import ModulePairs, ModulePath
from otel_torch.parity.pair_forwards import ModelStep
from otel_torch.parity.pair_roles import MOST_SEARCHED_ROLES
from otel_torch.parity.sides import Sides

_SIDES = Sides("reference", "port")


class Coverage:
    """The models, modules and outputs compared so far.

    Attributes:
        compared: Modules of which a tensor was compared.
        uncalled: Calls without a counterpart, of modules that have one.
        has_inputs: Whether inputs were compared.
        outputs: Compared outputs; equal inputs alone are no match.
        has_sketches: Whether both sides of some forward have sketches.
        forwards: Compared forwards.
        crowded: Modules with so many tensors in a call that these were paired by name alone.
    """

    def __init__(self) -> None:
        self.compared: Sides[set[ModulePath]] = Sides(set(), set())
        self.uncalled: Sides[Counter[ModulePath]] = Sides(Counter(), Counter())
        self.has_inputs = False
        self.outputs = 0
        self.has_sketches = False
        self.forwards = 0
        self.crowded: dict[ModulePath, None] = {}

    def add(self, alignment: Alignment) -> None:
        """Add the pairs of a full analysis."""
        for call in alignment.reference.calls:
            if max(len(call.inputs), len(call.outputs)) > MOST_SEARCHED_ROLES:
                self.crowded.setdefault(call.module_path)
        for pair in alignment.pairs:
            self.compared.reference.update(role.call.module_path for role in pair.reference)
            self.compared.port.update(role.call.module_path for role in pair.port)
            self.outputs += pair.is_output
            self.has_inputs = self.has_inputs or not pair.is_output
        self.add_uncalled(
            alignment.uncalled.map(lambda calls: [call.module_path for call in calls])
        )
        programs = alignment.reference, alignment.port
        self.has_sketches = self.has_sketches or all(
            any(value.sketch is not None for value in program.values) for program in programs
        )

    def add_uncalled(self, modules: Sides[list[ModulePath]]) -> None:
        """Count calls without a counterpart."""
        for counts, uncalled in zip(self.uncalled, modules, strict=True):
            counts.update(uncalled)

    def uncalled_warnings(self) -> Iterator[str]:
        """Yield a warning for each side that made calls without a counterpart."""
        for side, calls in zip(_SIDES, self.uncalled, strict=True):
            if calls:
                (model, module), count = calls.most_common(1)[0]
                more = f" and {len(calls) - 1} more modules" if len(calls) > 1 else ""
                yield (
                    "calls without a counterpart, of modules that have one: "
                    f"{count} of {module or model} in the {side}{more}"
                )

    def crowded_warnings(self) -> Iterator[str]:
        """Yield a warning if tensors were paired by name alone."""
        if self.crowded:
            model, module = next(iter(self.crowded))
            more = f" and {len(self.crowded) - 1} more modules" if len(self.crowded) > 1 else ""
            yield (
                f"{module or model}{more}: a call has over {MOST_SEARCHED_ROLES} inputs or "
                "outputs; they were paired by name and order alone"
            )

    def unpaired_modules(
        self, modules: ModulePairs, recordings: Sides[LoadedRecording]
    ) -> dict[str, list[UncomparedTensor]]:
        """Return the recorded modules of each side without a compared tensor."""
        unpaired: dict[str, list[UncomparedTensor]] = {}
        for side, recording, matched, compared in zip(
            _SIDES, recordings, modules.paired, self.compared, strict=True
        ):
            recorded = {
                (kind.model, kind.module)
                for kind in recording.kinds.kinds
                if kind.phase not in recording.skipped_phases
            } | recording.uncalled
            unpaired[side] = [
                UncomparedTensor(*module, "")
                for module in recording.modules
                if module in recorded and module not in matched and module not in compared
            ]
        return unpaired


def unpaired_forward_warnings(
    unpaired: Sides[Counter[ModelStep]],
    compared: Sides[frozenset[str]],
    same_batch: Sides[set[tuple[int, int]]],
) -> Iterator[tuple[str, bool]]:
    """Yield a warning for each model that has forwards without a counterpart, and whether it should
    have none.

    Args:
        compared: The models of which all forwards should have one.
        same_batch: The steps (loop and step) whose gradients say the same of all their forwards.
    """
    for side, steps, models, known in zip(_SIDES, unpaired, compared, same_batch, strict=True):
        counts: Counter[str] = Counter()
        for (model, *_), number in steps.items():
            counts[model] += number
        for model, count in counts.items():
            is_left_out = model in models and any(
                (loop, step) not in known for name, loop, step in steps if name == model
            )
            forwards, has, was = (
                ("forward", "has", "was") if count == 1 else ("forwards", "have", "were")
            )
            warning = (
                f"{count} {forwards} of {model or 'a model'} in the {side} {has} no counterpart "
                f"and {was} not compared"
            )
            yield warning, is_left_out
