"""What is said of the first NaN or Inf of a run: which step, who produced it, what led there."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from otel_torch.records import Record

# the producer of a NaN in a forward of which no module was recorded
UNRECORDED = "unrecorded"


@dataclass(frozen=True, slots=True)
class Origin:
    """The first NaN or Inf of a run.

    Args:
        kind: `NaN`, `Inf` or `-Inf`, the worst that the tensor has.
        producer: who produced it: `module` (in its forward), `glue` (code between modules),
            `input` (the data), `weights`, `loss`, `backward`, `update` (an optimizer), or
            `UNRECORDED`.
        model, module, tensor: where; `module` is the one that produced it, or whose code did.
        text: who produced it, in words.
        details: what led there, in words.
        operation: which operations made it, in words, if its forward was replayed.
    """

    kind: str
    producer: str
    model: str
    module: str
    tensor: str
    loop: int
    step: int
    call: int
    phase: str
    text: str
    details: tuple[str, ...] = ()
    operation: str | None = None

    def line(self) -> str:
        step = f"step {self.step}" + (f" of loop {self.loop}" if self.loop else "")
        phase = "" if self.phase in ("forward", "train") else f" ({self.phase})"
        parts = [f"first {self.kind}: {step}{phase}, {self.text}", *self.details]
        if self.operation is not None:
            parts.append(f"replayed: {self.operation}")
        return "; ".join(parts)

    def describe(self) -> dict[str, Any]:
        """Return what the metadata of a recording has under `nonfinite`."""
        return asdict(self) | {"line": self.line()}


def place(record: Record) -> dict[str, Any]:
    """Return the fields of a origin that say where a record is."""
    names = ("model", "module", "tensor", "loop", "step", "call", "phase")
    return {name: getattr(record, name) for name in names}


def named(model: str, module: str) -> str:
    """Return the name of a module of a model.

    >>> named("Net", "layers.1"), named("Net", "")
    ("'layers.1' of Net", 'Net')
    """
    return f"{module!r} of {model}" if module else model


def number(value: float) -> str:
    """Return a magnitude.

    >>> number(65504.0), number(1.5e-9)
    ('65504', '1.5e-09')
    """
    return f"{value:.6g}" if abs(value) >= 1000 else f"{value:.3g}"
