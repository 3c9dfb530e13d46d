"""Compares two recordings: parameters first, then one outermost forward after the other, in bounded
memory.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from otel_torch.parity.align import Alignment, TensorPair, align
from otel_torch.parity.cached_comparison import CachedJudgment, CheckedPairs, PairPlan
from otel_torch.parity.call_graph import (
    ModuleCall,
    Parameter,
    Program,
    Role,
    build_program,
    read_module_table,
)
from otel_torch.parity.correspondence import Correspondence
from otel_torch.parity.explain import explain
from otel_torch.parity.fault_path import chain_to
from otel_torch.parity.finding import (
    SHOWN_STATISTICS,
    ComparedPair,
    Finding,
    Kind,
    Report,
    Side,
    UncomparedTensor,
)
from otel_torch.parity.forwards import PASSED_OVER, ForwardRows, iterate_forwards, read_parameters
from otel_torch.parity.judge import Fault, Judgment, Location, judge, kind_of, location_of
from otel_torch.parity.judge_isolated import is_isolated, judge_isolated, not_put_right
from otel_torch.parity.map_file import Map
from otel_torch.parity.map_writer import save_map as write_map
from otel_torch.parity.modules import ModulePairs, ModulePath, pair_modules, pair_within_containers
from otel_torch.parity.naming import names_by_loader, plain_name
from otel_torch.parity.noise import coarseness, dtypes_by_module, floors_of
from otel_torch.parity.pair_forwards import ForwardPairer
from otel_torch.parity.pairing_finder import PairingFinder
from otel_torch.parity.parameters import ParameterPair, pair_parameters
from otel_torch.parity.plan_cache import CacheLookup, PlanCache
from otel_torch.parity.ranks import compare_ranks
from otel_torch.parity.resolve_map import resolve_map
from otel_torch.parity.retained_pairs import ComparedForward, RetainedPairs
from otel_torch.parity.row_batches import RowKinds, RowRecord
from otel_torch.parity.tolerance import Tolerance
from otel_torch.parity.values import Comparer
from otel_torch.recording.metadata import RECORDING_SCHEMA, describe_early_end, read_metadata
from otel_torch.recording.reader import RecordingError

# wrong episodes that are analysed in full after the first, for faults of their own; those beyond
# are counted
_MOST_ANALYSED = 32
# forwards of the noise that are passed over to find one of the reference
_NOISE_AHEAD = 16

# the share of parameters, by elements, that two models must have in common to be one model
_UNRELATED = 0.1


@dataclass(slots=True)
class LoadedRecording:
    """One recording: what is known of it before its episodes are read."""

    path: Path
    meta: dict[str, Any]
    parameters: list[Parameter]
    modules: list[ModulePath]
    uncalled: set[ModulePath]  # in the table of modules, but never called
    types: dict[ModulePath, set[str]]
    kinds: RowKinds = field(default_factory=RowKinds)
    repeated: bool = False  # rows of one place come again within a step, without a call


def compare(
    reference: str | Path,
    port: str | Path,
    *,
    noise: str | Path | None = None,
    rtol: float | None = None,
    map: Map | None = None,
    save_map: str | Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
    thorough: bool = False,
    pairing: PairingFinder | None = None,
) -> Report:
    """Compare two recordings, or two folders of all ranks' recordings. Raises RecordingError for
    what cannot be read, MapError for a map that does not fit them.

    noise: the reference recorded again under OTEL_TORCH_NOISE. rtol: instead of the dtype's
    constant. map: what corresponds, whatever is found. save_map: where to write what was found.
    progress: gets a short text now and then. thorough: analyse every forward in full, though it is
    like one that was analysed; slower, and for the same result. pairing: learns what belongs where,
    for a run of the port from the reference's values.
    """

    def compare_two(one: Path, other: Path, again: Path | None) -> Report:
        return _Comparison(
            one, other, again, rtol, map, save_map, progress, thorough, pairing
        ).run()

    again = None if noise is None else Path(noise)
    if any(path is not None and Path(path).is_dir() for path in (reference, port, noise)):
        return compare_ranks(Path(reference), Path(port), again, compare_two)
    return compare_two(Path(reference), Path(port), again)


class _Comparison:
    def __init__(
        self,
        reference: Path,
        port: Path,
        noise: str | Path | None,
        rtol: float | None,
        map: Map | None,
        save_map: str | Path | None,
        progress: Callable[[str], None],
        thorough: bool,
        pairing: PairingFinder | None = None,
    ) -> None:
        self.report = Report("match", reference=str(reference), port=str(port))
        self.tolerance = Tolerance(rtol)
        self.sides = [self._open(path) for path in (reference, port)]
        paths = [Path(path) for path in (reference, port, noise) if path is not None]
        self._read = _Progress(paths, progress)
        self.noise = iter(()) if noise is None else self._open_noise(Path(noise))
        self.noise_ahead: deque[ForwardRows] = deque()
        self.without_noise = 0
        self.pairing = pairing
        self.isolated = self.report.isolated = is_isolated(self.sides[1].meta)
        self.stayed = not_put_right(self.sides[1].meta)
        # plans know how a run ends, and an isolated one has no end that says anything
        self.steady = PlanCache(
            [side.parameters for side in self.sides], off=thorough or self.isolated
        )
        self.kept = RetainedPairs()
        self.analysed_late = self.unanalysed = 0
        self.uncalled: tuple[Counter[ModulePath], Counter[ModulePath]] = Counter(), Counter()
        self.said_healed: set[Any] = set()
        self.sketched = False
        self.met: tuple[set[ModulePath], set[ModulePath]] = (
            set(),
            set(),
        )  # modules of which something was compared
        self.saw_inputs = False
        self.results = 0  # compared pairs of what modules return: equal inputs alone are no match
        self.map = map
        self.save_map = save_map
        self.said: Correspondence | None = None
        self.pairs: list[ParameterPair] = []
        self.modules = ModulePairs()
        self.models: dict[str, str] = {}
        self.findings: list[Finding] = []
        self.healed: list[Finding] = []
        self.suspects: set[str] = (
            set()
        )  # models whose wrong outputs may have gone into what comes now
        self.loops: tuple[int | None, int | None] | None = None
        self.fed: set[str] = set()  # models that are given more than indices: what others made
        self.episodes = 0

    def _open(self, path: Path) -> LoadedRecording:
        meta = read_metadata(path, self.report.warnings.append)
        schema = meta.get("schema", RECORDING_SCHEMA)
        if schema != RECORDING_SCHEMA:
            raise RecordingError(
                f"{path}: is of {schema!r}; this version reads {RECORDING_SCHEMA}, so compare with the one that recorded it"
            )
        self.report.warnings += describe_early_end(path, meta)
        try:
            parameters = read_parameters(path, meta)
        except OSError as error:
            raise RecordingError(f"{path}: {error.strerror}") from None
        table = read_module_table(meta)
        modules = dict.fromkeys((line.model, line.module) for line in table)
        for one in parameters:
            modules.setdefault(one.module_path)
        uncalled = {(line.model, line.module) for line in table if not line.called}
        parameters.sort(
            key=lambda one: one.module_path in uncalled
        )  # of a tensor with two names, that of the module that runs
        return LoadedRecording(
            path, meta, parameters, list(modules), uncalled, dtypes_by_module(parameters)
        )

    # -- the run
    # ----------------------------------------------------------------------------------------------

    def run(self) -> Report:
        reference, port = self.sides
        streams = [self._episodes(side) for side in self.sides]
        first: list[ForwardRows | None] = [next(stream, None) for stream in streams]
        self._complete_modules(first)
        free = self._pair_parameters()
        self.modules = pair_modules(self.pairs, reference.modules, port.modules)
        if more := pair_within_containers(self.modules, self.pairs, *free):
            self.pairs += more
            self.modules = pair_modules(self.pairs, reference.modules, port.modules)
        if self.said is not None:
            self.modules = self.said.apply(self.modules)
        self._pair_models()
        if self.said is not None:  # equal names are no reason against a map
            self.modules = self.said.apply(self.modules)
        self._compare_parameters()
        if self._look_unrelated():
            self.report.verdict, self.report.reason = (
                "incomparable",
                self._why_incomparable(unrelated=True),
            )
            return self.report
        for one, other in self._in_lockstep(first, streams):
            self._compare_episode(one, other)
        return self._finish()

    def _open_noise(self, path: Path) -> Iterator[ForwardRows]:
        """The forwards under noise, if they are the reference's."""
        meta = read_metadata(path, self.report.warnings.append)
        self.report.warnings += describe_early_end(path, meta)
        table, *others = (
            {(line.model, line.module) for line in read_module_table(one)}
            for one in (meta, *(s.meta for s in self.sides))
        )
        if table and others[0] and others[1] and len(table & others[0]) < len(table & others[1]):
            raise RecordingError(
                f"{path}: is a recording of the port ({self.sides[1].path}); --noise takes the reference, recorded again"
            )
        return iterate_forwards(path, self.sides[0].kinds, self.report.warnings.append, self._read)

    def _pair_parameters(self) -> list[list[Parameter]]:
        """What the map says, then what numbers and names do; what the map keeps apart takes no
        part. The parameters that do.
        """
        reference, port = self.sides
        said = self.said = None if self.map is None else resolve_map(self.map, reference, port)
        loader = names_by_loader(port.meta)
        if said is None:
            self.pairs = pair_parameters(
                reference.parameters, port.parameters, self.tolerance, loader
            )
            return [reference.parameters, port.parameters]
        self.report.warnings += said.warnings
        free = [
            [one for one in reference.parameters if not said.forbids(0, one.module_path)],
            [one for one in port.parameters if not said.forbids(1, one.module_path)],
        ]
        self.pairs = pair_parameters(
            free[0], free[1], self.tolerance, loader, said.parameters,
            lambda one: said.reorders(one.module_path, f"param.{one.name}"),
        )  # fmt: skip
        return free

    def _episodes(self, side: LoadedRecording) -> Iterator[ForwardRows]:
        cut = 0
        for episode in iterate_forwards(
            side.path, side.kinds, self.report.warnings.append, self._read
        ):
            cut += episode.cut
            side.repeated = side.repeated or episode.repeated
            yield episode
        if cut:
            self.report.warnings.append(
                f"{side.path}: a stretch of many rows without an end was cut in {cut + 1} to be compared"
            )

    def _complete_modules(self, first: list[ForwardRows | None]) -> None:
        """Without a table of modules, those of the first episode."""
        for side, episode in zip(self.sides, first, strict=True):
            known = set(side.modules)
            for kind in side.kinds.known if episode is not None else ():
                place = kind.model, kind.module
                if place not in known:
                    known.add(place)
                    side.modules.append(place)

    def _pair_models(self) -> None:
        if self.said is not None:
            self.models.update(self.said.models)
        votes: Counter[tuple[str, str]] = Counter(
            (one[0], other[0]) for one, other in self.modules.matched.items()
        )
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
        left = [
            [n for n in names[0] if n not in self.models],
            [n for n in names[1] if n not in self.models.values()],
        ]
        if len(left[0]) == len(left[1]) == 1 and not self.models:
            self.models[left[0][0]] = left[1][0]
        for one, other in self.models.items():
            self.modules.matched.setdefault((one, ""), (other, ""))
        self._pair_equal_names()

    def _pair_equal_names(self) -> None:
        """Modules of one name in paired models, where nothing surer is known of either."""
        taken = set(self.modules.matched.values()) | set(self.modules.parts)
        there = {
            (model, plain_name(module)): (model, module)
            for model, module in reversed(self.sides[1].modules)
        }
        owners = [{one.module_path for one in side.parameters} for side in self.sides]
        for model, module in self.sides[0].modules:
            one, other = (
                (model, module),
                there.get((self.models.get(model, ""), plain_name(module))),
            )
            if (
                other is None
                or one in self.modules.matched
                or one in self.modules.wholes
                or other in taken
            ):
                continue
            if (one in owners[0]) == (other in owners[1]) and (not owners[0] or one in owners[0]):
                self.modules.matched[one] = other
                taken.add(other)

    def _in_lockstep(
        self, first: list[ForwardRows | None], streams: list[Iterator[ForwardRows]]
    ) -> Iterator[tuple[ForwardRows, ForwardRows]]:
        """Pairs of episodes of paired models, in order; one that has no partner is left out and
        said.
        """
        queues = [self._queue(one, stream) for one, stream in zip(first, streams, strict=True)]
        alike = self._called_alike()
        by_turn, by_moment = (frozenset(), alike) if self._sampled() else (alike, frozenset())
        turns = ForwardPairer(
            queues, self.models, by_turn, (self._sketch_of(0), self._sketch_of(1)), by_moment
        )
        yield from turns.pairs()
        self.report.warnings += turns.notes
        for which, left_out in zip(("reference", "port"), turns.left_out, strict=True):
            for model, count in left_out.items():
                forwards = "1 forward" if count == 1 else f"{count} forwards"
                self.report.warnings.append(
                    f"{forwards} of {model or 'a model'} in the {which} {'has' if count == 1 else 'have'} no counterpart "
                    f"and {'was' if count == 1 else 'were'} not compared"
                )

    def _called_alike(self) -> frozenset[str]:
        """The models that both runs, if they are complete, called equally often."""
        metas = [side.meta for side in self.sides]
        if not all(meta.get("ended_cleanly") for meta in metas):
            return frozenset()
        counts = [_forwards(meta) for meta in metas]
        return frozenset(
            one
            for one, other in self.models.items()
            if one in counts[0] and counts[0][one] == counts[1].get(other)
        )

    def _sampled(self) -> bool:
        """Whether the runs may have been recorded in different steps; under a budget each run
        chooses its own.
        """
        settings = [side.meta.get("settings") or {} for side in self.sides]
        steps = [one.get("OTEL_TORCH_STEPS", one.get("FASTVIDEO_TRACE_STEPS")) for one in settings]
        return steps[0] != steps[1] or any("budget" in side.meta for side in self.sides)

    def _sketch_of(self, side: int) -> Callable[[RowRecord], bytes | None]:
        sketches = self.steady.sketches[side]

        def sketch_of(line: RowRecord) -> bytes | None:
            return (
                line.sketch
                if line.sketch is not None or line.value is None
                else sketches.get(line.value)
            )

        return sketch_of

    @staticmethod
    def _queue(first: ForwardRows | None, stream: Iterator[ForwardRows]) -> Iterator[ForwardRows]:
        if first is not None:
            yield first
            yield from stream

    # -- parameters
    # ----------------------------------------------------------------------------------------------

    def _compare_parameters(self) -> None:
        for pair in self.pairs:
            self.report.pairs += 1
            one, other = pair.reference[0], pair.port[0]
            types = {str(part.row.get("dtype")) for part in (*pair.reference, *pair.port)}
            if pair.equal and len(types) > 1:
                dtypes = one.row.get("dtype"), other.row.get("dtype")
                text = f"{one.full_name or 'a parameter'} is {dtypes[0]} in the reference and {dtypes[1]} in the port"
                self.healed.append(self._parameter_finding(pair, "dtype", text))

    def _parameter_finding(self, pair: ParameterPair, kind: Kind, text: str) -> Finding:
        one, other = pair.reference[0], pair.port[0]
        limit = self.tolerance.of_parameters([*pair.reference, *pair.port])
        return Finding(
            one.model, one.module, f"param.{one.name}", 0, 0, 0, "attach",
            other.model, other.module, f"param.{other.name}", 0, 0, 0, None, "parameter", "parameter",
            kind, pair.error, limit, text,
        )  # fmt: skip

    # -- one episode
    # ----------------------------------------------------------------------------------------------

    def _compare_episode(self, one: ForwardRows, other: ForwardRows) -> None:
        noise = self._noise_of(one)
        if (
            one.loop,
            other.loop,
        ) != self.loops:  # another video: nothing of the last one goes into it
            self.loops = one.loop, other.loop
            self.suspects.clear()
        look = self.steady.look(one, other, noise)
        if not self._compare_by_plan(look):
            self._compare_in_full(look, one, other, noise)
        self.steady.remember(look, one, other, noise)
        self.episodes += 1

    def _compare_by_plan(self, look: CacheLookup) -> bool:
        """Whether all is known of two episodes that need be known: right, harmless, or wrong as an
        earlier one was.
        """
        plan, checked, numbers = look.plan, look.checked, look.numbers
        if plan is None or checked is None or numbers is None:
            return False
        judged = self._known(plan, checked)
        if judged is None:
            return False
        for side in (0, 1):
            self.uncalled[side].update(plan.uncalled[side])

        def make(at: int, statistics: bool) -> ComparedPair:
            return plan.comparison(
                at, checked, numbers[0].columns, numbers[1].columns, judged.states, statistics
            )

        self.kept.take(
            ComparedForward(plan.modules, checked.error, checked.limit, judged.diverged, make)
        )
        self._trace(plan.modules[0][0] if plan.modules else "", judged.diverged)
        if not judged.diverged:
            for at in sorted(judged.states.keys() - plan.said):
                plan.said.add(at)
                self._say_healed(_finding_of(make(at, False)))
        return True

    def _known(self, plan: PairPlan, checked: CheckedPairs) -> CachedJudgment | None:
        if checked.right.all() and not plan.missing:
            return CachedJudgment(False, {})
        if plan.ends_right(checked):
            return CachedJudgment(
                False, dict.fromkeys(np.flatnonzero(~checked.right).tolist(), "healed")
            )
        judged = plan.judged.get(checked.pattern)
        if not self.findings:
            return judged
        # a later fault counts only where nothing wrong can have entered
        if self.suspects and not plan.begins_right(checked):
            return judged or CachedJudgment(True, {})
        if judged is not None and (self.suspects or plan.begins_right(checked)):
            return judged
        if self.analysed_late >= _MOST_ANALYSED:
            self.unanalysed += 1
            return CachedJudgment(True, {})
        return None

    def _compare_in_full(
        self, look: CacheLookup, one: ForwardRows, other: ForwardRows, noise: ForwardRows | None
    ) -> None:
        rows = one.rows, other.rows
        programs = tuple(
            build_program(side, sketches)
            for side, sketches in zip(rows, self.steady.sketches, strict=True)
        )
        comparer = Comparer(self.tolerance)
        for program, side in zip(programs, self.sides, strict=True):
            comparer.coarse.update(coarseness(program, side.types, self.tolerance))
        if noise is not None:
            comparer.floors = floors_of(
                programs[0], build_program(noise.rows, self.steady.noise_sketches)
            )
        if (said := self.said) is not None:
            for value in programs[0].values:
                reordered = [
                    said.reorders(role.call.module_path, role.tensor) for role in value.roles
                ]
                if any(reordered):
                    comparer.reordered.add(value)
        alignment = align(programs[0], programs[1], self.modules, comparer)
        never_called = self._never_called((programs[0], programs[1]))
        self.steady.learn(look, alignment, rows, bool(never_called))
        judgement = (
            judge_isolated(alignment, self.stayed, never_called)
            if self.isolated
            else judge(alignment, never_called)
        )
        if self.pairing is not None:
            self.pairing.learn(alignment, judgement.healed)
        if look.plan is not None and look.checked is not None:
            agree = look.plan.remember(look.checked, judgement, alignment.pairs, rows)
            if not agree:
                self.steady.forget(look)
        for counts, calls in zip(self.uncalled, alignment.uncalled, strict=True):
            counts.update(call.module_path for call in calls)
        self.sketched = self.sketched or all(
            any(value.sketch is not None for value in program.values) for program in programs
        )
        self.analysed_late += bool(self.findings)
        self._keep(alignment, judgement)

    def _noise_of(self, episode: ForwardRows) -> ForwardRows | None:
        """The same forward of the reference under noise: the same program, so in the same order."""
        for at in range(_NOISE_AHEAD):
            if at == len(self.noise_ahead):
                candidate = next(self.noise, None)
                if candidate is None:
                    break
                self.noise_ahead.append(candidate)
            if self.noise_ahead[at].when == episode.when:
                for _ in range(at):
                    self.noise_ahead.popleft()
                return self.noise_ahead.popleft()
        self.without_noise += 1
        return None

    def _never_called(
        self, programs: tuple[Program, Program]
    ) -> list[tuple[ModulePath, ModulePath, int]]:
        """(reference's module, port's module, the side that never calls it), for modules that the
        other side calls here.
        """
        found = []
        called = [{call.module_path for call in program.calls} for program in programs]
        for one, other in self.modules.matched.items():
            if one in called[0] and other in self.sides[1].uncalled:
                found.append((one, other, 1))
            if other in called[1] and one in self.sides[0].uncalled:
                found.append((one, other, 0))
        return found

    def _keep(self, alignment: Alignment, judgement: Judgment) -> None:
        states = self._states(judgement)
        expectations = alignment.pairs
        model = alignment.reference.calls[0].model
        if any(
            not role.value.is_integer and role.value.numel > 1
            for call in alignment.reference.outermost
            for role in call.inputs
        ):
            self.fed.add(model)
        suspects = set(self.suspects)
        self._trace(model, judgement.diverged)

        def make(at: int, statistics: bool) -> ComparedPair:
            one = expectations[at]
            return _comparison(
                one, at, states.get(id(one), "right" if one.is_right else "inherited"), statistics
            )

        relations = [one.relation for one in expectations]
        errors = np.array(
            [math.nan if relation.error is None else relation.error for relation in relations]
        )
        limits = np.array([relation.limit for relation in relations])
        modules = [one.reference[0].call.module_path for one in expectations]
        self.kept.take(ComparedForward(modules, errors, limits, judgement.diverged, make))
        self.results += sum(one.reference[0].side == "output" for one in expectations)
        for one in expectations:
            self.met[0].update(role.call.module_path for role in one.reference)
            self.met[1].update(role.call.module_path for role in one.port)
            self.saw_inputs = self.saw_inputs or one.reference[0].side == "input"
        if not judgement.diverged:
            for one in judgement.healed:
                self._say_healed(_finding(_fault_of(one), _HEALS))
            return
        if not self.findings and judgement.faults:
            way = chain_to(judgement.faults[0], alignment)
            self.report.chain = [make(expectations.index(one), True) for one in way]
        for fault in judgement.faults:
            finding = _finding(fault, explain(fault))
            known = any(
                (f.model, f.module, f.side, f.port_module)
                == (finding.model, finding.module, finding.side, finding.port_module)
                and (f.module != "" or f.side != "input" or f.tensor == finding.tensor)
                for f in self.findings
            )
            inherited = bool(suspects) and not self.isolated and not _inputs_right(alignment)
            if not known and not inherited:
                self.findings.append(finding)

    def _trace(self, model: str, diverged: bool) -> None:
        """Remember whose wrong outputs may go on: none does through a model that was given what
        others made, and is right.
        """
        if diverged:
            self.suspects.add(model)
        elif model in self.fed and model not in self.suspects:
            self.suspects.clear()

    def _say_healed(self, finding: Finding) -> None:
        """List a harmless difference at its first step."""
        place = (
            finding.model,
            finding.module,
            finding.tensor,
            finding.port_model,
            finding.port_module,
            finding.port_tensor,
        )
        if place not in self.said_healed:
            self.said_healed.add(place)
            self.healed.append(finding)

    @staticmethod
    def _states(judgement: Judgment) -> dict[int, Any]:
        states: dict[int, Any] = {id(one): "healed" for one in judgement.healed}
        states |= {id(one): "inherited" for one in judgement.wrong}
        states |= {
            id(fault.pair): "introduced" for fault in judgement.faults if fault.pair is not None
        }
        return states

    # -- the end
    # ----------------------------------------------------------------------------------------------

    def _finish(self) -> Report:
        report = self.report
        report.pairs += self.kept.pairs
        report.compared = self.kept.finish()
        report.compared_left_out = self.kept.pairs - len(report.compared)
        report.weaker = self.episodes > 0 and not self.sketched
        self._warn()
        report.introduced = self.findings
        report.harmless = self.healed
        self._list_unpaired()
        report.ambiguous = [
            UncomparedTensor(model, module, "") for model, module in self.modules.ambiguous
        ]
        if self.said is not None:
            report.warnings += self.said.unused()
        if self.save_map is not None:
            write_map(
                self.save_map, self.modules, self.models, self.pairs, *self.sides,
                given=self.said, ambiguous=self.modules.ambiguous, titles=(report.reference, report.port),
            )  # fmt: skip
        if report.introduced:
            report.verdict, report.first = "diverged", report.introduced[0]
        elif self.episodes == 0 or not self.results:
            report.verdict, report.reason = "incomparable", self._why_incomparable()
        return report

    def _warn(self) -> None:
        """What was handled, and what was left undone."""
        warn = self.report.warnings.append
        if self.findings and not self.saw_inputs:
            warn(
                "no inputs were recorded, so a module that is named may only hand on what entered it wrong: "
                "record both programs with OTEL_TORCH_CAPTURE=parity"
            )
        if self.unanalysed:
            warn(
                f"{self.unanalysed} further forwards are wrong in ways of their own and were not searched for faults of their own"
            )
        if self.without_noise and self.report.pairs and self._read.noise:
            warn(
                f"{self.without_noise} forwards have no counterpart in the noise; constants of the dtypes decided there"
            )
        for which, calls in zip(("reference", "port"), self.uncalled, strict=True):
            if calls:
                (model, module), count = calls.most_common(1)[0]
                more = f" and {len(calls) - 1} more modules" if len(calls) > 1 else ""
                warn(
                    f"calls without a counterpart, of modules that have one: {count} of {module or model} in the {which}{more}"
                )
        for side in self.sides:
            if side.repeated:
                warn(
                    f"{side.path}: rows of one place come again within a step and name no call: paired in order of occurrence"
                )

    def _look_unrelated(self) -> bool:
        """Whether hardly a parameter of one model is in the other, neither by its numbers nor by
        its name: to call that a divergence would be of no use.
        """
        known = {
            id(part)
            for pair in self.pairs
            if pair.equal
            or pair.how == "map"
            or any(
                one.full_name == other.full_name for one in pair.reference for other in pair.port
            )
            for part in (*pair.reference, *pair.port)
        }
        shares = []
        for side in self.sides:
            weights = [one for one in side.parameters if not one.is_buffer and one.numel > 0]
            total = sum(one.numel for one in weights)
            shares.append(
                sum(one.numel for one in weights if id(one) in known) / total if total else 1.0
            )
        return max(shares) < _UNRELATED

    def _why_incomparable(self, unrelated: bool = False) -> str:
        mine, theirs = (_listed({model for model, _ in side.modules}) for side in self.sides)
        if unrelated:
            return (
                "these are different models: hardly a parameter of one is in the other "
                f"(the reference has {mine}, the port has {theirs})"
            )
        forwards, names = (
            "no forward of one side has a counterpart on the other",
            "no parameter and no module corresponds",
        )
        return (
            f"{forwards if self.models else names}: the reference has {mine}, the port has {theirs}"
        )

    def _list_unpaired(self) -> None:
        fused = [set(), set()]  # type: list[set[ModulePath]]
        for whole, parts in self.modules.parts.items():
            fused[1].add(whole)
            fused[0].update(parts)
        for whole, parts in self.modules.wholes.items():
            fused[0].add(whole)
            fused[1].update(parts)
        paired = (
            set(self.modules.matched) | fused[0] | self.met[0],
            set(self.modules.matched.values()) | fused[1] | self.met[1],
        )
        for name, side, known in zip(("reference", "port"), self.sides, paired, strict=True):
            seen = {
                (kind.model, kind.module)
                for kind in side.kinds.known
                if kind.phase not in PASSED_OVER
            } | side.uncalled
            places = [place for place in side.modules if place not in known and place in seen]
            self.report.unpaired[name] = [
                UncomparedTensor(model, module, "") for model, module in places
            ]


