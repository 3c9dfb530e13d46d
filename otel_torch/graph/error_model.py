"""The error model: how far apart two values may be although both programs are right.

Legal error flows along the graph with the values. Each operation rounds to its dtype; roundings of
operations that follow each other are independent and add up as squares. If the reference was
recorded again with noise, the error of each of its values is known and replaces the model.
"""

from __future__ import annotations

import json
import math

import numpy as np

from otel_torch.graph.distances import most_of_estimate, relative_distances, sketch_norms
from otel_torch.graph.graph import ABS_MEAN, MAX, MEAN, MIN, Flags, Floats, Graph, Values

# How many roundings an operation may be off by. The model knows neither how long a sum is nor what
# cancels in it: kernels of torch that sum 4,096 numbers in another order differ by 5 roundings.
ROUNDINGS = 8.0
# A coarser dtype than float32 is summed in float32 and rounded once. On eight clean pairs of models
# in bfloat16 no value was off by more than 0.62 of what one rounding an operation gives.
COARSE_ROUNDINGS, FLOAT32_ROUNDOFF = 1.5, 2.0**-24
# How many times its error under noise a right value may be off: two draws of one distribution
# (1.4 of its size) with the 9 % of a sketch's estimate, in all values of a recording at once.
NOISE_FACTOR = 3.0
# An operation that multiplies the error of what it reads by more than this is doubtful, although
# its result is still within the limit of its depth.
JUMP = 16.0
# A value that may be off by half its size says nothing: what two nearly equal terms leave is equal
# to any value by chance.
MOST_ERROR = 0.5
# How far statistics may be off by themselves, relative: a few hundred of them, each rounded to
# single precision, are added up to those of a whole.
STATISTICS_ERROR = 1e-5
# What a value that does not round may be off: sketch and statistics are in single precision.
SKETCH_ROUNDOFF = 2.0**-22


def rounding_errors(roundoff: Floats) -> Floats:
    """Return how far one operation may be off by itself, by the unit roundoff of its dtype."""
    factor = np.where(roundoff > FLOAT32_ROUNDOFF, COARSE_ROUNDINGS, ROUNDINGS)
    errors: Floats = factor * roundoff
    return errors


def rounded_to(graph: Graph) -> Floats:
    """Return the unit roundoff of the dtype that each value was cast to, though it may have been
    cast back or moved since; 0 for others.
    """
    nodes, roundoff = graph.nodes, graph.values.roundoff
    rounded = np.zeros(len(roundoff))
    for node in np.flatnonzero(nodes.casts | nodes.moves).tolist():
        reads, makes = nodes.reads[node], nodes.makes[node]
        reads = reads[reads >= 0]
        before = rounded[reads].max(initial=0.0)
        coarser = makes[roundoff[makes] > roundoff[reads].max(initial=0.0)]
        rounded[makes] = before
        if nodes.casts[node]:
            rounded[coarser] = np.maximum(roundoff[coarser], before)
    return rounded


def is_coarse(graph: Graph) -> bool:
    """Return whether a program computes in a dtype that is coarser than float32."""
    return bool(graph.values.roundoff.max(initial=0.0) > FLOAT32_ROUNDOFF)


def legal_errors(
    graph: Graph, measured_errors: Floats | None = None, least_errors: Floats | None = None
) -> Floats:
    """Return how far each value may be off by rounding alone, relative L2, per value.

    Of what an operation reads the largest error counts: values that were computed from each other
    share their errors, so that their squares would count them twice in each residual connection.
    A sum takes the errors of its terms by their sizes: what a block adds to a residual stream
    is small beside the stream, and so is its error. What a difference leaves may be small, too,
    beside the errors of both.

    Args:
        measured_errors: Of each value beside its equal in the other program, NaN without one. What
            is computed from it starts with a multiple of that, whatever came before it.
        least_errors: What each value may be off by at least, as `angle_errors` has it.
    """
    if measured_errors is None:
        measured_errors = np.full(len(graph.values), np.nan)
    if least_errors is None:
        least_errors = np.zeros(len(graph.values))
    least: list[float] = (least_errors**2).tolist()
    measured: list[float] = ((JUMP * measured_errors) ** 2).tolist()
    values, nodes = graph.values, graph.nodes
    squares: list[float] = (rounding_errors(values.roundoff) ** 2).tolist()
    rounds = list(squares)
    norms: list[float] = sketch_norms(np.nan_to_num(values.sketch)).tolist()
    all_reads, all_makes = nodes.reads.lists(), nodes.makes.lists()
    all_factors = _factors(values, norms, all_reads, all_makes)
    to_whole = _rounded_to_whole(graph)
    rows = zip(all_reads, all_makes, nodes.moves.tolist(), all_factors, strict=True)
    for reads, makes, is_move, factors in rows:
        known = [value for value in reads if value >= 0]
        largest = max((squares[value] for value in known), default=0.0)
        for value in makes:
            before = largest
            if factors:
                terms = zip(known, factors, strict=True)
                before = sum(squares[t] * (f * norms[t] / norms[value]) ** 2 for t, f in terms)
                if set(factors) != {1.0}:
                    before = max(before, largest)
            if to_whole[value]:
                error = math.sqrt(squares[known[0]]) * norms[known[0]]
                count = _off_by_one(error, int(values.numel[value]))
                before = max(before, count / norms[value] ** 2)
            squares[value] = max(before, rounds[value]) if is_move else before + rounds[value]
            squares[value] = max(squares[value], least[value])
            if measured[value] < squares[value]:
                squares[value] = max(measured[value], rounds[value])
    errors: Floats = np.sqrt(np.array(squares))
    return errors


