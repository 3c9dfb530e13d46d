"""Compares two recordings: parameters first, then one outermost forward after the other, in bounded memory."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from otel_torch.parity.align import Alignment, Expectation, align
from otel_torch.parity.episodes import Episode, iterate_episodes, read_parameters
from otel_torch.parity.explain import explain
from otel_torch.parity.finding import Comparison, Finding, Module, Report, Side
from otel_torch.parity.judge import Fault, Judgement, Spot, judge
from otel_torch.parity.modules import ModulePairs, Place, pair_modules, pair_within_containers
from otel_torch.parity.naming import names_by_loader
from otel_torch.parity.noise import coarseness, floors_of, types_by_place
from otel_torch.parity.parameters import ParameterPair, pair_parameters
from otel_torch.parity.program import Call, Parameter, Program, Role, build_program, module_table
from otel_torch.parity.recording import RecordingError, read_metadata
from otel_torch.parity.tolerance import Tolerance
from otel_torch.parity.values import Comparer

# how many episodes one side may have more (warm-up) before the other goes on
_LOOKAHEAD = 8

Problem = Callable[[str], None]


@dataclass(slots=True)
class Recorded:
    """One recording: what is known of it before its episodes are read."""

    path: Path
    meta: dict[str, Any]
    parameters: list[Parameter]
    modules: list[Place]
    uncalled: set[Place]  # in the table of modules, but never called
    types: dict[Place, set[str]]
    seen: set[Place] = field(default_factory=set)


def compare(
    reference: str | Path,
    port: str | Path,
    *,
    noise: str | Path | None = None,
    rtol: float | None = None,
    named: Callable[[Parameter], list[str]] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Compare two recordings. Raises RecordingError for what cannot be read.

    noise: the reference recorded again under OTEL_TORCH_NOISE. rtol: instead of the dtype's constant. named: what a map
    calls a reference's parameter in the port. progress: gets a short text now and then.
    """
    return _Comparison(Path(reference), Path(port), noise, rtol, named, progress).run()