def _inputs_right(alignment: Alignment) -> bool:
    inputs = [
        one
        for one in alignment.pairs
        if one.basis == "outermost" and one.reference[0].side == "input"
    ]
    return bool(inputs) and all(one.is_right for one in inputs)


def _fault_of(one: TensorPair) -> Fault:
    return Fault(
        kind_of(one.relation),
        location_of(one.reference[0]),
        location_of(one.port[0]),
        one,
        one.relation,
    )


def _place(spot: Location | None) -> tuple[Any, ...]:
    """model, module, tensor, loop, step, call, phase of a spot."""
    if spot is None:
        return (None,) * 7
    call: ModuleCall | None = spot.call
    tensor = None if spot.role is None else spot.role.tensor
    if call is None:
        return (*spot.module, tensor, None, None, None, None)
    return (*spot.module, tensor, call.loop, call.step, call.number, call.phase)


def _finding(fault: Fault, text: str) -> Finding:
    one, other = _place(fault.reference), _place(fault.port)
    error, limit = (
        (None, None) if fault.relation is None else (fault.relation.error, fault.relation.limit)
    )
    sides: list[Side | None] = [
        None if spot is None else spot.side for spot in (fault.reference, fault.port)
    ]
    if fault.kind == "weights":
        sides = ["parameter", "parameter"]
        pair = fault.weights[0]
        one = (*one[:2], f"param.{pair.reference[0].name}", *one[3:])
        other = (*other[:2], f"param.{pair.port[0].name}", *other[3:])
    names = ("model", "module", "tensor", "loop", "step", "call", "phase")
    places = dict(zip(names, one, strict=True)) | {
        f"port_{name}": part for name, part in zip(names[:6], other, strict=False)
    }
    return Finding(
        **places,
        rank=None,
        side=sides[0],
        port_side=sides[1],
        kind=fault.kind,
        error=error,
        floor=limit,
        explanation=text,
    )