def angle_errors(graph: Graph, errors: Floats) -> Floats:
    """Return how far functions of angles may be off by what the angles are off, relative L2; 0 for
    all other values.

    A sine is off by as much as its angle, and not by as large a share: of an angle of 1,000 that
    rounds otherwise, by a thousand times as much.

    Args:
        errors: Of each value, relative to its equal in the other program; NaN where it has none.
    """
    values, nodes = graph.values, graph.nodes
    norms = sketch_norms(np.nan_to_num(values.sketch))
    off = np.where(errors > 0, errors, 0.0) * np.where(np.isfinite(norms), norms, 0.0)
    most_off = most_of_estimate(values.sketch.shape[1]) * off
    largest = np.zeros(len(values))
    for node in np.flatnonzero(nodes.is_of_angles).tolist():
        reads, makes = nodes.reads[node], nodes.makes[node]
        made = makes[norms[makes] > 0]
        largest[made] = most_off[reads[reads >= 0]].max(initial=0.0) / norms[made]
    return largest


def _rounded_to_whole(graph: Graph) -> Flags:
    """Return which values are several whole numbers, rounded from as many others: pixels.

    Numbers change by a square of 1/12, on average, if they are rounded to the nearest, and by 1/3
    if they are cut; a sketch tells it within half and twice of that.
    """
    values, nodes = graph.values, graph.nodes
    are_several = values.statistics[:, MAX] > values.statistics[:, MIN] + 1
    are_several &= values.sketch.any(axis=1)  # few numbers may cancel in it
    rounded = np.zeros(len(values), bool)
    for node in np.flatnonzero(nodes.rounds_to_whole | nodes.casts).tolist():
        reads, makes = nodes.reads[node], nodes.makes[node]
        if len(reads) != 1 or reads[0] < 0:
            continue
        is_whole = nodes.rounds_to_whole[node] | (values.roundoff[makes] == 0)
        is_same_size = values.numel[makes] == values.numel[reads[0]]
        for value in makes[are_several[makes] & is_whole & is_same_size].tolist():
            with np.errstate(invalid="ignore"):  # of masks
                change = sketch_norms(values.sketch[[value]] - values.sketch[reads])[0] ** 2
            rounded[value] = 1 / 24 <= change / values.numel[value] <= 2 / 3
    return rounded


def _off_by_one(error: float, numel: int) -> int:
    """Return how many of some numbers may be rounded to the next whole one, at most.

    An error of normal distribution crosses the middle between two whole numbers as often as its
    mean size is, in units of 1.

    Args:
        error: Of all numbers together before they are rounded, L2.
    """
    expected = math.sqrt(2 / math.pi * numel) * error
    return math.floor(min(expected + NOISE_FACTOR * math.sqrt(expected), numel))


def _factors(
    values: Values, norms: list[float], all_reads: list[list[int]], all_makes: list[list[int]]
) -> list[list[float]]:
    """Return by what each node multiplies its terms if it adds values of equal size; else nothing.

    The sketch of a sum is the sum of the sketches, so the factors are found from them: 1 and -1 of
    a difference, -3 and 4 of guidance.
    """
    factors: list[list[float]] = [[] for _ in all_reads]
    numel, rounds = values.numel, rounding_errors(values.roundoff)
    # masks hold the smallest number there is, whose square is not finite
    sketch = np.nan_to_num(values.sketch)
    for node, (reads, makes) in enumerate(zip(all_reads, all_makes, strict=True)):
        if len(makes) != 1 or len(reads) < 2 or min(reads) < 0:
            continue
        if any(numel[read] != numel[makes[0]] for read in reads):
            continue
        made, terms, size = sketch[makes[0]], sketch[reads], norms[makes[0]]
        if size == 0 or not all(math.isfinite(norms[value]) for value in (makes[0], *reads)):
            continue
        slack = rounds[makes[0]] * size + SKETCH_ROUNDOFF * max(norms[read] for read in reads)
        if np.linalg.norm(made - terms.sum(axis=0)) <= slack:
            factors[node] = [1.0] * len(reads)
            continue
        difference = [1.0, -1.0]
        if len(reads) == 2 and np.linalg.norm(made - difference @ terms) <= slack:
            factors[node] = difference
            continue
        fitted, _, rank, _ = np.linalg.lstsq(terms.T, made, rcond=JUMP * SKETCH_ROUNDOFF)
        if rank < len(reads):
            continue  # a square, or a quotient that is nearly 1: one term twice fits anything
        if np.linalg.norm(made - fitted @ terms) <= slack:
            factors[node] = fitted.tolist()
    return factors


