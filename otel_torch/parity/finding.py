"""The result of a comparison as plain data, the input of every report and of `--json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from otel_torch.parity.before_the_run import SetupDifference
from otel_torch.parity.environment import EnvironmentDifference
from otel_torch.parity.rankings import GoldenComparison, LowerPrecision
from otel_torch.records import json_safe
from otel_torch.rendering.next_step import NextStep

SCHEMA = "otel_torch.diff/1"

Side = Literal["input", "output", "parameter"]
Kind = Literal["value", "layout", "nonfinite", "shape", "dtype", "weights", "missing"]
Verdict = Literal["match", "diverged", "incomparable", "partial"]
# What enters a module, or comes before an input: all of it matches, what was compared of it does,
# some of it differs, none was compared.
Before = Literal["right", "partly", "wrong", "unknown"]
Proof = Literal["proven", "not proven"]
# The outcome of a compared pair. The first four are within their floor, or harmless.
State = Literal["right", "layout", "dtype", "healed", "inherited", "introduced"]
# The statistics that a report shows of a tensor.
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


# the cause of a finding at an input of a program that no recorded code made
OTHER_INPUTS = "other_inputs"


@dataclass(frozen=True, slots=True)
class UncomparedTensor:
    """A module, and possibly a tensor of it, that only one side has or whose match is ambiguous."""

    model: str
    module: str
    tensor: str


@dataclass(frozen=True, slots=True)
class Cause:
    """What a fault is, beside where it is.

    Attributes:
        kind: A word of `CAUSES` in `parity/diagnosis`, such as `bias_absent`.
        certain: Whether the numbers leave no other explanation; otherwise it is a guess.
        text: The clause of a sentence, such as `blocks.0.fc.bias is all zeros in the port`.
    """

    kind: str
    certain: bool
    text: str

    @property
    def sentence(self) -> str:
        """The text as a sentence; a guess is called one."""
        text = self.text if self.certain else f"probably, {self.text}"
        return f"{text[:1].upper()}{text[1:]}."


@dataclass(frozen=True, slots=True)
class CodeLine:
    """A line of a program: its file, number from 1, function, and text when it ran."""

    file: str
    line: int
    function: str
    text: str

    @property
    def place(self) -> str:
        """The line as editors open it.

        >>> CodeLine("model.py", 7, "forward", "return x").place
        'model.py:7'
        """
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Region:
    """The first and the last line of what each program computes otherwise; None without any."""

    reference: tuple[CodeLine, CodeLine] | None
    port: tuple[CodeLine, CodeLine] | None


@dataclass(frozen=True, slots=True)
class ListedOperation:
    """An operation of a region, such as `%7 = sub(%5, 8)`, its line, and whether it is right."""

    text: str
    line: CodeLine | None
    is_right: bool


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference, in the names of both programs; None where a program has no such place.

    Attributes:
        side: `input` if the tensor was already wrong when it entered `module` and everything
            recorded before it matches: the fault is in the code that feeds the module.
        error: Relative L2, no unit; None if it is not defined, infinite with NaN or Inf values.
        floor: The error up to which the two tensors match, likewise.
        loop, step, call: As in the recordings.
        rank: The rank with the finding; None for recordings of one process.
        explanation: Two or three sentences for people: the cause, if known, and why here.
        cause: What the fault is, None where the recordings do not show it.
        breakdown: Where in the tensor the difference is, a line each; empty without whole tensors.
        before: What is known of the inputs of the module, or of the tensors before this input.
        line, port_line: The line that computes it, where operations were recorded; of a backward
            pass the line of the forward.
        callers, port_callers: The lines that called the function of that line, the nearest first.
        set_by, port_set_by: The lines that have set in Python, without an operation, what the line
            reads; of the reference where both programs run the same operation, and it reads
            something else. Before these, the lines that have made weights which the region reads
            and the reference has otherwise.
        region: From where to where each program computes something else.
        proof: `proven` if everything after the place matches once it has the reference's value,
            `not proven` if not, or if that says little; None where it was not tried.
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
    cause: Cause | None = None
    breakdown: tuple[str, ...] = ()
    before: Before = "right"
    line: CodeLine | None = None
    port_line: CodeLine | None = None
    region: Region | None = None
    proof: Proof | None = None
    callers: tuple[CodeLine, ...] = ()
    port_callers: tuple[CodeLine, ...] = ()
    set_by: tuple[CodeLine, ...] = ()
    port_set_by: tuple[CodeLine, ...] = ()

    @property
    def has_line(self) -> bool:
        """Whether a line of code is known, of either program."""
        return self.line is not None or self.port_line is not None


@dataclass(slots=True)
class ComparedPair:
    """Two tensors that should be equal, and how they compare. Curves, heat maps and trees are
    drawn from these.

    Attributes:
        model, module, tensor, loop, step, call: The place in the reference; `port_*` in the port.
        depth: Index in the reference's execution order within the step, from 0.
        error, floor: As in `Finding`.
        statistics, port_statistics: The `SHOWN_STATISTICS` as recorded.
        port_rank: Of the port's tensor, where several ranks stand beside one process.
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
    port_rank: int | None = None


@dataclass(slots=True)
class LogProbabilities:
    """How the log-probabilities differ that two programs gave the tokens which followed.

    Attributes:
        tokens: How many were compared.
        unknown: How many were not, because the token is none of the likeliest of a program.
        largest: The largest difference, in nats, and of which token.
        index: Of the token before it, among those that were matched.
        reference: Its log-probability in the reference, natural logarithm.
        port: Likewise.
        module: The module of the reference that adds most to the error of that token, if known.
        port_module: Likewise.
    """

    tokens: int = 0
    unknown: int = 0
    largest: float = 0.0
    index: int | None = None
    request: int | None = None
    position: int | None = None
    reference: float | None = None
    port: float | None = None
    module: str | None = None
    port_module: str | None = None


