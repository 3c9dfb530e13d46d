"""Modules ranked by error, as plain data: beside a golden recording, and in lower precision."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Nearer = Literal["reference", "port", "neither"]


@dataclass(frozen=True, slots=True)
class ModuleErrors:
    """How far an output of a module is from the golden recording in either program.

    Attributes:
        model, module, tensor: The place in the reference; `port_*` in the port.
        error, port_error: The largest over all calls, relative L2.
        nearer: Which of the two is nearer.
    """

    model: str
    module: str
    tensor: str
    port_model: str
    port_module: str
    port_tensor: str
    error: float
    port_error: float
    nearer: Nearer


@dataclass(frozen=True, slots=True)
class GoldenComparison:
    """Two programs beside a golden recording.

    Attributes:
        recording: Path of the golden recording.
        end: The last output of a whole model, or the last output there is.
        modules: Those of which the port is furthest beyond the reference first.
    """

    recording: str
    end: ModuleErrors
    modules: list[ModuleErrors] = field(default_factory=list)

    def count(self, nearer: Nearer) -> int:
        """Return of how many modules this program is nearer."""
        return sum(module.nearer == nearer for module in self.modules)


@dataclass(frozen=True, slots=True)
class AddedError:
    """The error of a module, relative L2: of its inputs, of its outputs, and what it adds."""

    model: str
    module: str
    port_model: str
    port_module: str
    input_error: float
    output_error: float
    added: float


@dataclass(frozen=True, slots=True)
class LowerPrecision:
    """A program that computes in lower precision than the other.

    Attributes:
        side: Which of the two.
        dtype: The coarsest type of its tensors, without `torch.`; `quantized` if only the user
            knows it.
        end: The error of the last output of the whole model, None if it was not compared.
        measured: Whether each module ran from right inputs (OTEL_TORCH_ISOLATE). Otherwise what a
            module adds is an estimate: the part of its output's error that is not in its inputs.
        modules: Those that add most first.
    """

    side: str
    dtype: str
    end: float | None
    measured: bool
    modules: list[AddedError] = field(default_factory=list)
