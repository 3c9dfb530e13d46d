"""The answer of a bisection: data for people and programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from otel_torch.bisecting.runs import ProgramRun
from otel_torch.parity.finding import CodeLine, Finding, ListedOperation, Report, to_json
from otel_torch.parity.report.next_steps import next_steps

Operations = tuple[Sequence[ListedOperation], Sequence[ListedOperation]]

SCHEMA = "otel_torch.bisect/1"


@dataclass(slots=True)
class Bisection:
    """The faults of a port, and the runs that it took to find them.

    Attributes:
        report: Of the two programs as they are, with the faults as its findings.
        operations: Of each fault's region in the reference and in the port, by index in `faults`.
        unproven: Why a fault was not tried, or not proven, by its index in `faults`.
        runs: All runs, in order.
        seconds: How long the search took, with the comparisons; without runs that were taken over.
        is_healed: Whether the port matches once all faults are healed.
        after: Of the reference beside the port with all that was healed; None if nothing was.
        ended_early: What ended the search before its end; None if nothing did.
    """

    report: Report
    operations: list[Operations] = field(default_factory=list)
    unproven: dict[int, str] = field(default_factory=dict)
    runs: list[ProgramRun] = field(default_factory=list)
    seconds: float = 0.0
    is_healed: bool = False
    after: Report | None = None
    ended_early: str | None = None

    @property
    def faults(self) -> list[Finding]:
        """In the order in which they were found, each with its proof."""
        return self.report.introduced

    @property
    def verdict(self) -> str:
        """`match`, `diverged`, `partial` or `incomparable`, as `otel-torch diff` has it."""
        return self.report.verdict

    @property
    def begins_proven(self) -> bool:
        """Whether there are faults, and the first one is proven."""
        return bool(self.faults) and self.faults[0].proof == "proven"

    def proven_lines(self, index: int) -> list[CodeLine]:
        """Return the port's lines between right values and the exchange that healed a fault."""
        if self.faults[index].proof != "proven":
            return []
        lines = {operation.line for operation in self.operations[index][1]}
        return sorted(filter(None, lines), key=lambda line: (line.file, line.line))

    def has_place_of(self, finding: Finding) -> bool:
        """Return whether a fault of the same line is among the faults; weights have no line."""
        if finding.kind == "weights":
            return False
        if finding.port_line is not None:
            return any(finding.port_line == fault.port_line for fault in self.faults)
        return any(finding.line == fault.line for fault in self.faults)

    def withdraw(self, fault: Finding) -> None:
        """Take a fault out of the answer."""
        index = self.faults.index(fault)
        del self.faults[index], self.operations[index]
        reasons = {number: why for number, why in self.unproven.items() if number != index}
        self.unproven = {number - (number > index): why for number, why in reasons.items()}
        self.report.operations = next(iter(self.operations), ((), ()))

    def withdraw_proofs(self, reason: str) -> None:
        """Note why what seemed proven is not."""
        for index, fault in enumerate(self.faults):
            if fault.proof == "proven":
                self.faults[index] = replace(fault, proof="not proven")
                self.unproven[index] = reason

    def __repr__(self) -> str:
        from otel_torch.bisecting.text import render_bisection

        return render_bisection(self, color=False)

    def as_json(self) -> dict[str, Any]:
        """Return the object that `otel-torch bisect --json` prints."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "reason": self.report.reason,
            "healed": self.is_healed,
            "ended_early": self.ended_early,
            "faults": [to_json(finding) for finding in self.faults],
            "proven_lines": {
                str(index): to_json(self.proven_lines(index)) for index in range(len(self.faults))
            },
            "unproven": {str(index): reason for index, reason in self.unproven.items()},
            "warnings": list(self.report.warnings),
            "before": [*to_json(self.report.environment), *to_json(self.report.setup)],
            "environment": to_json(self.report.environment),
            "runs": [run.as_json() for run in self.runs],
            "seconds": round(self.seconds, 2),
            "next": [step.as_json() for step in next_steps(self.report)],
        }
