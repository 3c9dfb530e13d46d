"""Collect the findings of all forwards: faults once each, and harmless differences once each."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from otel_torch.parity.align import Alignment
from otel_torch.parity.call_graph import ModuleCall, Role
from otel_torch.parity.diagnosis.diagnose import Diagnosis, Examination
from otel_torch.parity.explain import explain, state_before
from otel_torch.parity.fault_path import path_to
from otel_torch.parity.faults import Fault, Judgment, Location, kind_of
from otel_torch.parity.finding import (
    SHOWN_STATISTICS,
    Cause,
    ComparedPair,
    Finding,
    Kind,
    State,
)
from otel_torch.parity.forwards import ForwardRows
from otel_torch.parity.judge import errors_of
from otel_torch.parity.module_modes import ModuleModes, other_mode
from otel_torch.parity.outside_forward import other_inputs, update_finding
from otel_torch.parity.parameters import ParameterPair
from otel_torch.parity.retained_pairs import ComparedForward
from otel_torch.parity.sides import Sides
from otel_torch.parity.tensor_pair import TensorPair
from otel_torch.parity.tokens.first_token import describe_first_token
from otel_torch.parity.tokens.requests import MatchedToken
from otel_torch.parity.tolerance import Tolerance

# wrong forwards that are searched for further faults after the first wrong one; others are counted
MOST_SEARCHED = 32

# causes that say what one program did to an input that both were given
_OF_ONE_INPUT = ("rounded", "scaled", "negated", "shifted", "clamped", "number")
_HEALED = "the difference heals: everything computed from it is within its floor"


class Findings:
    """The findings so far, and the models whose wrong outputs may still be in use.

    Args:
        isolated: Whether the port ran from the reference's values, so that no fault is inherited.
        modes: The modes of the modules on both sides.

    Attributes:
        faults: In the order of their forwards.
        harmless: Differences that heal, or are of dtype alone.
        path: The pairs on the way to the first fault.
        tensors: The folders of both runs with the tensor of the first fault, None where not kept.
        suspects: Models whose wrong outputs may have entered the current forward.
        searched: Wrong forwards analysed after the first fault.
        unsearched: Wrong forwards that were not.
        tokens: By the reference's model, where forwards were aligned by tokens.
        unjudged: Weights of the port that differ, and that only wrong values are computed with.
    """

    def __init__(self, isolated: bool, modes: Sides[ModuleModes]) -> None:
        self.faults: list[Finding] = []
        self.harmless: list[Finding] = []
        self.path: list[ComparedPair] = []
        self.tensors: tuple[str | None, str | None] = (None, None)
        self.suspects: set[str] = set()
        self.searched = self.unsearched = 0
        self.tokens: dict[str, list[MatchedToken]] = {}
        self.unjudged: set[str] = set()
        self._isolated, self._modes = isolated, modes
        self._loops: Sides[int | None] | None = None
        self._is_first_forward = True
        self._reported_healed: set[object] = set()
        # models whose computed inputs came from other models
        self._fed: set[str] = set()

    def start_forward(self, reference: ForwardRows, port: ForwardRows) -> None:
        """Clear the suspects in a new loop, because no tensor of one video enters the next."""
        self._is_first_forward = self._loops is None
        loops = Sides(reference.loop, port.loop)
        if loops != self._loops:
            self._loops = loops
            self.suspects.clear()

    def count_analysis(self) -> None:
        """Count a full analysis after the first fault."""
        self.searched += bool(self.faults)

    def trace(self, model: str, diverged: bool) -> None:
        """Note whether a model's outputs are wrong.

        If a model that receives outputs of other models is right, those outputs were right, too.
        """
        if diverged:
            self.suspects.add(model)
        elif model in self._fed and model not in self.suspects:
            self.suspects.clear()

    def add(
        self, alignment: Alignment, judgment: Judgment, diagnosis: Diagnosis, takes_data: bool
    ) -> ComparedForward:
        """Add the findings of a full analysis; return its pairs for the report.

        Args:
            takes_data: Whether its inputs are data, as in training, and no results of steps before.
        """
        outermost = alignment.reference.outermost
        model = alignment.reference.calls[0].model
        if any(_is_computed(role) for call in outermost for role in call.inputs):
            self._fed.add(model)
        had_suspects = bool(self.suspects)
        self.trace(model, judgment.diverged)
        forward = _compared_forward(alignment, judgment)
        if not judgment.diverged:
            for pair in judgment.healed:
                self.add_healed(_finding(_fault_of(pair), _HEALED))
            return forward
        self.unjudged |= judgment.unjudged
        if not self.faults and judgment.faults:
            path = path_to(judgment.faults[0], alignment)
            self.path = [forward.make(alignment.pairs.index(pair), True) for pair in path]
        is_inherited = had_suspects and not self._isolated and not _begins_right(alignment)
        diagnosis.learn(alignment)
        for fault in judgment.faults:
            finding = replace(
                _finding(fault, self._explain(fault, alignment)),
                before=state_before(fault, alignment),
            )
            if is_inherited or self._is_listed(finding):
                continue
            cause = None
            if takes_data or (self._is_first_forward and _begins_run(alignment)):
                cause = other_inputs(alignment, fault)
            examination = diagnosis.examine(fault, alignment)
            made = examination.cause
            if cause is not None and (made is None or made.kind not in _OF_ONE_INPUT):
                self.faults.append(replace(finding, explanation=cause.sentence, cause=cause))
                continue
            examination = _with_mode(examination, other_mode(self._modes, fault))
            if not self.faults:
                self.tensors = examination.folders
            self.faults.append(_diagnosed(finding, examination))
        return forward

    def _explain(self, fault: Fault, alignment: Alignment) -> str:
        tokens = self.tokens.get(alignment.reference.calls[0].model, ())
        sentences = explain(fault, alignment), describe_first_token(fault, tokens)
        return " ".join(filter(None, sentences))

    def blame_update(self, alignment: Alignment, judgment: Judgment) -> Judgment:
        """Return the judgment of a forward after an update, which made what no other input did."""
        if not judgment.faults or other_inputs(alignment, judgment.faults[0]):
            return judgment
        if not self.faults:
            self.faults.append(update_finding(alignment, judgment.faults[0]))
        return Judgment(True, [], judgment.healed, judgment.wrong)

    def add_training(self, finding: Finding | None) -> None:
        """Add what first went wrong in training, if no forward before it is wrong."""
        if finding is not None and not self.faults:
            self.faults.append(finding)

    def _is_listed(self, finding: Finding) -> bool:
        """Return whether this module's fault is listed; inputs of a model count one by one."""
        key = _module_key(finding)
        is_model_input = finding.module == "" and finding.side == "input"
        return any(
            _module_key(listed) == key and (not is_model_input or listed.tensor == finding.tensor)
            for listed in self.faults
        )

    def add_healed(self, finding: Finding) -> None:
        """List a harmless difference, at its first step."""
        key = (
            *(finding.model, finding.module, finding.tensor),
            *(finding.port_model, finding.port_module, finding.port_tensor),
        )
        if key not in self._reported_healed:
            self._reported_healed.add(key)
            self.harmless.append(finding)

    def add_dtype(self, pair: ParameterPair, tolerance: Tolerance) -> None:
        """List an equal parameter whose dtype differs."""
        reference, port = pair.reference[0], pair.port[0]
        dtypes = {str(part.row.get("dtype")) for part in (*pair.reference, *pair.port)}
        if not pair.equal or len(dtypes) == 1:
            return
        text = (
            f"{reference.full_name or 'a parameter'} is {reference.row.get('dtype')} in the "
            f"reference and {port.row.get('dtype')} in the port"
        )
        limit = tolerance.of_parameters([*pair.reference, *pair.port])
        self.harmless.append(parameter_finding(pair, "dtype", limit, text))