def arriving_errors(graph: Graph, errors: Floats, limits: Floats) -> tuple[Floats, Flags]:
    """Return how far each value may be off by what came in with the values that it was made from,
    and which values are off by far more than that.

    What is equal in the other program arrives with the error that it has, and not with one that a
    model allows. The sum of terms that cancel has their error beside its own size: it may be all
    rounding, as the gradient of a bias is before a softmax, and with it all that an optimizer makes
    of it.

    Args:
        graph: A program.
        errors: Of each value, relative to its equal in the other program; NaN where it has none.
        limits: Of each value, by the model.
    """
    values, nodes, legal_terms = graph.values, graph.nodes, limits.tolist()
    rounds, known = rounding_errors(values.roundoff).tolist(), errors.tolist()
    arriving = [0.0] * len(values)
    joined: dict[int, dict[int, float]] = {}  # of what was put together: errors by size
    jumps = np.zeros(len(values), bool)
    for value in np.flatnonzero((values.maker < 0) & ~np.isnan(errors)).tolist():
        arriving[value] = known[value]
    norms: list[float] = sketch_norms(np.nan_to_num(values.sketch)).tolist()
    to_whole, of_angles = _rounded_to_whole(graph), angle_errors(graph, errors).tolist()
    rows = zip(nodes.reads.lists(), nodes.makes.lists(), nodes.moves.tolist(), strict=True)
    for node, (reads, makes, is_move) in enumerate(rows):
        columns = _columns(graph.arguments[nodes.argument[node]], reads, makes)
        for place, value in enumerate(makes):
            own = reads if columns is None else columns[place % len(columns)]
            before = _error_before(values, norms, arriving, joined, own, value, nodes.moves[node])
            before = max(before, of_angles[value])
            if len(own) == 1 and norms[value] and _is_sum(values, own[0], value):
                # what an update that is all rounding has changed does not cancel in later steps
                term = min(math.hypot(before, rounds[value]), legal_terms[own[0]])
                before = max(before, term * norms[own[0]] / norms[value])
            if to_whole[value]:
                error = legal_terms[own[0]] * norms[own[0]]
                count = _off_by_one(error, int(values.numel[value]))
                before = max(before, math.sqrt(count) / norms[value])
            if before > MOST_ERROR:
                before = _beside_what_it_changes(values, norms, arriving, own, value, before)
            legal = math.hypot(JUMP * before, JUMP / ROUNDINGS * rounds[value])
            jumps[value] = rounds[value] > 0 and known[value] > legal
            if math.isnan(known[value]):
                arriving[value] = math.hypot(before, 0.0 if is_move else rounds[value])
            else:
                arriving[value] = known[value]
    return np.array(arriving), jumps


def _error_before(
    values: Values,
    norms: list[float],
    arriving: list[float],
    joined: dict[int, dict[int, float]],
    reads: list[int],
    made: int,
    is_move: bool,
) -> float:
    """Return the largest error among what a value is made from.

    Of what is put together, as gradients are in a bucket, each counts by its size: one that is all
    rounding may be nothing beside the others. What is taken out of it again has the error of what
    was put in with as many elements.
    """
    known = [read for read in reads if read >= 0]
    before = max((arriving[read] for read in known), default=0.0)
    if is_move and len(known) > 1 and norms[made]:
        errors: dict[int, float] = {}
        for read in known:
            numel = int(values.numel[read])
            errors[numel] = max(errors.get(numel, 0.0), arriving[read])
        joined[made] = errors
        parts = [arriving[read] * norms[read] / norms[made] for read in known]
        return min(before, math.hypot(*parts))
    if len(known) == 1 and known[0] in joined:
        numel = int(values.numel[made])
        if numel == values.numel[known[0]]:
            joined[made] = joined[known[0]]
        elif is_move:
            return max(before, joined[known[0]].get(numel, 0.0))
    return before


