"""What a comparison says: plain data that every way of showing it is made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from otel_torch.records import spell

SCHEMA = "otel_torch.diff/1"

Side = Literal["input", "output", "parameter"]
Kind = Literal["value", "layout", "nonfinite", "shape", "dtype", "weights", "missing"]
Verdict = Literal["match", "diverged", "incomparable"]
# what became of a compared pair of tensors; the first four are within their floors or harmless
State = Literal["right", "layout", "dtype", "healed", "inherited", "introduced"]
# what a person is shown of a tensor
SHOWN_STATISTICS = (
    "abs_mean",
    "mean",
    "std",
    "min",
    "max",
    "sum",
    "l2",
    "rms",
    "nonfinite",
    "shape",
    "dtype",
)


@dataclass(frozen=True, slots=True)
class UncomparedTensor:
    """A place without a time: what only one side has, or what could not be told apart."""

    model: str
    module: str
    tensor: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference, at its place in each program's own names; a field is None where that program
    has no such place.

    side: `input` means that the tensor entered `module` already wrong though every recorded module
    before it was right, so that the fault is in the code in front of it. error, floor: relative L2
    (no unit), None where there is none, infinite where a value is not finite. step, call, loop: as
    in the recordings. rank: None where there is one. explanation: one sentence for a person.
    """

    model: str | None
    module: str | None
    tensor: str | None
    loop: int | None
    step: int | None
    call: int | None
    phase: str | None
    port_model: str | None
    port_module: str | None
    port_tensor: str | None
    port_loop: int | None
    port_step: int | None
    port_call: int | None
    rank: int | None
    side: Side | None
    port_side: Side | None
    kind: Kind
    error: float | None
    floor: float | None
    explanation: str


@dataclass(slots=True)
class ComparedPair:
    """One pair of tensors that should be equal, and how they compared: what curves, maps and trees
    are drawn from.

    model, module, tensor, loop, step, call: the reference's place; port_*: the port's. depth: the
    pair's number in the reference's order within its step, from 0. error, floor: as in `Finding`.
    statistics, port_statistics: what the two recordings say of the tensor (`SHOWN_STATISTICS`, as
    recorded).
    """

    model: str
    module: str
    tensor: str
    side: Side
    loop: int | None
    step: int | None
    call: int | None
    port_model: str
    port_module: str
    port_tensor: str
    port_side: Side
    port_loop: int | None
    port_step: int | None
    port_call: int | None
    depth: int
    error: float | None
    floor: float
    state: State
    statistics: dict[str, Any] = field(default_factory=dict)
    port_statistics: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Report:
    """The result of a comparison.

    pairs: how many pairs of tensors were compared. first: the finding that explains the divergence,
    None where there is none. introduced: all independent findings, `first` among them. harmless:
    differences that healed, of dtype or of layout alone. unpaired: modules that only one side has.
    compared: the pairs themselves, in the reference's order (of a long recording those of its first
    steps and of every step with a difference; `compared_left_out` counts the rest). chain: the
    pairs on the way from the inputs to the first finding.
    """

    verdict: Verdict
    reason: str | None = None
    pairs: int = 0
    first: Finding | None = None
    introduced: list[Finding] = field(default_factory=list)
    harmless: list[Finding] = field(default_factory=list)
    unpaired: dict[str, list[UncomparedTensor]] = field(
        default_factory=lambda: {"reference": [], "port": []}
    )
    ambiguous: list[UncomparedTensor] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    compared: list[ComparedPair] = field(default_factory=list)
    compared_left_out: int = 0
    chain: list[ComparedPair] = field(default_factory=list)
    reference: str = ""
    port: str = ""
    weaker: bool = False  # no sketches: statistics decided
    isolated: bool = False  # the port ran from the reference's values

    @property
    def schema(self) -> str:
        """The name and version of the JSON object."""
        return SCHEMA

    def as_json(self, everything: bool = False) -> dict[str, Any]:
        """The object that `otel-torch diff --json` prints; `everything` adds the compared pairs."""
        found: dict[str, Any] = {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "reason": self.reason,
            "pairs": self.pairs,
            "first": None if self.first is None else _plain(self.first),
            "introduced": [_plain(one) for one in self.introduced],
            "harmless": [_plain(one) for one in self.harmless],
            "unpaired": {
                side: [_plain(one) for one in modules] for side, modules in self.unpaired.items()
            },
            "ambiguous": [_plain(one) for one in self.ambiguous],
            "warnings": list(self.warnings),
        }
        if everything:
            found["compared"] = [_plain(one) for one in self.compared]
            found["compared_left_out"] = self.compared_left_out
        return found


def _plain(value: Any) -> Any:
    """Data classes as dicts, and non-finite numbers as strings: what strict JSON can carry."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return spell(value)