def parameter_finding(pair: ParameterPair, kind: Kind, limit: float, explanation: str) -> Finding:
    """Return the finding of two parameters, whatever is computed with them."""
    reference, port = pair.reference[0], pair.port[0]
    return Finding(
        *(reference.model, reference.module, f"param.{reference.name}", 0, 0, 0, "attach"),
        *(port.model, port.module, f"param.{port.name}", 0, 0, 0),
        rank=None,
        side="parameter",
        port_side="parameter",
        kind=kind,
        error=pair.error,
        floor=limit,
        explanation=explanation,
    )


def healed_finding(pair: ComparedPair) -> Finding:
    """Return a compared pair as a harmless difference."""
    return replace(pair_finding(pair), explanation=_HEALED)


def pair_finding(pair: ComparedPair) -> Finding:
    """Return a compared pair as a finding without an explanation."""
    kind: Kind = "value"
    if pair.error is None:
        kind = "shape"
    elif math.isinf(pair.error):
        kind = "nonfinite"
    return Finding(
        *(pair.model, pair.module, pair.tensor, pair.loop, pair.step, pair.call, "forward"),
        *(pair.port_model, pair.port_module, pair.port_tensor),
        *(pair.port_loop, pair.port_step, pair.port_call),
        rank=None,
        side=pair.side,
        port_side=pair.port_side,
        kind=kind,
        error=pair.error,
        floor=pair.floor,
        explanation="",
    )


def _begins_run(alignment: Alignment) -> bool:
    """Return whether a forward is of the first step of either run; what enters later ones may have
    been made in a step that was not recorded.
    """
    calls = alignment.reference.calls[0], alignment.port.calls[0]
    return any(not call.loop and not call.step for call in calls)


def _is_computed(role: Role) -> bool:
    return not role.value.is_integer and role.value.numel > 1