def _comparison(one: TensorPair, depth: int, state: Any, statistics: bool) -> ComparedPair:
    first, second = one.reference[0], one.port[0]
    if state == "right" and one.relation.state == "layout":
        state = "layout"
    return ComparedPair(
        first.call.model, first.call.module, _tensors(one.reference), first.side,
        first.call.loop, first.call.step, first.call.number,
        second.call.model, second.call.module, _tensors(one.port), second.side,
        second.call.loop, second.call.step, second.call.number,
        depth, one.relation.error, one.relation.limit, state,
        _statistics(first) if statistics else {}, _statistics(second) if statistics else {},
    )  # fmt: skip


def _tensors(roles: list[Role]) -> str:
    return "+".join(role.tensor for role in roles)


def _statistics(role: Role) -> dict[str, Any]:
    return {name: role.row[name] for name in SHOWN_STATISTICS if name in role.row}


_HEALS = "the difference heals: all that comes of it is within its floor"


def _finding_of(pair: ComparedPair) -> Finding:
    """A compared pair as a harmless difference."""
    kind: Kind = (
        "shape" if pair.error is None else "nonfinite" if math.isinf(pair.error) else "value"
    )
    return Finding(
        pair.model, pair.module, pair.tensor, pair.loop, pair.step, pair.call, "forward",
        pair.port_model, pair.port_module, pair.port_tensor, pair.port_loop, pair.port_step, pair.port_call,
        None, pair.side, pair.port_side, kind, pair.error, pair.floor, _HEALS,
    )  # fmt: skip