class _Comparison:
    def __init__(
        self,
        reference: Path,
        port: Path,
        noise: str | Path | None,
        rtol: float | None,
        named: Callable[[Parameter], list[str]] | None,
        progress: Callable[[str], None],
    ) -> None:
        self.report = Report("match", reference=str(reference), port=str(port))
        self.tolerance = Tolerance(rtol)
        self.sides = [self._open(path) for path in (reference, port)]
        self.noise = iterate_episodes(noise) if noise is not None else iter(())
        self.named = named or names_by_loader(self.sides[1].meta)
        self.progress = progress
        self.pairs: list[ParameterPair] = []
        self.modules = ModulePairs()
        self.models: dict[str, str] = {}
        self.first_divergence: int | None = None
        self.findings: list[tuple[int, Finding]] = []
        self.healed: list[Finding] = []
        self.diverged_at: list[int] = []
        self.episodes = 0
        self.right_since: int = 0

    def _open(self, path: Path) -> Recorded:
        meta = read_metadata(path, self.report.warnings.append)
        try:
            parameters = read_parameters(path)
        except OSError as error:
            raise RecordingError(f"{path}: {error.strerror}") from None
        table = module_table(meta)
        modules = dict.fromkeys((line.model, line.module) for line in table)
        for one in parameters:
            modules.setdefault(one.place)
        uncalled = {(line.model, line.module) for line in table if not line.called}
        parameters.sort(key=lambda one: one.place in uncalled)  # of a tensor with two names, that of the module that runs
        return Recorded(path, meta, parameters, list(modules), uncalled, types_by_place(parameters))

    # -- the run -------------------------------------------------------------------------------------------------------

    def run(self) -> Report:
        reference, port = self.sides
        self.pairs = pair_parameters(reference.parameters, port.parameters, self.tolerance, self.named)
        streams = [self._episodes(side) for side in self.sides]
        first: list[Episode | None] = [next(stream, None) for stream in streams]
        self._complete_modules(first)
        self.modules = pair_modules(self.pairs, reference.modules, port.modules)
        if more := pair_within_containers(self.modules, self.pairs, reference.parameters, port.parameters):
            self.pairs += more
            self.modules = pair_modules(self.pairs, reference.modules, port.modules)
        self._pair_models()
        self._compare_parameters()
        for one, other in self._in_lockstep(first, streams):
            self._compare_episode(one, other)
        return self._finish()

    def _episodes(self, side: Recorded) -> Iterator[Episode]:
        for episode in iterate_episodes(side.path, self.report.warnings.append):
            side.seen.update((row.get("model") or "", row["module"]) for row in episode.rows)
            yield episode

    def _complete_modules(self, first: list[Episode | None]) -> None:
        """Without a table of modules, those of the first episode."""
        for side, episode in zip(self.sides, first, strict=True):
            known = set(side.modules)
            for row in episode.rows if episode is not None else ():
                place = row.get("model") or "", row["module"]
                if place not in known:
                    known.add(place)
                    side.modules.append(place)

    def _pair_models(self) -> None:
        votes: Counter[tuple[str, str]] = Counter((one[0], other[0]) for one, other in self.modules.one.items())
        for whole, parts in self.modules.parts.items():
            votes.update((part[0], whole[0]) for part in parts)
        for (one, other), _ in votes.most_common():
            if one not in self.models and other not in self.models.values():
                self.models[one] = other
        # models without parameters in common: by their names
        names = [dict.fromkeys(model for model, _ in side.modules) for side in self.sides]
        for one in names[0]:
            if one not in self.models and one in names[1] and one not in self.models.values():
                self.models[one] = one
        left = [[n for n in names[0] if n not in self.models], [n for n in names[1] if n not in self.models.values()]]
        if len(left[0]) == len(left[1]) == 1 and not self.models:
            self.models[left[0][0]] = left[1][0]
        for one, other in self.models.items():
            self.modules.one.setdefault((one, ""), (other, ""))
        self._pair_equal_names()

    def _pair_equal_names(self) -> None:
        """Modules of one name in paired models, where nothing surer is known of either."""
        taken = set(self.modules.one.values()) | set(self.modules.parts)
        there = set(self.sides[1].modules)
        owners = [{one.place for one in side.parameters} for side in self.sides]
        for model, module in self.sides[0].modules:
            one, other = (model, module), (self.models.get(model, ""), module)
            if one in self.modules.one or one in self.modules.wholes or other not in there or other in taken:
                continue
            if (one in owners[0]) == (other in owners[1]) and (not owners[0] or one in owners[0]):
                self.modules.one[one] = other
                taken.add(other)

    def _in_lockstep(self, first: list[Episode | None], streams: list[Iterator[Episode]]) -> Iterator[tuple[Episode, Episode]]:
        """Pairs of episodes of paired models, in order; one that has no partner is left out and said."""
        queues = [self._queue(one, stream) for one, stream in zip(first, streams, strict=True)]
        waiting: tuple[deque[Episode], deque[Episode]] = deque(), deque()
        models = self.models, {other: one for one, other in self.models.items()}
        left_out: list[Counter[str]] = [Counter(), Counter()]
        while True:
            for side in (0, 1):
                while len(waiting[side]) < _LOOKAHEAD and (episode := next(queues[side], None)) is not None:
                    if episode.model in models[side]:
                        waiting[side].append(episode)
                    else:
                        left_out[side][episode.model] += 1
            if not waiting[0] or not waiting[1]:
                break
            pair = self._next_pair(waiting)
            if pair is None:
                break
            for side, skipped in ((0, pair[2]), (1, pair[3])):
                left_out[side].update(episode.model for episode in skipped)
            yield pair[0], pair[1]
        for side in (0, 1):
            left_out[side].update(episode.model for episode in waiting[side])
            left_out[side].update(episode.model for episode in queues[side])
            for model, count in left_out[side].items():
                which = ("reference", "port")[side]
                self.report.warnings.append(
                    f"{count} forwards of {model} in the {which} have no counterpart and were not compared"
                )

    @staticmethod
    def _queue(first: Episode | None, stream: Iterator[Episode]) -> Iterator[Episode]:
        if first is not None:
            yield first
            yield from stream

    def _next_pair(
        self, waiting: tuple[deque[Episode], deque[Episode]]
    ) -> tuple[Episode, Episode, list[Episode], list[Episode]] | None:
        """The next two episodes of paired models, with those that were passed over: equal inputs before equal turns."""
        candidates = []
        for i, one in enumerate(waiting[0]):
            for j, other in enumerate(waiting[1]):
                if self.models[one.model] == other.model:
                    candidates.append((i + j, i, j))
        if not candidates:
            return None
        ordered = sorted(candidates)
        _, i, j = ordered[0]
        if len(waiting[0]) != len(waiting[1]) or i or j:
            alike = next((c for c in ordered if _inputs_meet(waiting[0][c[1]], waiting[1][c[2]])), None)
            if alike is not None:
                _, i, j = alike
        skipped = [waiting[0].popleft() for _ in range(i)], [waiting[1].popleft() for _ in range(j)]
        return waiting[0].popleft(), waiting[1].popleft(), *skipped

    # -- parameters ----------------------------------------------------------------------------------------------------

    def _compare_parameters(self) -> None:
        for pair in self.pairs:
            self.report.pairs += 1
            one, other = pair.reference[0], pair.port[0]
            types = {str(part.row.get("dtype")) for part in (*pair.reference, *pair.port)}
            if pair.equal and len(types) > 1:
                text = f"{one.full or 'a parameter'} is {one.row.get('dtype')} in the reference and {other.row.get('dtype')} in the port"
                self.healed.append(self._parameter_finding(pair, "dtype", text))

    def _parameter_finding(self, pair: ParameterPair, kind: Any, text: str) -> Finding:
        one, other = pair.reference[0], pair.port[0]
        limit = self.tolerance.of_parameters([*pair.reference, *pair.port])
        return Finding(
            one.model, one.module, f"param.{one.name}", 0, 0, 0, "attach",
            other.model, other.module, f"param.{other.name}", 0, 0, 0, None, "parameter", "parameter",
            kind, pair.error, limit, text,
        )  # fmt: skip

    # -- one episode ---------------------------------------------------------------------------------------------------

    def _compare_episode(self, one: Episode, other: Episode) -> None:
        programs = build_program(one.rows), build_program(other.rows)
        comparer = Comparer(self.tolerance)
        for program, side in zip(programs, self.sides, strict=True):
            comparer.coarse.update(coarseness(program, side.types, self.tolerance))
        noise = self._noise_of(one)
        if noise is not None:
            comparer.floors = floors_of(programs[0], build_program(noise.rows))
        alignment = align(*programs, self.modules, comparer)
        judgement = judge(alignment, self._never_called(programs))
        self.report.pairs += len(alignment.expectations)
        self._keep(alignment, judgement)
        self.episodes += 1
        self.progress(f"{self.episodes} forwards compared")

    def _noise_of(self, episode: Episode) -> Episode | None:
        """The same forward of the reference under noise: the same program, so in the same order."""
        for candidate in self.noise:
            if candidate.when == episode.when:
                return candidate
        return None

    def _never_called(self, programs: tuple[Program, Program]) -> list[tuple[Place, Place, int]]:
        """(reference's module, port's module, the side that never calls it), for modules that the other side calls here."""
        found = []
        called = [{call.place for call in program.calls} for program in programs]
        for one, other in self.modules.one.items():
            if one in called[0] and other in self.sides[1].uncalled:
                found.append((one, other, 1))
            if other in called[1] and one in self.sides[0].uncalled:
                found.append((one, other, 0))
        return found

    def _keep(self, alignment: Alignment, judgement: Judgement) -> None:
        states = self._states(judgement)
        for depth, one in enumerate(alignment.expectations):
            self.report.compared.append(_comparison(one, depth, states.get(id(one), "right")))
        if not judgement.diverged:
            for one in judgement.healed[:50]:
                self.healed.append(_finding(_fault_of(one), "the difference heals: all that comes of it is within its floor"))
            return
        self.diverged_at.append(self.episodes)
        for fault in judgement.faults:
            finding = _finding(fault, explain(fault, alignment))
            known = any(
                (f.module, f.side, f.port_module) == (finding.module, finding.side, finding.port_module) for _, f in self.findings
            )
            inherited = len(self.diverged_at) > 1 and not _inputs_right(alignment)
            if not known and not inherited:
                self.findings.append((self.episodes, finding))

    @staticmethod
    def _states(judgement: Judgement) -> dict[int, Any]:
        states: dict[int, Any] = {id(one): "healed" for one in judgement.healed}
        states |= {id(one): "inherited" for one in judgement.wrong}
        states |= {id(fault.expectation): "introduced" for fault in judgement.faults if fault.expectation is not None}
        return states

    # -- the end -------------------------------------------------------------------------------------------------------

    def _finish(self) -> Report:
        report = self.report
        report.introduced = [finding for _, finding in self.findings]
        report.harmless = self.healed
        self._list_unpaired()
        if report.introduced:
            report.verdict, report.first = "diverged", report.introduced[0]
        elif self.episodes == 0 or not report.compared:
            report.verdict, report.reason = "incomparable", self._why_incomparable()
        return report

    def _why_incomparable(self) -> str:
        if not self.models:
            mine, theirs = ({model for model, _ in side.modules} for side in self.sides)
            return (
                f"no parameter and no module corresponds: the reference has {', '.join(sorted(mine)) or 'none'}, "
                f"the port has {', '.join(sorted(theirs)) or 'none'}"
            )
        return "no forward of one side has a counterpart on the other"

    def _list_unpaired(self) -> None:
        fused = [set(), set()]  # type: list[set[Place]]
        for whole, parts in self.modules.parts.items():
            fused[1].add(whole)
            fused[0].update(parts)
        for whole, parts in self.modules.wholes.items():
            fused[0].add(whole)
            fused[1].update(parts)
        paired = set(self.modules.one) | fused[0], set(self.modules.one.values()) | fused[1]
        for name, side, known in zip(("reference", "port"), self.sides, paired, strict=True):
            places = [place for place in side.modules if place not in known and place in side.seen | side.uncalled]
            self.report.unpaired[name] = [Module(model, module, "") for model, module in places]