def _beside_what_it_changes(
    values: Values,
    norms: list[float],
    arriving: list[float],
    reads: list[int],
    made: int,
    most: float,
) -> float:
    """Return the error of a value that is one of those it was made from with a small change: a
    parameter after an update that is all rounding.
    """
    errors = [most]
    for read in reads:
        if read >= 0 and values.numel[read] == values.numel[made] and norms[made]:
            change = float(np.linalg.norm(values.sketch[read] - values.sketch[made])) / norms[made]
            # of two programs one may make it with the other sign: twice its size
            errors.append(math.hypot(arriving[read], change, change))
    return float(np.nanmin(errors))


def _columns(argument: str, reads: list[int], makes: list[int]) -> list[list[int]] | None:
    """Return what an operation on lists reads for each of their places; None for any other."""
    if len(makes) < 2:
        return None
    lists = [part for part in json.loads(argument) if isinstance(part, list) and part]
    lengths = {len(part) for part in lists if set(map(type, part)) == {type(None)}}
    if len(lengths) != 1 or len(makes) % max(lengths):
        return None
    count = max(lengths)
    return [reads[place::count] for place in range(count)]


def _is_sum(values: Values, read: int, made: int) -> bool:
    """Return whether a value is a sum over parts of another one: its own sum is the same."""
    if read < 0 or not 0 < values.numel[made] < values.numel[read]:
        return False
    totals = values.statistics[[read, made], MEAN] * values.numel[[read, made]]
    size = values.statistics[read, ABS_MEAN] * values.numel[read]
    with np.errstate(invalid="ignore"):  # infinite sums tell nothing
        return bool(abs(totals[0] - totals[1]) <= STATISTICS_ERROR * size)


class NoiseDiffersError(ValueError):
    """A recording with noise is not of the same operations as the reference."""


def noise_floors(reference: Graph, noise: Graph | None) -> Floats:
    """Return the error of each value of the reference under noise; NaN where unknown.

    That of a single number may be next to nothing by chance: a sum is off by what its terms are.

    Args:
        reference: The reference.
        noise: The same program, recorded with noise: the same operations in the same order.

    Raises:
        NoiseDiffersError: The two are not the same program.
    """
    if noise is None:
        return np.full(len(reference.values), np.nan)
    same = len(noise.values) == len(reference.values) and (_names(noise) == _names(reference))
    if not same:
        raise NoiseDiffersError("the recording with noise ran other operations than the reference")
    values, nodes = reference.values, reference.nodes
    floors = relative_distances(values.sketch, noise.values.sketch)
    norms = sketch_norms(np.nan_to_num(values.sketch))
    for node, makes in enumerate(nodes.makes.lists()):
        reads = nodes.reads[node].tolist()
        if len(makes) == len(reads) == 1 and values.numel[makes[0]] == 1 and norms[makes[0]] > 0:
            (made,), (read,) = makes, reads
            if _is_sum(values, read, made):
                terms = floors[read] * norms[read] / norms[made]
                floors[made] = np.fmax(floors[made], terms)
    return floors


def _names(graph: Graph) -> list[str]:
    return [graph.operations[index] for index in graph.nodes.operation.tolist()]


def base_limits(graph: Graph, errors: Floats) -> Floats:
    """Return the limit of each value for its own part; those of two programs add up as squares."""
    limits: Floats = np.maximum(errors, SKETCH_ROUNDOFF)
    return limits


def limits_with_noise(limits: Floats, floors: Floats, graph: Graph) -> Floats:
    """Replace modelled limits by measured ones, where the reference ran with noise.

    A value never gets a smaller limit than one rounding of its dtype. Which numbers noise rounds to
    the next whole one is chance: of these the model knows more.
    """
    roundoff = np.maximum(graph.values.roundoff, rounded_to(graph))
    least = base_limits(graph, rounding_errors(roundoff))
    measured = np.maximum(NOISE_FACTOR * floors, least)
    if is_coarse(graph):
        # noise in each operation is more than a coarse dtype's rounding: the model may be stricter
        measured = np.fmin(measured, limits)
    measured = np.where(_may_be_off_by_one(graph, limits), np.fmax(measured, limits), measured)
    return np.where(np.isnan(floors), limits, measured)


def _may_be_off_by_one(graph: Graph, limits: Floats) -> Flags:
    """Return which values have whole numbers that may be rounded to the next, or are made of such.

    Args:
        limits: Of the model.
    """
    norms = sketch_norms(np.nan_to_num(graph.values.sketch))
    flags = _rounded_to_whole(graph) & (limits * norms >= 1)
    if flags.any():
        for reads, makes in zip(graph.nodes.reads.lists(), graph.nodes.makes.lists(), strict=True):
            if any(read >= 0 and flags[read] for read in reads):
                flags[makes] = True
    return flags