@dataclass(slots=True)
class Report:
    """The result of a comparison.

    Attributes:
        verdict: `partial` if nothing that was compared differs, and `uncompared` is not empty.
        reason: Why the recordings cannot be compared, or what was not, if so.
        pairs: How many pairs of tensors were compared.
        first: The finding that explains the divergence, if any.
        introduced: All independent findings, `first` included.
        harmless: Differences of dtype or layout alone, and those that healed downstream.
        unpaired: `reference` and `port` -> the modules that only this side has.
        ambiguous: Modules with several equally good matches.
        warnings: One line each.
        uncompared: What a side computed and was not compared, the warnings of it: what is missing
            of a recording that was cut, and forwards and tokens without a counterpart.
        environment: What differs between the environments of the two runs.
        setup: What differs in how the models are set up, where operations were recorded.
        compared: The pairs in the reference's order. For a long recording, those of its first steps
            and of every step with a difference.
        compared_left_out: How many pairs are missing from `compared`.
        chain: The pairs on the path from the inputs to the first finding.
        models: The reference's model and the port's, if only these were compared.
        by_tokens: Whether the programs batch their tokens differently, so that rows were compared.
        weaker: Whether statistics alone decided, because there were no sketches.
        tensors: Where the reference's run and the port's kept the whole tensor of the first
            finding; None where they did not.
        imported: Whether the reference and the port are dumps that were imported.
        selections: The settings by which the two runs selected what they recorded.
        isolated: Whether the port ran from the reference's values (OTEL_TORCH_ISOLATE).
        lower_precision: What each module adds to the error of a program in lower precision, if one
            of the two is.
        golden: Which program is nearer to the golden recording, if one was given.
        log_probabilities: How those of the tokens differ, where rows are tokens.
        operations: Those of the first finding's region in the reference and in the port.
        by_operations: Whether operations were compared, and not modules.
        following: The next steps, if whoever made the recordings knows better than they tell.
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
    uncompared: list[str] = field(default_factory=list)
    environment: list[EnvironmentDifference] = field(default_factory=list)
    setup: list[SetupDifference] = field(default_factory=list)
    compared: list[ComparedPair] = field(default_factory=list)
    compared_left_out: int = 0
    chain: list[ComparedPair] = field(default_factory=list)
    reference: str = ""
    port: str = ""
    models: tuple[str, str] | None = None
    by_tokens: bool = False
    weaker: bool = False
    tensors: tuple[str | None, str | None] = (None, None)
    imported: tuple[bool, bool] = (False, False)
    selections: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
    isolated: bool = False
    golden: GoldenComparison | None = None
    lower_precision: LowerPrecision | None = None
    log_probabilities: LogProbabilities | None = None
    operations: tuple[Sequence[ListedOperation], Sequence[ListedOperation]] = ((), ())
    by_operations: bool = False
    following: Sequence[NextStep] | None = None

    def __repr__(self) -> str:
        from otel_torch.parity.report.notebook import describe_report

        return "\n".join(describe_report(self))

    def _repr_html_(self) -> str:
        from otel_torch.parity.report.notebook import report_html

        return report_html(self)

    def is_imported(self, name: str) -> bool:
        """Return whether the recording of a program, `reference` or `port`, was imported."""
        return self.imported[0 if name == "reference" else 1]

    def leave_out(self, warning: str) -> None:
        """Add a warning of something that a side computed and that was not compared."""
        self.warnings.append(warning)
        self.uncompared.append(warning)

    def judge_whole(self) -> None:
        """Call a match partial if not everything was compared."""
        if self.verdict in ("match", "partial") and self.uncompared:
            self.verdict, self.reason = "partial", "; ".join(self.uncompared)

    @property
    def schema(self) -> str:
        """Name and version of the JSON object."""
        return SCHEMA

    def as_json(self, everything: bool = False) -> dict[str, Any]:
        """Return the object that `otel-torch diff --json` prints.

        Args:
            everything: Whether to add the compared pairs.
        """
        from otel_torch.parity.report.next_steps import next_steps

        content: dict[str, Any] = {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "reason": self.reason,
            "pairs": self.pairs,
            "first": to_json(self.first),
            "introduced": to_json(self.introduced),
            "harmless": to_json(self.harmless),
            "unpaired": to_json(self.unpaired),
            "ambiguous": to_json(self.ambiguous),
            "warnings": list(self.warnings),
            "environment": to_json(self.environment),
            "next": [step.as_json() for step in next_steps(self)],
        }
        if self.golden is not None:
            content["golden"] = to_json(self.golden)
        if self.lower_precision is not None:
            content["lower_precision"] = to_json(self.lower_precision)
        if self.log_probabilities is not None:
            content["log_probabilities"] = to_json(self.log_probabilities)
        if everything:
            content["compared"] = to_json(self.compared)
            content["compared_left_out"] = self.compared_left_out
        return content


def to_json(value: Any) -> Any:
    """Return dataclasses as dicts, and NaN and Inf as strings, which strict JSON can hold."""
    if isinstance(value, dict):
        return {name: to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: to_json(getattr(value, name)) for name in value.__dataclass_fields__}
    return json_safe(value)
