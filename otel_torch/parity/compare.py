"""Compare two recordings: parameters first, then one forward after another, in bounded memory.

The flow of one comparison:

    load_recording_start   metadata, parameters and modules of both sides
    ProgramMatch           which parameters, modules and models correspond
    compare_training       losses, gradients and updates of training steps, if recorded
    ForwardPairer          which forwards correspond
    PlanCache              compares a forward of a known structure as arrays, else in full:
        build_program        calls and values of either side
        align                pairs of tensors that should be equal
        judge                faults, harmless differences, inherited ones
    Findings, Coverage     what was found, and what was compared at all
    Report                 the result
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from otel_torch.parity.align import align
from otel_torch.parity.cached_comparison import CachedJudgment, CheckedPairs, PairPlan
from otel_torch.parity.call_graph import Program, build_program
from otel_torch.parity.coverage import Coverage, unpaired_forward_warnings
from otel_torch.parity.diagnosis.diagnose import Diagnosis
from otel_torch.parity.diagnosis.stored_tensors import StoredTensors, tensors_of
from otel_torch.parity.environment import environment_differences
from otel_torch.parity.faults import Judgment, MissingModule
from otel_torch.parity.finding import ComparedPair, LogProbabilities, Report, UncomparedTensor
from otel_torch.parity.findings import MOST_SEARCHED, Findings, healed_finding
from otel_torch.parity.folds import pair_folds
from otel_torch.parity.forwards import SKIPPED_PHASES, WARM_UP, ForwardRows, iterate_forwards
from otel_torch.parity.judge import judge
from otel_torch.parity.loaded_recording import LoadedRecording, load_recording_start, selection_of
from otel_torch.parity.lower_precision import (
    accept_rounded,
    count_rounded,
    describe_evened_out,
    find_outliers,
    lower_side,
    outlier_finding,
    outliers_among_rounded,
    quantized_dtype,
    rank_modules,
    tolerance_of,
)
from otel_torch.parity.map_file import Map
from otel_torch.parity.map_writer import save_map as write_map
from otel_torch.parity.module_modes import ModuleModes
from otel_torch.parity.noise import add_noise, coarsest_dtypes, describe_noise_dtype
from otel_torch.parity.noise_forwards import NoiseForwards
from otel_torch.parity.one_model import one_model
from otel_torch.parity.operations.compare_operations import compare_operations, hold_operations
from otel_torch.parity.outside_forward import (
    ParameterState,
    Updates,
    allow_other_split,
)
from otel_torch.parity.pair_forwards import ForwardPairer, SketchLookup
from otel_torch.parity.pairing_finder import PairingFinder
from otel_torch.parity.parameters import ParameterPair
from otel_torch.parity.plan_cache import CacheLookup, PlanCache
from otel_torch.parity.program_match import ProgramMatch
from otel_torch.parity.rank_executor import Progress
from otel_torch.parity.ranks import compare_ranks
from otel_torch.parity.recording_source import RecordingSource
from otel_torch.parity.retained_pairs import ComparedForward, RetainedPairs
from otel_torch.parity.sides import Sides
from otel_torch.parity.tokens.final_outputs import pair_final_outputs
from otel_torch.parity.tokens.handed_on_parts import pair_handed_on_parts
from otel_torch.parity.tokens.log_probabilities import name_contribution
from otel_torch.parity.tokens.pair_by_tokens import pair_by_tokens
from otel_torch.parity.tolerance import Tolerance
from otel_torch.parity.training.compare_training import compare_training
from otel_torch.parity.values import Comparer
from otel_torch.recording.isolation_pairing import is_isolated, kept_slots
from otel_torch.recording.row_schema import RowRecord

_PROGRESS_INTERVAL_S = 0.1
# names that a warning lists
_MOST_NAMES = 3


@dataclass(frozen=True)
class _Options:
    """The options of a comparison; see `compare`.

    Attributes:
        titles: What a map that is saved calls the two runs.
    """

    models: Sides[str] | None
    rtol: float | None
    map: Map | None
    save_map: str | Path | None
    titles: Sides[str]
    thorough: bool
    pairing: PairingFinder | None
    tensors: Sides[Path] | None
    warm_ups: bool
    quantized: bool


def compare(
    reference: str | Path,
    port: str | Path,
    *,
    models: Sides[str] | None = None,
    noise: str | Path | None = None,
    rtol: float | None = None,
    map: Map | None = None,
    save_map: str | Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
    thorough: bool = False,
    pairing: PairingFinder | None = None,
    tensors: Sides[Path] | None = None,
    warm_ups: bool = False,
    quantized: bool = False,
    on: str | None = None,
) -> Report:
    """Compare two recordings, or two folders with the recordings of all ranks.

    Args:
        models: Of each recording, compare only this model.
        noise: The reference recorded again under OTEL_TORCH_NOISE.
        rtol: Replaces the constants of the dtypes.
        map: The user's pairs; they override the pairs found automatically.
        save_map: Where to write the pairs as a map.
        progress: Called with a short text from time to time.
        thorough: Analyse every forward in full; slower, with the same result.
        pairing: Learns which tensors correspond, for an isolated run of the port.
        tensors: The folders of whole tensors of both runs. By default, those that the runs named
            in their metadata, if they are still there.
        quantized: Take the port for one that computes in lower precision on purpose. By default,
            the types of its weights tell.
        warm_ups: Compare the forwards of phase `warmup`, too.
        on: `ray`, or the address of a Ray cluster, whose machines compare the ranks of folders.

    Raises:
        RecordingError: A file cannot be read.
        ValueError: There is no such cluster.
        MapError: The map does not fit the recordings.
    """
    titles = Sides(str(reference), str(port))
    options = _Options(
        models, rtol, map, save_map, titles, thorough, pairing, tensors, warm_ups, quantized
    )
    compare_one = partial(_compare_recordings, options=options)
    paths = Sides(Path(reference), Path(port))
    noise_path = None if noise is None else Path(noise)
    if any(path is not None and path.is_dir() for path in (*paths, noise_path)):
        # these learn from one rank after the other
        learns = map is not None or save_map is not None or pairing is not None
        workers = 1 if learns else None
        return compare_ranks(*paths, noise_path, compare_one, progress, on, workers, tensors)
    noise_source = None if noise_path is None else RecordingSource(noise_path)
    return compare_one(*paths.map(RecordingSource), noise=noise_source, progress=progress)


def _compare_recordings(
    reference: RecordingSource,
    port: RecordingSource,
    *,
    noise: RecordingSource | None,
    progress: Progress,
    options: _Options,
) -> Report:
    """Compare two recordings, each of one process."""
    warnings: list[str] = []
    if (models := options.models) is not None:
        reference = one_model(reference, models.reference, warnings.append)
        port = one_model(port, models.port, warnings.append)
        noise = noise and one_model(noise, models.reference, warnings.append)
    sources = Sides(reference, port)
    of_modules = options.map, options.save_map, options.pairing
    if of_modules == (None, None, None) and hold_operations(sources):
        report = compare_operations(sources, noise, progress)
    else:
        comparison = _Comparison(sources, noise, progress, options)
        report = comparison.run()
        if options.save_map is not None and not comparison.is_unrelated:
            comparison.save_map(options.save_map, options.titles)
    report.warnings[:0] = dict.fromkeys(warnings)  # both sides may be one file
    return report


class _Comparison:
    """One comparison of two recordings."""

    def __init__(
        self,
        sources: Sides[RecordingSource],
        noise: RecordingSource | None,
        progress: Progress,
        options: _Options,
    ) -> None:
        self.report = Report("match", reference=str(sources.reference), port=str(sources.port))
        self._warn = self.report.warnings.append
        self._tolerance = Tolerance(options.rtol)
        self._map = options.map
        self._pairing = options.pairing
        skipped = SKIPPED_PHASES - {WARM_UP} if options.warm_ups else SKIPPED_PHASES
        self._recordings = sources.map(
            lambda source: load_recording_start(source, self._warn, self.report.leave_out, skipped)
        )
        all_sources = [*sources] if noise is None else [*sources, noise]
        self._progress = _ReadProgress(all_sources, progress)
        self._noise_source = noise
        self._noise = NoiseForwards(noise, self._recordings, self._warn, self._progress)
        port_meta = self._recordings.port.meta
        self.report.isolated = is_isolated(port_meta)
        self.report.imported = (
            bool(self._recordings.reference.meta.get("imported")),
            bool(port_meta.get("imported")),
        )
        self.report.environment = environment_differences(
            self._recordings.reference.meta, port_meta
        )
        self.report.selections = (
            selection_of(self._recordings.reference.meta),
            selection_of(port_meta),
        )
        self._kept = kept_slots(port_meta) if self.report.isolated else None
        # plans judge by the final outputs of a run, which are no evidence in an isolated run
        self._plans = PlanCache(
            self._recordings.map(lambda recording: recording.parameters),
            off=options.thorough or self.report.isolated,
        )
        self._tensors = _stored_tensors(self._recordings, options.tensors)
        self._retained = RetainedPairs()
        modes = self._recordings.map(lambda recording: ModuleModes(recording.meta))
        self._findings = Findings(self.report.isolated, modes)
        self._updates = Updates(self._recordings)
        self._coverage = Coverage()
        self._quantized = options.quantized
        self._outliers: list[ParameterPair] = []
        self._dtypes = Sides[set[str]](set(), set())
        self._log_probabilities: dict[str, LogProbabilities] = {}
        self.is_unrelated = False

    def run(self) -> Report:
        """Compare the parameters and all forwards."""
        streams = self._recordings.map(self._forwards)
        first = streams.map(lambda stream: next(stream, None))
        for recording, forward in zip(self._recordings, first, strict=True):
            recording.complete_modules(forward)
        self._match = ProgramMatch(self._recordings, self._map, self._tolerance, self._warn, first)
        self._accept_quantized_weights()
        self._diagnosis = Diagnosis(
            self._recordings.map(lambda recording: recording.parameters),
            self._match.parameters,
            self._tensors,
            self._tolerance,
        )
        for pair in self._match.parameters:
            self.report.pairs += 1
            self._findings.add_dtype(pair, self._tolerance)
        self.is_unrelated = self._match.is_unrelated()
        if self.is_unrelated:
            self.report.verdict, self.report.reason = "incomparable", self._why_unrelated()
            return self.report
        self._training = compare_training(
            self._recordings, self._match, self._noise_source, self._tolerance
        )
        self.report.pairs += self._training.pairs
        if self._training.first is None:  # which would name them
            self.report.warnings += self._training.hidden_settings.values()
        queues = Sides(*map(_chain_first, first, streams))
        for reference, port in self._pair_forwards(queues):
            self._compare_forwards(reference, port)
        self._findings.add_training(self._training.first)
        self._complete_report()
        return self.report

    def _accept_quantized_weights(self) -> None:
        """Widen the limits if the port's weights are quantized, which is no fault."""
        reference, port = self._recordings.map(
            lambda recording: quantized_dtype(recording.parameters)
        )
        self._quantized = self._quantized or (bool(port) and not reference)
        if not self._quantized and self._match.pairs_all_parameters():
            self._outliers = outliers_among_rounded(self._match.parameters)
            self._quantized = bool(self._outliers)
        if not self._quantized:
            return
        self._dtypes.port.add(port)
        if self._tolerance.rtol is None:
            self._tolerance = tolerance_of(self._match.parameters, port)
        self._match.replace_parameters(accept_rounded(self._match.parameters))

    # -- the forwards of both sides
    # ----------------------------------------------------------------------------------------------

    def _forwards(self, recording: LoadedRecording) -> Iterator[ForwardRows]:
        cuts = 0
        for forward in iterate_forwards(
            recording.source,
            recording.kinds,
            self.report.leave_out,
            self._progress,
            recording.skipped_phases,
        ):
            cuts += forward.cut
            recording.repeated = recording.repeated or forward.repeated
            yield forward
        if cuts:
            self._warn(
                f"{recording.source}: a stretch of many rows without an end was cut in "
                f"{cuts + 1} to be compared"
            )

    def _pair_forwards(self, queues: Sides[Iterator[ForwardRows]]) -> Iterator[Sides[ForwardRows]]:
        """Yield pairs of forwards of matched models; warn about those without a counterpart."""
        if all("tokens" in recording.captures for recording in self._recordings):
            by_tokens, queues = pair_by_tokens(
                queues,
                self._match,
                self._recordings.map(lambda side: side.kinds),
                self._recordings.map(lambda side: side.is_trained),
                self._recordings.map(lambda side: side.first_names),
            )
            if by_tokens is not None:
                self.report.by_tokens = True
                self._findings.tokens = by_tokens.tokens
                self._log_probabilities = by_tokens.log_probabilities
                self._plans.off = True
                self._noise = NoiseForwards(None, self._recordings, self._warn, self._progress)
                self.report.warnings += by_tokens.warnings
                for warning in by_tokens.uncompared:
                    self.report.leave_out(warning)
                yield from by_tokens.pairs
                return
        equally_often = self._models_called_equally_often()
        by_order, by_step = equally_often, frozenset[str]()
        if self._may_sample_other_steps():
            by_order, by_step = by_step, by_order
        sketch_of = self._plans.sketches.map(_sketch_lookup)
        pairer = ForwardPairer(queues, self._match.models, by_order, sketch_of, by_step)
        yield from pairer.pairs()
        self.report.warnings += pairer.notes
        # of models called equally often, both runs computed all forwards, and chose what to record
        compared = Sides(
            frozenset(self._match.models) - by_step,
            frozenset(self._match.models.values())
            - {self._match.models[model] for model in by_step},
        )
        warnings = unpaired_forward_warnings(pairer.unpaired, compared, self._training.same_batch)
        for warning, is_left_out in warnings:
            (self.report.leave_out if is_left_out else self._warn)(warning)

    def _models_called_equally_often(self) -> frozenset[str]:
        """Return the models that both runs, if complete, called equally often.

        Warm-ups are not counted, so that where they are compared it is not known.
        """
        is_complete = all(recording.meta.get("ended_cleanly") for recording in self._recordings)
        if not is_complete or WARM_UP not in self._recordings.reference.skipped_phases:
            return frozenset()
        counts, port_counts = self._recordings.map(lambda recording: recording.forward_counts)
        return frozenset(
            model
            for model, match in self._match.models.items()
            if model in counts and counts[model] == port_counts.get(match)
        )

    def _may_sample_other_steps(self) -> bool:
        """Return whether the runs may have been recorded in different steps."""
        if any("budget" in recording.meta for recording in self._recordings):
            return True  # under a budget, each run chooses its steps
        steps, port_steps = self._recordings.map(_recorded_steps)
        return steps != port_steps

    # -- one forward
    # ----------------------------------------------------------------------------------------------

    def _compare_forwards(self, reference: ForwardRows, port: ForwardRows) -> None:
        noise = self._noise.matching(reference)
        self._findings.start_forward(reference, port)
        parameters = self._parameters_of(Sides(reference, port))
        lookup = CacheLookup()
        if not (parameters.drift or parameters.apart):  # plans hold the limits of equal parameters
            lookup = self._plans.look_up(reference, port, noise)
        if not self._compare_by_plan(lookup):
            self._compare_in_full(lookup, reference, port, noise, parameters)
        self._plans.remember(reference, port, noise)
        self._coverage.forwards += 1

    def _parameters_of(self, forwards: Sides[ForwardRows]) -> ParameterState:
        """Return what is known of the parameters that two forwards use."""
        model, position = forwards.reference.model, _position(forwards.reference)
        training = self._training
        if training.is_over(model, position, _position(forwards.port)):
            self._findings.add_training(training.first)
            return ParameterState("wrong")
        if model in training.known:
            drift, apart = (
                training.drift_before(model, position),
                training.apart_before(model, position),
            )
            return ParameterState("trained", drift, apart)
        return ParameterState("unknown" if self._updates.precede(forwards) else "loaded")

    def _compare_by_plan(self, lookup: CacheLookup) -> bool:
        """Compare two forwards by a plan; return False if they need a full analysis."""
        plan, checked, measurements = lookup.plan, lookup.checked, lookup.measurements
        if plan is None or checked is None or measurements is None:
            return False
        judgment = self._judge_by_plan(plan, checked)
        if judgment is None:
            return False
        columns = measurements[0].columns, measurements[1].columns

        def make(index: int, with_statistics: bool) -> ComparedPair:
            states = judgment.states
            return plan.compared_pair(index, checked, columns, states, with_statistics)

        self._coverage.add_uncalled(plan.uncalled)
        self._retained.add(
            ComparedForward(plan.modules, checked.error, checked.limit, judgment.diverged, make)
        )
        self._findings.trace(plan.modules[0][0] if plan.modules else "", judgment.diverged)
        if not judgment.diverged:
            for index in sorted(judgment.states.keys() - plan.reported_healed):
                plan.reported_healed.add(index)
                self._findings.add_healed(healed_finding(make(index, False)))
        return True

    def _judge_by_plan(self, plan: PairPlan, checked: CheckedPairs) -> CachedJudgment | None:
        """Return the judgment, or None if a full analysis is needed."""
        if checked.right.all() and not plan.has_missing:
            return CachedJudgment(False, {})
        if plan.ends_right(checked):
            wrong = np.flatnonzero(~checked.right).tolist()
            return CachedJudgment(False, dict.fromkeys(wrong, "healed"))
        judgment = plan.judgments.get(checked.pattern)
        findings = self._findings
        if not findings.faults:
            return judgment
        # a later fault counts only if nothing wrong can have entered
        begins_right = plan.begins_right(checked)
        if findings.suspects and not begins_right:
            return judgment or CachedJudgment(True, {})
        if judgment is not None and (findings.suspects or begins_right):
            return judgment
        if findings.searched >= MOST_SEARCHED:
            findings.unsearched += 1
            return CachedJudgment(True, {})
        return None

    def _compare_in_full(
        self,
        lookup: CacheLookup,
        reference: ForwardRows,
        port: ForwardRows,
        noise: ForwardRows | None,
        parameters: ParameterState,
    ) -> None:
        rows = reference.rows, port.rows
        programs = Sides(*map(build_program, rows, self._plans.sketches))
        comparer = self._comparer(programs, noise, parameters)
        alignment = align(*programs, self._match.modules, comparer)
        pair_folds(alignment)
        if tokens := self._findings.tokens.get(reference.model):
            pair_handed_on_parts(alignment, tokens)
            pair_final_outputs(alignment)
        if log_probabilities := self._log_probabilities.get(reference.model):
            name_contribution(log_probabilities, alignment.pairs)
        missing = self._missing_modules(programs)
        self._plans.learn(lookup, alignment, rows, bool(missing))
        judgment = judge(alignment, missing, self._kept)
        if _position(reference) in self._training.same_batch.reference:
            judgment = allow_other_split(alignment, judgment)
        if parameters.state == "wrong":
            judgment = Judgment(judgment.diverged, [], judgment.healed, judgment.wrong)
        elif parameters.state == "unknown":
            judgment = self._findings.blame_update(alignment, judgment)
        if self._pairing is not None:
            self._pairing.learn(alignment, judgment.healed)
        if lookup.plan is not None and lookup.checked is not None:
            agrees = lookup.plan.remember(lookup.checked, judgment, alignment.pairs, rows)
            if not agrees:
                self._plans.discard(lookup)
        self._coverage.add(alignment)
        self._findings.count_analysis()
        takes_data = parameters.state != "loaded"
        self._retained.add(self._findings.add(alignment, judgment, self._diagnosis, takes_data))

    def _comparer(
        self, programs: Sides[Program], noise: ForwardRows | None, parameters: ParameterState
    ) -> Comparer:
        comparer = Comparer(self._tolerance.with_drift(parameters.drift))
        parameters.add_to(comparer, programs.reference)
        for program, recording in zip(programs, self._recordings, strict=True):
            comparer.coarse.update(coarsest_dtypes(program, recording.dtypes))
        for program, dtypes in zip(programs, self._dtypes, strict=True):
            dtypes.update(comparer.coarse[value] for value in program.values)
        if noise is not None:
            noise_program = build_program(noise.rows, self._plans.noise_sketches)
            add_noise(comparer, programs.reference, noise_program, self._noise.dtypes)
            warning = describe_noise_dtype(comparer)
            if warning is not None and warning not in self.report.warnings:
                self._warn(warning)
        given = self._match.given
        if given is not None:
            for value in programs.reference.values:
                # a list, so that each role's entry of the map counts as used
                reorders = [
                    given.reorders(role.call.module_path, role.tensor) for role in value.roles
                ]
                if any(reorders):
                    comparer.reordered.add(value)
        return comparer

    def _missing_modules(self, programs: Sides[Program]) -> list[MissingModule]:
        """Return matched modules that one side calls here and the other side never calls."""
        missing = []
        called = programs.map(lambda program: {call.module_path for call in program.calls})
        uncalled = self._recordings.map(lambda recording: recording.uncalled)
        for module, match in self._match.modules.matched.items():
            if module in called.reference and match in uncalled.port:
                missing.append(MissingModule(module, match, port_is_idle=True))
            if match in called.port and module in uncalled.reference:
                missing.append(MissingModule(module, match, port_is_idle=False))
        return missing

    # -- the report
    # ----------------------------------------------------------------------------------------------

    def _complete_report(self) -> None:
        report, findings, modules = self.report, self._findings, self._match.modules
        report.pairs += self._retained.count
        report.compared = self._retained.finish()
        report.compared_left_out = self._retained.count - len(report.compared)
        self._rank_lower_precision()
        report.log_probabilities = max(
            self._log_probabilities.values(), key=lambda model: model.largest, default=None
        )
        report.weaker = self._coverage.forwards > 0 and not self._coverage.has_sketches
        self._add_warnings()
        report.introduced = findings.faults
        places = {(fault.model, fault.module, fault.tensor) for fault in findings.faults}
        report.harmless = [
            finding
            for finding in findings.harmless
            if (finding.model, finding.module, finding.tensor) not in places
        ]
        report.chain = findings.path
        report.tensors = findings.tensors
        report.unpaired.update(self._coverage.unpaired_modules(modules, self._recordings))
        report.ambiguous = [UncomparedTensor(*module, "") for module in modules.ambiguous]
        if self._match.given is not None:
            report.warnings += self._match.given.unused()
        if report.introduced:
            report.verdict, report.first = "diverged", report.introduced[0]
        elif self._coverage.forwards == 0 or not self._coverage.outputs:
            report.verdict, report.reason = "incomparable", self._why_nothing_compared()
        report.judge_whole()

    def _rank_lower_precision(self) -> None:
        """Rank the modules of the side of lower precision, and find what is more than rounding."""
        report = self.report
        side = "port" if self._quantized else lower_side(self._dtypes)
        if side is None:
            return
        dtypes = self._dtypes.port if side == "port" else self._dtypes.reference
        precision = rank_modules(side, dtypes, report.compared, report.isolated)
        report.lower_precision = precision
        if self._findings.faults:
            return
        if self._quantized:
            limit = self._tolerance.base(())
            found = find_outliers(precision, report.compared, limit)
            # what is computed with these may be hidden by what follows
            self._findings.faults += found or map(outlier_finding, self._outliers[:1])
        elif (warning := describe_evened_out(precision)) is not None:
            self._warn(warning)

    def _add_warnings(self) -> None:
        if self._findings.faults and not self._coverage.has_inputs:
            self._warn(
                "no inputs were recorded, so a module named here may only pass on a wrong input: "
                "record both programs with OTEL_TORCH_CAPTURE=parity"
            )
        if self._outliers:
            self._warn(
                "most weights are off by about as much as each other, as if rounded to few bits, "
                f"and {len(self._outliers)} by far more: compared as with --quantized"
            )
        if not self._quantized and (rounded := count_rounded(self._match.parameters)):
            self._warn(
                f"{rounded} weights are off by about as much as each other, as if rounded to few "
                "bits: if the port is quantized on purpose, compare with --quantized"
            )
        if unjudged := sorted(self._findings.unjudged):
            names = ", ".join(unjudged[:_MOST_NAMES]) + ", …" * (len(unjudged) > _MOST_NAMES)
            self._warn(
                f"{len(unjudged)} more weights differ ({names}): only wrong values are computed "
                "with them, so that whether they are right is not known"
            )
        if self._findings.unsearched:
            self._warn(
                f"{self._findings.unsearched} further forwards are wrong in other ways and were "
                "not searched for further faults"
            )
        if self._noise.unmatched and self.report.pairs and self._noise_source is not None:
            self._warn(
                f"{self._noise.unmatched} forwards have no counterpart in the noise; the "
                "constants of the dtypes decided there"
            )
        self.report.warnings += self._updates.warnings()
        self.report.warnings += self._coverage.uncalled_warnings()
        self.report.warnings += self._coverage.crowded_warnings()
        for recording in self._recordings:
            if recording.repeated:
                self._warn(
                    f"{recording.source}: tensors repeat within a step and name no call: paired in "
                    "order of occurrence"
                )

    def save_map(self, path: str | Path, titles: Sides[str]) -> None:
        """Write the pairs as a map; the titles name the two runs."""
        write_map(
            path,
            self._match.modules,
            self._match.models,
            self._match.parameters,
            *self._recordings,
            given=self._match.given,
            ambiguous=self._match.modules.ambiguous,
            titles=titles,
        )

    def _why_unrelated(self) -> str:
        return (
            f"these are different models: they share hardly any parameter ({self._listed_models()})"
        )

    def _why_nothing_compared(self) -> str:
        if self._match.models:
            reason = "no forward of one side has a counterpart on the other"
        else:
            reason = "no parameter and no module corresponds"
        return f"{reason}: {self._listed_models()}"

    def _listed_models(self) -> str:
        reference, port = self._recordings.map(
            lambda recording: _listed(set(recording.model_names))
        )
        return f"the reference has {reference}, the port has {port}"