def _inputs_meet(one: Episode, other: Episode) -> bool:
    """Whether the first call of both takes an equal tensor."""
    mine = {row.get("sketch") or row.get("sum") for row in one.rows[:8] if row["tensor"].startswith("in")} - {None}
    theirs = {row.get("sketch") or row.get("sum") for row in other.rows[:8] if row["tensor"].startswith("in")} - {None}
    return bool(mine & theirs)


def _inputs_right(alignment: Alignment) -> bool:
    inputs = [one for one in alignment.expectations if one.ground == "outermost" and one.reference[0].side == "input"]
    return all(one.right for one in inputs)


def _fault_of(one: Expectation) -> Fault:
    spots = [Spot(role.call.place, role.side, role, role.call) for role in (one.reference[0], one.port[0])]
    kind = {"order": "layout", "shape": "shape", "nonfinite": "nonfinite"}.get(one.relation.state, "value")
    return Fault(kind, spots[0], spots[1], one, one.relation)


def _place(spot: Spot | None) -> tuple[Any, ...]:
    """model, module, tensor, loop, step, call, phase of a spot."""
    if spot is None:
        return (None,) * 7
    call: Call | None = spot.call
    tensor = None if spot.role is None else spot.role.tensor
    if call is None:
        return (*spot.module, tensor, None, None, None, None)
    return (*spot.module, tensor, call.loop, call.step, call.number, call.phase)