def _listed(models: set[str]) -> str:
    """What a recording has, for a person; rows that are not ours need not name their model.

    >>> _listed({"VAE", "DiT"}), _listed({""}), _listed(set())
    ('DiT, VAE', 'a model that its rows do not name', 'none')
    """
    named = sorted(models - {""})
    return (
        ", ".join([*named, *(["a model that its rows do not name"] if "" in models else [])])
        or "none"
    )


def _forwards(meta: dict[str, Any]) -> dict[str, Any]:
    models = meta.get("models")
    facts = models.items() if isinstance(models, dict) else ()
    return {
        model: fact["forwards"]
        for model, fact in facts
        if isinstance(fact, dict) and "forwards" in fact
    }


class _Progress:
    """Tells how much of the recordings has been read, ten times a second at the most. noise:
    whether there is one.
    """

    def __init__(self, paths: list[Path], progress: Callable[[str], None]) -> None:
        self.noise = len(paths) > 2
        self._whole = sum(path.stat().st_size for path in paths if path.exists())
        self._read = 0
        self._progress = progress
        self._next = 0.0

    def __call__(self, count: int) -> None:
        self._read += count
        now = time.monotonic()
        if now >= self._next:
            self._next = now + 0.1
            self._progress(f"{100 * self._read / max(self._whole, 1):.0f} % read")