def _module_key(finding: Finding) -> tuple[object, ...]:
    return finding.model, finding.module, finding.side, finding.port_module


def _begins_right(alignment: Alignment) -> bool:
    """Return whether all inputs of the outermost calls are right."""
    inputs = [pair for pair in alignment.pairs if pair.basis == "outermost" and not pair.is_output]
    return bool(inputs) and all(pair.is_right for pair in inputs)


def _fault_of(pair: TensorPair) -> Fault:
    locations = Location.of(pair.reference[0]), Location.of(pair.port[0])
    return Fault(kind_of(pair.relation), *locations, pair, pair.relation)


# -- as they are reported
# --------------------------------------------------------------------------------------------------


def _finding(fault: Fault, explanation: str) -> Finding:
    reference, port = _place(fault.reference), _place(fault.port)
    sides = [
        None if location is None else location.side for location in (fault.reference, fault.port)
    ]
    if fault.kind == "weights":
        weight = fault.weights[0]
        reference["tensor"] = f"param.{weight.reference[0].name}"
        port["tensor"] = f"param.{weight.port[0].name}"
    del port["phase"]
    return Finding(
        **reference,
        **{f"port_{name}": value for name, value in port.items()},
        rank=None,
        side="parameter" if fault.kind == "weights" else sides[0],
        port_side="parameter" if fault.kind == "weights" else sides[1],
        kind=fault.kind,
        error=None if fault.relation is None else fault.relation.error,
        floor=None if fault.relation is None else fault.relation.limit,
        explanation=explanation,
    )


def _with_mode(examination: Examination, mode: Cause | None) -> Examination:
    """Return an examination whose cause is another mode; a dropout that is seen stays the cause."""
    cause = examination.cause
    if mode is not None and cause is not None and cause.kind == "dropout":
        mode = replace(cause, text=f"{cause.text}; {mode.text}")
    return examination if mode is None else examination._replace(cause=mode)


def _diagnosed(finding: Finding, examination: Examination) -> Finding:
    """Return a finding with its cause, as far as it is known."""
    cause, breakdown, _ = examination
    sentences = ("" if cause is None else cause.sentence, finding.explanation)
    explanation = " ".join(filter(None, sentences))
    return replace(finding, explanation=explanation, cause=cause, breakdown=breakdown)


def _place(location: Location | None) -> dict[str, Any]:
    """Return the fields of a finding that name its place."""
    names = ("model", "module", "tensor", "loop", "step", "call", "phase")
    if location is None:
        return dict.fromkeys(names)
    call: ModuleCall | None = location.call
    tensor = None if location.role is None else location.role.tensor
    time = (None,) * 4 if call is None else (call.loop, call.step, call.number, call.phase)
    return dict(zip(names, (*location.module, tensor, *time), strict=True))


def _compared_forward(alignment: Alignment, judgment: Judgment) -> ComparedForward:
    pairs = alignment.pairs
    states: dict[int, State] = {id(pair): "healed" for pair in judgment.healed}
    states |= {id(pair): "inherited" for pair in judgment.wrong}
    introduced = (fault.pair for fault in judgment.faults if fault.pair is not None)
    states |= {id(pair): "introduced" for pair in introduced}

    def make(index: int, with_statistics: bool) -> ComparedPair:
        pair = pairs[index]
        state = states.get(id(pair), "right" if pair.is_right else "inherited")
        if state == "right" and pair.relation.state == "layout":
            state = "layout"
        return _compared_pair(pair, index, state, with_statistics)

    modules = [pair.reference[0].call.module_path for pair in pairs]
    limits = np.array([pair.relation.limit for pair in pairs])
    return ComparedForward(modules, errors_of(pairs), limits, judgment.diverged, make)


def _compared_pair(
    pair: TensorPair, depth: int, state: State, with_statistics: bool
) -> ComparedPair:
    first, second = pair.reference[0], pair.port[0]
    call, port_call = first.call, second.call
    return ComparedPair(
        model=call.model,
        module=call.module,
        tensor=_tensor_names(pair.reference),
        side=first.side,
        loop=call.loop,
        step=call.step,
        call=call.number,
        port_model=port_call.model,
        port_module=port_call.module,
        port_tensor=_tensor_names(pair.port),
        port_side=second.side,
        port_loop=port_call.loop,
        port_step=port_call.step,
        port_call=port_call.number,
        depth=depth,
        error=pair.relation.error,
        floor=pair.relation.limit,
        state=state,
        statistics=_shown_statistics(first) if with_statistics else {},
        port_statistics=_shown_statistics(second) if with_statistics else {},
    )


def _tensor_names(roles: list[Role]) -> str:
    return "+".join(role.tensor for role in roles)


def _shown_statistics(role: Role) -> dict[str, Any]:
    return {name: role.row[name] for name in SHOWN_STATISTICS if name in role.row}