def _finding(fault: Fault, text: str) -> Finding:
    one, other = _place(fault.reference), _place(fault.port)
    error, limit = (None, None) if fault.relation is None else (fault.relation.error, fault.relation.limit)
    sides: list[Side | None] = [None if spot is None else spot.side for spot in (fault.reference, fault.port)]
    if fault.kind == "weights":
        sides = ["parameter", "parameter"]
        pair = fault.weights[0]
        one = (*one[:2], f"param.{pair.reference[0].name}", *one[3:])
        other = (*other[:2], f"param.{pair.port[0].name}", *other[3:])
    names = ("model", "module", "tensor", "loop", "step", "call", "phase")
    places = dict(zip(names, one, strict=True)) | {f"port_{name}": part for name, part in zip(names[:6], other, strict=False)}
    return Finding(
        **places, rank=None, side=sides[0], port_side=sides[1], kind=fault.kind, error=error, floor=limit, explanation=text
    )


def _comparison(one: Expectation, depth: int, state: Any) -> Comparison:
    first, second = one.reference[0], one.port[0]
    if state == "right" and one.relation.state == "layout":
        state = "layout"
    return Comparison(
        first.call.model, first.call.module, _tensors(one.reference), first.side,
        first.call.loop, first.call.step, first.call.number,
        second.call.model, second.call.module, _tensors(one.port), second.side,
        second.call.loop, second.call.step, second.call.number,
        depth, one.relation.error, one.relation.limit, state, _statistics(first), _statistics(second),
    )  # fmt: skip


def _tensors(roles: list[Role]) -> str:
    return "+".join(role.tensor for role in roles)


_SHOWN = ("abs_mean", "mean", "std", "min", "max", "sum", "l2", "rms", "nonfinite", "shape", "dtype")


def _statistics(role: Role) -> dict[str, Any]:
    return {name: role.row[name] for name in _SHOWN if name in role.row}