def _position(forward: ForwardRows) -> tuple[int, int]:
    return forward.loop or 0, forward.step or 0


def _chain_first(first: ForwardRows | None, rest: Iterator[ForwardRows]) -> Iterator[ForwardRows]:
    if first is not None:
        yield first
        yield from rest


def _sketch_lookup(sketches: Mapping[int, bytes]) -> SketchLookup:
    """Return a function that finds the sketch of a row, recorded with it or earlier."""

    def sketch_of(record: RowRecord) -> bytes | None:
        if record.sketch is not None or record.value is None:
            return record.sketch
        return sketches.get(record.value)

    return sketch_of


def _stored_tensors(
    recordings: Sides[LoadedRecording], folders: Sides[Path] | None
) -> Sides[StoredTensors]:
    """Return the whole tensors of both runs, in the folders given or where the runs put them."""
    return Sides(
        *(
            tensors_of(recording.source.path, recording.meta, folder)
            for recording, folder in zip(recordings, folders or (None, None), strict=True)
        )
    )


def _recorded_steps(recording: LoadedRecording) -> object:
    settings = recording.meta.get("settings", {})
    return settings.get("OTEL_TORCH_STEPS", settings.get("FASTVIDEO_TRACE_STEPS"))


def _listed(models: set[str]) -> str:
    """Return models as text; rows of other tools need not name theirs.

    >>> _listed({"VAE", "DiT"}), _listed({""}), _listed(set())
    ('DiT, VAE', 'a model that its rows do not name', 'none')
    """
    names = sorted(models - {""})
    if "" in models:
        names.append("a model that its rows do not name")
    return ", ".join(names) or "none"


class _ReadProgress:
    """Reports how much of the recordings has been read, at most ten times a second."""

    def __init__(self, sources: list[RecordingSource], progress: Callable[[str], None]) -> None:
        self._total = sum(source.size for source in sources)
        self._read = 0
        self._progress = progress
        self._next_report = 0.0

    def __call__(self, count: int) -> None:
        self._read += count
        now = time.monotonic()
        if now >= self._next_report:
            self._next_report = now + _PROGRESS_INTERVAL_S
            self._progress(f"{100 * self._read / max(self._total, 1):.0f} % read")
