"""Which ends of two programs belong together, and whether they are equal.

A named end is what a model returned, or a parameter after an optimizer's step. An end without a
name is what the program made last and reads no more: a sampler or a renderer is no model.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from otel_torch.graph.distances import relative_distances
from otel_torch.graph.equal_rows import find_equal_rows
from otel_torch.graph.equality import LEAST_NUMEL, MOVED, PART, TERM, has_information, same_numbers
from otel_torch.graph.error_model import JUMP, MOST_ERROR
from otel_torch.graph.graph import BEHIND_FORWARDS, MEAN, NOTHING, Flags, Floats, Indices, Values
from otel_torch.graph.shapes import have_same_order, without_ones
from otel_torch.graph.states import RIGHT, ComparedProgram, Programs, computed_from, read_by

Limits = tuple[Floats, Floats]


@dataclass(frozen=True, slots=True)
class EndPair:
    """Two ends that should be equal: indices into each graph's ends, error, limit.

    Attributes:
        is_by_rows: The rows of one are looked for in the other program's ends.
    """

    name: str
    reference: int
    port: int
    error: float
    limit: float
    is_right: bool
    is_by_rows: bool = False

    @property
    def is_comparable(self) -> bool:
        """Whether both have equally many elements, or one is a part or has rows of the other."""
        return self.is_right or self.error < np.inf


def pair_ends(
    programs: Programs, limits: Limits, *, is_one_program: bool = False
) -> tuple[list[EndPair], list[list[str]]]:
    """Return pairs of ends, and the names of ends that only one program has, of each.

    Ends are paired by name, or in order where no name is common and both programs have equally
    many. One program may call a model for what the other one computes in several calls, or call
    models in another order: ends of unequal size, or that are other ends of the other program, are
    no pair as long as something reads them. They and ends without a name are paired by content.
    Where only one program goes on after what was recorded, what is left of both tells nothing. One
    program that runs twice makes the same last, also where one of its runs came by the other's end
    and went on.
    """
    counts = _what_counts(programs)
    ends = [compare_ends(programs, limits, *pair) for pair in _same_names(programs, counts)]
    by_rows = _same_rows(
        programs, limits, counts, {pair.port for pair in ends if pair.is_comparable}
    )
    compared_by_rows = {pair.port for pair in by_rows}
    ends = [pair for pair in ends if pair.port not in compared_by_rows] + by_rows
    kept = [pair for pair in ends if pair.is_right or not _is_no_pair(programs, pair, ends)]
    paired = [{pair.reference for pair in kept}, {pair.port for pair in kept}]
    names = [program.graph.end_names for program in programs]
    loose = [[end for end in counts[side] if end not in paired[side]] for side in (0, 1)]
    if programs[0].graph.is_cut == programs[1].graph.is_cut:
        # a wide limit makes a value no less of an end
        informed = [has_information(program.graph.values) for program in programs]
        same = _same_content(programs, loose, informed, is_one_program=is_one_program)
        pairs = [compare_ends(programs, limits, *pair) for pair in same]
        kept += [
            pair for pair in pairs if pair.is_right or not _show_the_same(programs, limits, pair)
        ]
        if not any(pair.is_comparable for pair in kept):
            kept += [compare_ends(programs, limits, *pair) for pair in _same_shown(programs, loose)]
    kept = _without_passed(programs, kept)
    named = [{pair.reference for pair in ends}, {pair.port for pair in ends}]
    # of which ranks have neither a whole nor a part, such as padded rows: it is said
    odd = [pair for pair in ends if pair.error == np.inf and not _is_elsewhere(programs, pair)]
    named[0] -= {pair.reference for pair in odd} - paired[0]
    unpaired = [
        [names[side][end] for end in counts[side] if names[side][end] and end not in named[side]]
        for side in (0, 1)
    ]
    return kept, unpaired


def _what_counts(programs: Programs) -> list[list[int]]:
    """Return the ends of each program that count."""
    are_passed = [program.graph.passed for program in programs]
    if all(passed.any() for passed in are_passed):
        return [np.flatnonzero(~passed).tolist() for passed in are_passed]
    return [list(range(len(passed))) for passed in are_passed]


def _same_names(programs: Programs, counts: list[list[int]]) -> list[tuple[int, int]]:
    """Pair ends of one name, or in order where no name is common and both have equally many;
    several ranks have ends of one name each.
    """
    named: list[dict[str, list[int]]] = []
    for program, ends in zip(programs, counts, strict=True):
        named.append(defaultdict(list))
        for end in ends:
            if name := program.graph.end_names[end]:
                named[-1][name].append(end)
    common = [(name, name) for name in named[0] if name in named[1]]
    in_order = zip(*named, strict=True) if len(named[0]) == len(named[1]) else ()
    return [
        (own, other)
        for name, same in common or in_order
        for own in named[0][name]
        for other in named[1][same]
        if common or _weight(programs[0], own) == _weight(programs[1], other)
    ]


def _is_no_pair(programs: Programs, pair: EndPair, ends: Sequence[EndPair]) -> bool:
    """Return whether two ends of one name are not the same, or say nothing yet."""
    if _is_elsewhere(programs, pair) or _is_term(programs, pair) or _is_on_the_way(programs, pair):
        return True
    are_read = all(read_by(program, value) for program, value in _in_programs(programs, pair))
    is_between = are_read or _is_in_both(programs, pair)
    if is_between and _are_called_unequally(programs, pair):
        return True
    same = [other for other in ends if pair.reference == other.reference or pair.port == other.port]
    return len(same) > 1 and _is_of_another_rank(programs, pair, ends)


def _without_passed(programs: Programs, pairs: list[EndPair]) -> list[EndPair]:
    """Leave out what models return otherwise and the programs go on with, if each program has the
    other's value, too, or all that both compute from it is right: logits here and logarithms there.

    Of two trainings this is so of what a forward returns alone: gradients are ends, of which an
    optimizer may hide much.
    """
    are_trainings = all(program.graph.passed.any() for program in programs)
    are_open = [
        bool(pair.name and not pair.is_right)
        and all(
            bool(read_by(program, value)) and (not are_trainings or _is_of_forward(program, value))
            for program, value in _in_programs(programs, pair)
        )
        for pair in pairs
    ]
    last = [pair for pair, is_open in zip(pairs, are_open, strict=True) if not is_open]
    return [
        pair
        for pair, is_open in zip(pairs, are_open, strict=True)
        if not (is_open and (_is_in_both(programs, pair) or _comes_out_right(programs, pair, last)))
    ]


def _is_of_forward(program: ComparedProgram, value: int) -> bool:
    nodes, node = program.graph.nodes, program.maker[value]
    return node >= 0 and program.graph.phases[nodes.phase[node]] not in BEHIND_FORWARDS


def _is_in_both(programs: Programs, pair: EndPair) -> bool:
    return all(
        program.state[value] == RIGHT and program.is_informed[value]
        for program, value in _in_programs(programs, pair)
    )


def _comes_out_right(programs: Programs, pair: EndPair, last: Sequence[EndPair]) -> bool:
    """Return whether an end that tells something is computed from a pair in both programs, and all
    such ends are right.
    """
    reached = [computed_from(program, value) for program, value in _in_programs(programs, pair)]
    behind = [
        end
        for end in last
        if all(
            value in own and program.is_informed[value]
            for own, (program, value) in zip(reached, _in_programs(programs, end), strict=True)
        )
    ]
    return bool(behind) and all(end.is_right for end in behind)


def _show_the_same(programs: Programs, limits: Limits, pair: EndPair) -> bool:
    """Return whether each program reads its end for numbers alone, such as a loss that it prints,
    and these are equal: on the way to them they need not meet.
    """
    (first, own), (second, other) = (
        (program, _shown_by(program, value)) for program, value in _in_programs(programs, pair)
    )
    distances = np.abs(
        first.graph.values.statistics[own, MEAN][:, None]
        - second.graph.values.statistics[other, MEAN]
    )
    legal = np.hypot.outer(limits[0][own], limits[1][other])
    are_equal = distances <= legal * np.abs(first.graph.values.statistics[own, MEAN])[:, None]
    return bool(own and other and are_equal.any(0).all() and are_equal.any(1).all())


def _shown_by(program: ComparedProgram, value: int) -> list[int]:
    """Return the single numbers that are computed from a value and make nothing further."""
    return [
        made
        for made in computed_from(program, value)
        if program.graph.values.numel[made] == 1
        and not any(program.makes[node] for node in program.readers[made])
    ]


def _in_programs(programs: Programs, pair: EndPair) -> list[tuple[ComparedProgram, int]]:
    return list(zip(programs, _values_of(programs, pair), strict=True))


def _is_of_another_rank(programs: Programs, pair: EndPair, ends: Sequence[EndPair]) -> bool:
    """Return whether a rank's end of one name is another one: stages of a pipeline have layers of
    one name, and one of them returns what the model does.
    """
    if pair.error == np.inf or _is_loss_beside_others(programs, pair, ends):
        return True
    return _are_other_ends(programs, _values_of(programs, pair))


def _is_elsewhere(programs: Programs, pair: EndPair) -> bool:
    """Return whether a program goes on with what a model returned, and its counterpart is another
    end, or several.
    """
    if not any(read_by(program, value) for program, value in _in_programs(programs, pair)):
        return False
    return pair.error == np.inf or _are_other_ends(programs, _values_of(programs, pair))


def _is_on_the_way(programs: Programs, pair: EndPair) -> bool:
    """Return whether what a model returned is an intermediate value of one program, and the result
    of the other: a sampler in plain code calls its model several times, one that is a model returns
    once.

    The program that goes on must end with a value of the same shape.
    """
    for (program, value), (other, result) in permutations(_in_programs(programs, pair)):
        graph, shape = program.graph, other.graph.values.shape[result]
        if not read_by(program, value) or read_by(other, result):
            continue
        results = [end for end in graph.ends.tolist() if not read_by(program, end)]
        returns_more = sum(map(bool, graph.end_names)) > sum(map(bool, other.graph.end_names))
        if returns_more and shape in [graph.values.shape[end] for end in results]:
            return True
    return False


def _are_called_unequally(programs: Programs, pair: EndPair) -> bool:
    """Return whether one program calls more models than the other, so that an end's number says
    nothing: two images in one batch here, and one after the other there.
    """
    if any(program.graph.is_split for program in programs):  # each rank has ends of its own
        return False
    base = pair.name.partition("#")[0]
    first, second = (
        sum(name.partition("#")[0] == base for name in program.graph.end_names)
        for program in programs
    )
    return first != second


def _are_other_ends(programs: Programs, values: Sequence[int]) -> bool:
    """Return whether each of two values is an end of the other program, whatever its name."""
    return all(
        bool((other.side.group[other.graph.ends] == program.side.group[value]).any())
        for program, value, other in zip(programs, values, programs[::-1], strict=True)
    )


def _is_loss_beside_others(programs: Programs, pair: EndPair, ends: Sequence[EndPair]) -> bool:
    """Return whether an end is too small to tell anything and there are others: the loss of a
    rank's own rows.
    """
    numel = programs[0].graph.values.numel[programs[0].graph.ends]
    return bool(numel[pair.reference] < LEAST_NUMEL) and any(
        numel[other.reference] >= LEAST_NUMEL for other in ends
    )


def _is_term(programs: Programs, pair: EndPair) -> bool:
    """Return whether an end is one rank's term of a sum that is right, and the program uses it
    further: its results tell more.
    """
    return any(
        program.side.relation[value] == TERM and read_by(program, value)
        for program, value in _in_programs(programs, pair)
    )


def _same_shown(programs: Programs, loose: list[list[int]]) -> list[tuple[int, int]]:
    """Pair single numbers that nothing reads, such as losses, where no other ends can be compared:
    a program without modules shows nothing else.

    Nothing is known if all pairs are right, and one that is wrong has no counterpart.
    """
    shown = [
        (program.graph.values.numel == 1) & np.array([not nodes for nodes in program.readers], bool)
        for program in programs
    ]
    pairs = _same_content(programs, loose, shown, is_one_program=False)
    wrong = [
        {end for end in ends if _is_informed(program, end, own) and not _is_right(program, end)}
        for program, ends, own in zip(programs, loose, shown, strict=True)
    ]
    is_paired = any(pair[side] in wrong[side] for pair in pairs for side in (0, 1))
    is_open = any(
        ends and not any(program.graph.end_names)
        for program, ends in zip(programs, wrong, strict=True)
    )
    return [] if is_open and not is_paired else pairs


def _same_content(
    programs: Programs, loose: list[list[int]], informed: list[Flags], *, is_one_program: bool
) -> list[tuple[int, int]]:
    """Pair ends that are equal, then what else is of one shape: the nearest to each other, and the
    others in order; then what has such a shape with neighboring axes merged: of what was made last
    a view is not seen.

    Args:
        informed: The values of each program that tell something.
    """
    pairs: list[tuple[int, int]] = []
    for kind in ("content", "near", "shape", *(("any",) if is_one_program else ())):
        waiting: list[dict[object, list[int]]] = []
        for place, program in enumerate(programs):
            paired = {pair[place] for pair in pairs}
            waiting.append(defaultdict(list))
            for end in loose[place]:
                key = None if end in paired else _key(program, end, kind, informed[place])
                if key is not None:
                    waiting[place][key].append(end)
        for key, own in waiting[0].items():
            same = (own, waiting[1][key])
            pairs += _nearest(programs, same) if kind == "near" else zip(*same, strict=False)
    paired_ends = [{pair[place] for pair in pairs} for place in (0, 1)]
    left = [
        [end for end in side if end not in paired]
        for side, paired in zip(loose, paired_ends, strict=True)
    ]
    for end in left[0]:
        merged = next((own for own in left[1] if _are_merged(programs, (end, own), informed)), None)
        if merged is not None:
            pairs.append((end, merged))
            left[1].remove(merged)
    return [pair for pair in pairs if any(map(_is_informed, programs, pair, informed))]


def _nearest(programs: Programs, ends: tuple[list[int], list[int]]) -> Iterator[tuple[int, int]]:
    """Yield pairs of ends of one shape that are the nearest: what a model returns may be a result
    here and a step on the way to it there.
    """
    tables = programs[0].graph.values, programs[1].graph.values
    values = [program.graph.ends[own] for program, own in zip(programs, ends, strict=True)]
    for own, other, distance in nearest_in_order(tables, (values[0], values[1])):
        if distance < MOST_ERROR:
            yield ends[0][own], ends[1][other]


def nearest_in_order(
    tables: tuple[Values, Values], values: tuple[Indices, Indices]
) -> list[tuple[int, int, float]]:
    """Return places of values of one size that belong together, with their distances up to
    `MOST_ERROR`: in the order in which both programs make them, so that these are the smallest.
    Only where that makes them far more distant, the nearest are pairs in any order.
    """
    first, second = (table.sketch[own] for table, own in zip(tables, values, strict=True))
    rows, columns = np.indices((len(first), len(second))).reshape(2, -1)
    distances = relative_distances(first[rows], second[columns]).reshape(len(first), len(second))
    distances = np.minimum(np.nan_to_num(distances, nan=MOST_ERROR), MOST_ERROR)
    in_order, in_any = _pair_in_order(distances), _pair_in_any_order(distances)
    is_ordered = _total(distances, in_order) <= JUMP * _total(distances, in_any)
    pairs = in_order if is_ordered else in_any
    return [(own, other, float(distances[own, other])) for own, other in pairs]


def _total(distances: Floats, pairs: Sequence[tuple[int, int]]) -> float:
    return float(sum(distances[pair] for pair in pairs))


def _pair_in_order(distances: Floats) -> list[tuple[int, int]]:
    """Return pairs of all rows or all columns, in the order of both, whose distances have the
    smallest sum.

    >>> _pair_in_order(np.array([[0.5, 0.1, 0.9], [0.1, 0.3, 0.4]]))
    [(0, 1), (1, 2)]
    """
    count, columns = distances.shape
    if count > columns:
        return [(row, column) for column, row in _pair_in_order(distances.T)]
    spare = columns - count
    # the smallest sum up to each row, by how many columns were left out before it
    sums = np.zeros((count, spare + 1))
    for row in range(count):
        before = np.minimum.accumulate(sums[row - 1]) if row else 0.0
        sums[row] = before + distances[row, row : row + spare + 1]
    pairs = []
    left_out = spare
    for row in reversed(range(count)):
        left_out = int(sums[row, : left_out + 1].argmin())
        pairs.append((row, row + left_out))
    return pairs[::-1]


def _pair_in_any_order(distances: Floats) -> list[tuple[int, int]]:
    """Return pairs that have no nearer ones, the nearest first."""
    left, pairs = distances.copy(), []
    for _ in range(min(left.shape)):
        own, other = map(int, np.unravel_index(left.argmin(), left.shape))
        pairs.append((own, other))
        left[own], left[:, other] = np.inf, np.inf
    return pairs


def _are_merged(programs: Programs, pair: tuple[int, int], informed: Sequence[Flags]) -> bool:
    """Return whether two ends that are not right, and tell something, have one order of their
    elements.
    """
    if any(map(_is_right, programs, pair)):
        return False
    if _weight(programs[0], pair[0]) != _weight(programs[1], pair[1]):
        return False
    first, second = (
        program.graph.values.shape[program.graph.ends[end]]
        for program, end in zip(programs, pair, strict=True)
    )
    return all(map(_is_informed, programs, pair, informed)) and have_same_order(first, second)


def _weight(program: ComparedProgram, end: int) -> object:
    """Return what the weight of an end held at first, None without one: only gradients and updates
    of equal weights are a pair. What the other program has split or fused equals nothing.
    """
    weight = program.graph.end_weights[end]
    if weight == NOTHING:
        return None
    return int(program.side.group[weight]) if program.state[weight] == RIGHT else object()


def _is_informed(program: ComparedProgram, end: int, informed: Flags) -> bool:
    return bool(informed[program.graph.ends[end]])


def _is_right(program: ComparedProgram, end: int) -> bool:
    return bool(program.state[program.graph.ends[end]] == RIGHT)


def _key(program: ComparedProgram, end: int, kind: str, informed: Flags) -> object:
    """Return what two ends have in common: their content if it is right, else their shape without
    sizes of 1; None if an end tells nothing. Where right and wrong ones meet, NaN and Inf tell.
    """
    value = int(program.graph.ends[end])
    if kind == "any":
        is_known = informed[value] or program.graph.values.nonfinite[value] > 0
    else:
        is_known = informed[value] and (program.state[value] == RIGHT) == (kind == "content")
    if not is_known or (kind == "near" and program.graph.values.numel[value] < LEAST_NUMEL):
        return None
    if kind == "content":
        return int(program.side.group[value])
    return without_ones(program.graph.values.shape[value]), _weight(program, end)


def compare_ends(programs: Programs, limits: Limits, own: int, other: int) -> EndPair:
    """Compare two ends; of ends the order of the elements counts, unless the shapes differ, or what
    they belong to may be turned as well.
    """
    graphs = programs[0].graph, programs[1].graph
    values = int(graphs[0].ends[own]), int(graphs[1].ends[other])
    first, second = graphs[0].values, graphs[1].values
    legal = (
        max(limits[side][value], programs[side].arriving[value])
        for side, value in enumerate(values)
    )
    limit = math.hypot(*map(float, legal))
    name = graphs[1].end_names[other]
    if min(first.numel[values[0]], second.numel[values[1]]) < 0:
        return EndPair(name, own, other, float("nan"), limit, True)  # it was not measured
    if first.numel[values[0]] != second.numel[values[1]]:
        is_part = _is_part(programs, values)
        error = 0.0 if is_part else _error_beside_parts(programs, values)
        return EndPair(name, own, other, error, limit, is_part or error <= limit)
    error = float(relative_distances(first.sketch[[values[0]]], second.sketch[[values[1]]])[0])
    is_equal = (error <= limit or limit >= MOST_ERROR) and first.nonfinite[
        values[0]
    ] == second.nonfinite[values[1]]
    reordered = same_numbers(
        first.statistics[[values[0]]],
        second.statistics[[values[1]]],
        first.numel[[values[0]]],
        np.array([limit]),
    )
    is_layout = first.shape[values[0]] != second.shape[values[1]] and not np.isnan(reordered[0])
    is_equal = is_equal or _are_turned(programs, values)
    return EndPair(name, own, other, error, limit, bool(is_equal or is_layout))


def _are_turned(programs: Programs, values: tuple[int, int]) -> bool:
    """Return whether two gradients or updates are equal with their axes moved, as their weights
    are: of a square one the shape does not show it. What steps on with a turned one is wrong.
    """
    sides = [program.side for program in programs]
    relations = [side.relation[value] for side, value in zip(sides, values, strict=True)]
    groups = [side.group[value] for side, value in zip(sides, values, strict=True)]
    is_same = relations == [MOVED, MOVED] and groups[0] == groups[1]
    return is_same and all(map(_is_behind_forwards, programs, values))


def _is_behind_forwards(program: ComparedProgram, value: int) -> bool:
    """Return whether a value is made behind a forward, or of such, as a clipped gradient."""
    node = program.maker[value]
    made = [value, *(read for read in program.reads[node] if read >= 0)] if node >= 0 else []
    return any(program.maker[own] >= 0 and not _is_of_forward(program, own) for own in made)


def _same_rows(
    programs: Programs, limits: Limits, counts: list[list[int]], fitting: set[int]
) -> list[EndPair]:
    """Pair the other ends of the port with one of the reference whose rows are as long, where the
    programs compute the same tokens in other batches.

    An end is right if its rows are in ends of the reference, whatever these are called. What was
    made last, without a name, is compared only with what it has rows of, if other ends have names,
    or it is right elsewhere.
    """
    graphs = programs[1].graph, programs[0].graph
    names = graphs[0].end_names
    has_names = any(names)
    ends = {int(graphs[0].ends[end]): end for end in counts[1] if end not in fitting}
    chosen = [np.zeros(len(graph.values), bool) for graph in graphs]
    chosen[0][list(ends)] = True
    chosen[1][graphs[1].ends] = True
    found = find_equal_rows(*graphs, (limits[1], limits[0]), *chosen)
    are_right = found.are_all(programs[0].state == RIGHT)
    pairs = []
    for value, partner, share, is_right in zip(
        found.values.tolist(),
        found.partner.tolist(),
        found.unmatched.tolist(),
        are_right.tolist(),
        strict=True,
    ):
        # the end that has most of the rows, if one has
        nearest = [own for own in counts[0] if graphs[1].ends[own] == partner]
        name = names[ends[value]]
        is_elsewhere = not name and (has_names or programs[1].state[value] == RIGHT)
        for own in nearest + ([] if is_elsewhere else counts[0]):
            reference = int(graphs[1].ends[own])
            if _have_same_rows(programs, (reference, value)):
                limit = float(np.hypot(limits[0][reference], limits[1][value]))
                pairs.append(EndPair(name, own, ends[value], share, limit, is_right, True))
                break
    return pairs


def count_lacked_rows(programs: Programs, limits: Limits, pairs: Sequence[EndPair]) -> int:
    """Return how many rows of the reference's ends are in no end of the port, of ends that were
    compared by rows: the reference computed more.
    """
    graphs = programs[0].graph, programs[1].graph
    chosen = [np.zeros(len(graph.values), bool) for graph in graphs]
    by_rows = [pair for pair in pairs if pair.is_by_rows]
    chosen[0][values_of_ends(programs, by_rows)[0]] = True
    chosen[1][graphs[1].ends] = True
    found = find_equal_rows(*graphs, limits, *chosen)
    counts = [math.prod(graphs[0].values.shape[value][:-1]) for value in found.values.tolist()]
    return round(float(np.dot(found.unmatched, counts)))


def _have_same_rows(programs: Programs, values: tuple[int, int]) -> bool:
    """Return whether the rows of two values are equally long."""
    shapes = [
        program.graph.values.shape[value] for program, value in zip(programs, values, strict=True)
    ]
    return all(shapes) and shapes[0][-1] == shapes[1][-1]


def _is_part(programs: Programs, values: tuple[int, int]) -> bool:
    """Return whether one of two values is a part of the other, as the shard of a rank is."""
    groups = [program.side.group[value] for program, value in zip(programs, values, strict=True)]
    states = [program.state[value] for program, value in zip(programs, values, strict=True)]
    if groups[0] == groups[1] and states == [RIGHT, RIGHT]:
        return True
    for side, value in enumerate(values):
        own = programs[side].side
        partner = own.partner[value]
        other = programs[1 - side].side.group[[partner, values[1 - side]]]
        if own.relation[value] == PART and other[0] == other[1]:
            return True
    return False


def _error_beside_parts(programs: Programs, values: tuple[int, int]) -> float:
    """Return how far one of two values is from the nearest part of the other one; infinity if that
    has no part of its size.
    """
    nearest = math.inf
    for side, (whole, part) in enumerate((values, values[::-1])):
        wholes, parts = programs[side], programs[1 - side].graph.values
        for cut in wholes.parts.get(whole, ()):
            if wholes.graph.values.numel[cut] == parts.numel[part]:
                sketches = wholes.graph.values.sketch[[cut]], parts.sketch[[part]]
                nearest = min(nearest, float(relative_distances(*sketches)[0]))
    return nearest


def is_bare_number(programs: Programs, pair: EndPair) -> bool:
    """Return whether two ends are single numbers that have no name in common."""
    is_named = pair.name and programs[0].graph.end_names[pair.reference]
    values = _in_programs(programs, pair)
    return not is_named and all(program.graph.values.numel[value] == 1 for program, value in values)


def are_by_shape(programs: Programs, ends: Sequence[EndPair]) -> bool:
    """Return whether no end has a name in both programs, and the only ones that can be compared are
    single numbers, or a few of many, all of them wrong.
    """
    pairs = [pair for pair in ends if pair.is_comparable]
    if any(pair.name and programs[0].graph.end_names[pair.reference] for pair in pairs):
        return False
    if pairs and all(is_bare_number(programs, pair) for pair in pairs):
        return True
    return bool(pairs) and are_few_and_wrong(programs, pairs)


def are_few_and_wrong(programs: Programs, pairs: Sequence[EndPair]) -> bool:
    """Return whether pairs are all wrong, and fewer than the other ends of each program."""
    are_few = all(2 * len(pairs) < len(program.graph.ends) for program in programs)
    return are_few and not any(pair.is_right for pair in pairs)


def beside_shown(
    programs: Programs, ends: Sequence[EndPair], shown: Sequence[tuple[int, int]]
) -> list[EndPair]:
    """Return the pairs that count beside values that both programs print: no single numbers, and of
    what was paired by its shape alone only what both compute such values from.
    """
    kept = [pair for pair in ends if not is_bare_number(programs, pair)]
    if not are_by_shape(programs, ends):
        return kept
    computed = [
        [computed_from(program, value) for program, value in _in_programs(programs, pair)]
        for pair in kept
    ]
    return [
        pair
        for pair, (own, other) in zip(kept, computed, strict=True)
        if any(first in own and second in other for first, second in shown)
    ]


def in_order(programs: Programs, pairs: Sequence[EndPair]) -> list[EndPair]:
    """Return pairs of ends in the order in which the reference made them."""
    graph, maker = programs[0].graph, programs[0].maker
    return sorted(pairs, key=lambda pair: maker[int(graph.ends[pair.reference])])


def values_of_ends(programs: Programs, pairs: Sequence[EndPair]) -> list[list[int]]:
    """Return the values of pairs of ends in each program."""
    values = [_values_of(programs, pair) for pair in pairs]
    return [[pair[side] for pair in values] for side in (0, 1)]


def _values_of(programs: Programs, pair: EndPair) -> tuple[int, int]:
    """Return the values of two ends, in the reference and in the port."""
    reference, port = (program.graph.ends for program in programs)
    return int(reference[pair.reference]), int(port[pair.port])
