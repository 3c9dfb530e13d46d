"""Which value of one program equals which value of the other, wherever in the programs they are.

Equal means: as many elements, and a sketch within the limit. Neither names nor modules nor order of
execution take part. Weaker relations are found where no value is equal: the same numbers in another
order (a layout that views can make), and values that are parts of one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from otel_torch.graph.contents import (
    ContentPairs,
    Contents,
    Groups,
    distinct_contents,
    equal_pairs,
    same_kind,
)
from otel_torch.graph.distances import (
    DEVIATIONS,
    PAIRS_AT_ONCE,
    in_windows,
    relative_distances,
    sketch_norms,
)
from otel_torch.graph.equal_rows import MatchedRows, find_equal_rows
from otel_torch.graph.error_model import SKETCH_ROUNDOFF, STATISTICS_ERROR
from otel_torch.graph.further_rows import may_be_further
from otel_torch.graph.graph import (
    AXIS_LAST,
    MAX,
    MEAN,
    MIN,
    NOTHING,
    STD,
    Flags,
    Floats,
    Graph,
    Indices,
    Values,
)
from otel_torch.graph.moved_axes import plain_contents, with_axes_moved

# relations of a value to the other program, the surest last
NONE, NEAR, PART, REORDERED, ROWS, CUT, TERM, MOVED, EQUAL = range(9)
# A value with fewer elements says nothing: scalars and pairs are equal by chance.
LEAST_NUMEL = 4
# How many sums of parts may fit by chance. In the programs of the tests it is 0.01 to 1,000 for
# what norms make, and up to 0.001 for other values.
_CHANCE = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """What equality says of the values of one program.

    Attributes:
        relation: NONE, NEAR (nearly equal: its statistics do not see that it is off), PART,
            REORDERED, ROWS (each of its rows is a row of some value, but for tokens that the other
            program never had), CUT (all parts are equal to values), TERM (of a sum that is equal to
            one), MOVED (equal with its axes in another order) or EQUAL, per value.
        partner: The most similar value of the other program; NOTHING where there is none.
        error: The relative distance to it; NaN where unknown.
        group: Values of both programs that are equal have one number here.
    """

    relation: Indices
    partner: Indices
    error: Floats
    group: Indices


def has_information(values: Values) -> Flags:
    """Return which values can identify a place: enough elements, of at least three numbers.

    A value has two distinct numbers at most if, and only if, its variance is as large as its mean
    and its extremes allow: (max - mean) * (mean - min).
    """
    statistics, count = values.statistics, np.maximum(values.numel - values.nonfinite, 1)
    mean, smallest, largest = statistics[:, MEAN], statistics[:, MIN], statistics[:, MAX]
    with np.errstate(all="ignore"):
        variance = statistics[:, STD] ** 2 * (count - 1) / count
        most = (largest - mean) * (mean - smallest)
        is_two_valued = np.isfinite(most) & (most - variance <= STATISTICS_ERROR * most)
    is_empty = sketch_norms(np.nan_to_num(values.sketch)) == 0
    enough: Flags = (values.numel >= LEAST_NUMEL) & ~is_two_valued & ~is_empty
    return enough


def find_equal(
    reference: Graph,
    port: Graph,
    limits: tuple[Floats, Floats],
    known: Sequence[tuple[int, int, float]] = (),
) -> tuple[Side, Side]:
    """Return the relations of the values of two programs.

    Args:
        reference, port: Two programs.
        limits: The largest relative error of each value in its own program; of a pair, the squares
            add up.
        known: Values of reference and port that are known to be equal, each with its error.
    """
    graphs = reference, port
    contents = [
        distinct_contents(graph.values, limit) for graph, limit in zip(graphs, limits, strict=True)
    ]
    sides = [_Builder(len(graph.values)) for graph in graphs]
    groups = Groups([len(content.first) for content in contents])
    _take_known(contents, known, sides, groups)
    equal = ContentPairs.of(equal_pairs(*contents))
    _take_pairs(contents, equal.among(plain_contents(graphs, contents)), sides, groups, EQUAL)
    is_open = [side.relation == NONE for side in sides]
    _take_pairs(contents, with_axes_moved(graphs, contents, equal, is_open), sides, groups, MOVED)
    for side, graph in zip(sides, graphs, strict=True):
        _read_otherwise(graph, side)
    informed = [has_information(graph.values) & ~_is_read(graph) for graph in graphs]
    _find_rows(graphs, contents, limits, informed, sides)
    _take_reordered(graphs, limits, informed, sides)
    for side, graph in zip(sides, graphs, strict=True):
        _split(graph, side)
    for whole_side in (0, 1):
        _find_parts(graphs, informed, sides, whole_side)
    for whole_side in (0, 1):
        for whole, part, errors in _repeated_pairs(graphs, limits, informed, sides, whole_side):
            both = [sides[whole_side], sides[1 - whole_side]]
            _assign_both(both, whole, part, errors, PART)
    own_groups = [
        numbers[content.content]
        for numbers, content in zip(groups.numbers(), contents, strict=True)
    ]
    _group_readings(graphs, sides, own_groups)
    return sides[0].finish(own_groups[0]), sides[1].finish(own_groups[1])


def _take_known(
    contents: list[Contents],
    known: Sequence[tuple[int, int, float]],
    sides: list[_Builder],
    groups: Groups,
) -> None:
    """Note values that are known to be equal."""
    if not known:
        return
    values = np.array([pair[:2] for pair in known], np.int64).T
    errors = np.array([pair[2] for pair in known])
    for side in (0, 1):
        sides[side].assign(values[side], values[1 - side], errors, EQUAL)
    groups.join(*(content.content[own] for content, own in zip(contents, values, strict=True)))


def _is_read(graph: Graph) -> Flags:
    """Return which values a reading makes, and no operation of the program."""
    return graph.made_by(graph.nodes.is_reading)


def _read_otherwise(graph: Graph, side: _Builder) -> None:
    """Note values that match in another reading: all parts of one match, or the sum of several."""
    for node in np.flatnonzero(graph.nodes.is_reading & ~graph.nodes_of(AXIS_LAST)).tolist():
        made, read = graph.nodes.makes[node], graph.nodes.reads[node]
        if (side.relation[made] == EQUAL).all():
            read = read[side.relation[read] == NONE]
            first = made[0]
            partners = np.full(len(read), side.partner[first])
            relation = CUT if len(made) > 1 else TERM
            side.assign(read, partners, np.full(len(read), side.error[made].max()), relation)


def _split(graph: Graph, side: _Builder) -> None:
    """Note values that the program takes apart, where every part matches and it uses only these.

    If the other program has the whole in another order, the order itself may be wrong.
    """
    nodes, numel = graph.nodes, graph.values.numel
    taken: dict[int, dict[tuple[int, int, int], int]] = defaultdict(dict)
    for node in np.flatnonzero(nodes.moves & ~nodes.is_reading).tolist():
        reads, made = nodes.reads[node], nodes.makes[node]
        if len(reads) == 1 and reads[0] >= 0 and side.relation[reads[0]] == NONE:
            label = int(nodes.operation[node]), int(nodes.argument[node])
            for place, value in enumerate(made.tolist()):
                if side.relation[value] == EQUAL and numel[value] < numel[reads[0]]:
                    taken[int(reads[0])][*label, place] = value
    for whole, parts in taken.items():
        values = np.array(list(parts.values()))
        if numel[values].sum() == numel[whole]:
            first, error = side.partner[values[:1]], side.error[values].max()
            side.assign(np.array([whole]), first, np.array([error]), CUT)


def _group_readings(
    graphs: tuple[Graph, Graph], sides: list[_Builder], groups: list[Indices]
) -> None:
    """Put parts into the group of their whole, and the terms of a sum into one of their own."""
    count = 1 + max((int(group.max(initial=0)) for group in groups), default=0)
    of_whole = np.arange(count)
    for graph, side, group in zip(graphs, sides, groups, strict=True):
        for node in np.flatnonzero(graph.nodes.is_reading).tolist():
            made, read = graph.nodes.makes[node], graph.nodes.reads[node]
            if len(made) > 1 and side.relation[read[0]] == CUT:
                of_whole[group[made]] = group[read[0]]
            elif len(made) == 1:
                terms = read[side.relation[read] == TERM]
                group[terms] = count + group[made[0]]
    for group in groups:
        is_own = group < count
        group[is_own] = of_whole[group[is_own]]


def _take_pairs(
    contents: list[Contents],
    pairs: ContentPairs,
    sides: list[_Builder],
    groups: Groups,
    relation: int,
) -> None:
    """Note pairs of contents for their values, and put these into one group."""
    groups.join(pairs.left, pairs.right)
    for place, own, other in ((0, pairs.left, pairs.right), (1, pairs.right, pairs.left)):
        partners = contents[1 - place].first[other]
        sides[place].take(contents[place], partners, own, pairs.errors, relation)


class _Builder:
    """Collects the relations of one program's values; the surest and nearest one stays."""

    def __init__(self, count: int) -> None:
        self.relation = np.full(count, NONE, np.int64)
        self.partner = np.full(count, NOTHING, np.int64)
        self.error = np.full(count, np.nan)

    def take(
        self, own: Contents, partners: Indices, contents: Indices, errors: Floats, relation: int
    ) -> None:
        """Note the nearest partner of each content, for all values with that content and without a
        surer relation.
        """
        order = np.argsort(errors, kind="stable")
        nearest, first = np.unique(contents[order], return_index=True)
        errors, partners = errors[order][first], partners[order][first]
        best = np.full(len(own.first), NOTHING, np.int64)
        best[nearest] = np.arange(len(nearest))
        index = best[own.content]
        values = np.flatnonzero(index >= 0)
        index = index[values]
        is_better = ~(self.error[values] <= errors[index])
        is_better &= np.isin(self.relation[values], (NONE, relation))
        values, index = values[is_better], index[is_better]
        self.assign(values, partners[index], errors[index], relation)

    def assign(self, values: Indices, partners: Indices, errors: Floats, relation: int) -> None:
        """Note a relation of values."""
        self.relation[values], self.partner[values] = relation, partners
        self.error[values] = errors

    def take_rows(self, rows: MatchedRows, is_whole: Flags, may_have_more: Flags) -> None:
        """Note values of which the other program has all rows that it can have."""
        is_possible = (rows.unmatched == 0) | may_have_more[rows.values]
        are_all = rows.are_all(is_whole) & is_possible
        values = rows.values[are_all]
        self.assign(values, rows.partner[are_all], rows.error[are_all], ROWS)

    def finish(self, group: Indices) -> Side:
        """Return what was found."""
        return Side(self.relation, self.partner, self.error, group)


def _take_reordered(
    graphs: tuple[Graph, Graph],
    limits: tuple[Floats, Floats],
    informed: list[Flags],
    sides: list[_Builder],
) -> None:
    """Note values that hold the same numbers in another order, and those that are nearly equal: the
    statistics of these, and of their views, do not see that they are not.
    """
    shapes = [graph.values.shape for graph in graphs]
    near = []
    for left, right, errors, limit in _same_statistics(graphs, limits, informed, sides):
        sketches = (
            graph.values.sketch[own] for graph, own in zip(graphs, (left, right), strict=True)
        )
        is_near = relative_distances(*sketches) <= DEVIATIONS * limit
        near.append((left[is_near], right[is_near], errors[is_near]))
        is_open = ~np.isin(right, right[is_near])
        # of several partners, which are views of each other, one of the same shape says most
        pairs = zip(left.tolist(), right.tolist(), strict=True)
        same = np.array([shapes[0][own] == shapes[1][other] for own, other in pairs], bool)
        for chosen in (~same & is_open, same & is_open):
            _assign_both(sides, left[chosen], right[chosen], errors[chosen], REORDERED)
    for left, right, errors in near:
        _assign_both(sides, left, right, errors, NEAR)


def _assign_both(
    sides: list[_Builder], left: Indices, right: Indices, errors: Floats, relation: int
) -> None:
    sides[0].assign(left, right, errors, relation)
    sides[1].assign(right, left, errors, relation)


def _same_statistics(
    graphs: tuple[Graph, Graph],
    limits: tuple[Floats, Floats],
    informed: list[Flags],
    sides: list[_Builder],
) -> Iterator[tuple[Indices, Indices, Floats, Floats]]:
    """Yield pairs of values with the same statistics, their errors and limits; all pairs of a value
    of the second program at once.

    The mean of rounding errors is smaller than they are, by the root of their number.
    """
    open_values = [
        np.flatnonzero((side.relation == NONE) & is_informed & (graph.values.numel > 0))
        for side, is_informed, graph in zip(sides, informed, graphs, strict=True)
    ]
    statistics = [
        graph.values.statistics[rows] for graph, rows in zip(graphs, open_values, strict=True)
    ]
    numel = [graph.values.numel[rows] for graph, rows in zip(graphs, open_values, strict=True)]
    units = [_units(table) for table in statistics]
    own_limits = [limit[rows] for limit, rows in zip(limits, open_values, strict=True)]
    for left, right in same_kind(numel[0][:, None], numel[1][:, None]):
        left = left[np.argsort(statistics[0][left, 0])]
        slack = 2 * np.maximum(own_limits[0][left].max(), own_limits[1][right])
        center, unit = statistics[1][right, 0], units[1][right, 0]
        starts = np.searchsorted(statistics[0][left, 0], center - slack * unit)
        ends = np.searchsorted(statistics[0][left, 0], center + slack * unit, side="right")
        for own, other in in_windows(starts, ends):
            pairs = left[other], right[own]
            limit = np.sqrt(own_limits[0][pairs[0]] ** 2 + own_limits[1][pairs[1]] ** 2)
            errors = same_numbers(
                statistics[0][pairs[0]], statistics[1][pairs[1]], numel[0][pairs[0]], limit
            )
            is_same = ~np.isnan(errors)
            rows = open_values[0][pairs[0][is_same]], open_values[1][pairs[1][is_same]]
            yield *rows, errors[is_same], limit[is_same]


def _repeated_pairs(
    graphs: tuple[Graph, Graph],
    limits: tuple[Floats, Floats],
    informed: list[Flags],
    sides: list[_Builder],
    whole_side: int,
) -> Iterator[tuple[Indices, Indices, Floats]]:
    """Yield pairs of values of which one holds the numbers of the other several times.

    One program computes for a whole batch what the other one computes once and expands.
    """
    whole, part = graphs[whole_side].values, graphs[1 - whole_side].values
    order = [
        np.flatnonzero((sides[side].relation == NONE) & informed[side])
        for side in (whole_side, 1 - whole_side)
    ]
    own, others = (
        rows[np.argsort(values.statistics[rows, 0], kind="stable")]
        for rows, values in zip(order, (whole, part), strict=True)
    )
    moments = [_moments(values, rows) for values, rows in ((whole, own), (part, others))]
    size = moments[0][:, 0]
    slack = 2 * limits[whole_side][own] * _units(whole.statistics[own])[:, 0]
    starts = np.searchsorted(moments[1][:, 0], size - slack)
    ends = np.searchsorted(moments[1][:, 0], size + slack, side="right")
    for rows, positions in in_windows(starts, ends):
        counts = whole.numel[own[rows]], part.numel[others[positions]]
        is_multiple = (counts[0] > counts[1]) & (counts[0] % np.maximum(counts[1], 1) == 0)
        left, right = own[rows[is_multiple]], others[positions[is_multiple]]
        limit = np.hypot(limits[whole_side][left], limits[1 - whole_side][right])
        errors = same_numbers(
            moments[0][rows[is_multiple]],
            moments[1][positions[is_multiple]],
            counts[1][is_multiple],
            limit,
        )
        is_same = ~np.isnan(errors)
        yield left[is_same], right[is_same], errors[is_same]


def _moments(values: Values, rows: Indices) -> Floats:
    """Return statistics that do not depend on how often each number is there."""
    table, count = values.statistics[rows].copy(), np.maximum(values.numel[rows], 1)
    table[:, STD] *= np.sqrt((count - 1) / count)
    return table


def same_numbers(reference: Floats, port: Floats, numel: Indices, limit: Floats) -> Floats:
    """Return the largest error of the statistics of pairs; NaN where these are not the same.

    Args:
        reference, port: Statistics, shape (pairs, len(ORDER_FREE)).
        numel, limit: Elements and largest relative error of each pair.
    """
    mean_limit = limit * np.minimum(1.0, DEVIATIONS / np.sqrt(np.maximum(numel, 1)))
    allowed = np.repeat(np.maximum(mean_limit, SKETCH_ROUNDOFF)[:, None], MAX + 1, axis=1)
    allowed[:, MIN:] = limit[:, None]
    with np.errstate(invalid="ignore"):  # infinite statistics, of masked scores
        errors = np.abs(reference - port) / np.maximum(_units(reference), _units(port))
    is_same = (errors <= allowed).all(axis=1)
    return np.where(is_same, errors.max(axis=1, initial=0.0), np.nan)


def _units(statistics: Floats) -> Floats:
    """Return the size that an error of each statistic is relative to."""
    with np.errstate(all="ignore"):
        root = np.sqrt(statistics[:, STD] ** 2 + statistics[:, MEAN] ** 2)
        extreme = np.maximum(np.abs(statistics[:, MIN]), np.abs(statistics[:, MAX]))
    units = np.stack([root, root, root, extreme, extreme], axis=1)
    return np.where(units > 0, units, 1.0)


def _find_rows(
    graphs: tuple[Graph, Graph],
    contents: list[Contents],
    limits: tuple[Floats, Floats],
    informed: list[Flags],
    sides: list[_Builder],
) -> None:
    """Note values whose rows the other program has, in whatever values."""
    found = []
    for place, side in enumerate(sides):
        pair, pair_limits = (graphs[place], graphs[1 - place]), (limits[place], limits[1 - place])
        is_open = informed[place] & (side.relation == NONE)
        among = np.ones(len(pair[1].values), bool)
        found.append(find_equal_rows(*pair, pair_limits, is_open, among))
    are_whole = [side.relation != NONE for side in sides]
    for is_whole, rows in zip(are_whole, found, strict=True):
        is_whole[rows.values[rows.unmatched == 0]] = True
    for place, side in enumerate(sides):
        if not len(found[place].values):
            continue
        is_unknown = informed[place] & ~are_whole[place]
        may_have_more = may_be_further(graphs[place], is_unknown)
        # what a rank receives is equal to what another one sent
        content = contents[place].content
        has_more = np.bincount(content[may_have_more], minlength=len(contents[place].first)) > 0
        side.take_rows(found[place], are_whole[1 - place], has_more[content])


def _find_parts(
    graphs: tuple[Graph, Graph], informed: list[Flags], sides: list[_Builder], whole_side: int
) -> None:
    """Note values of one program that are put together of neighbors in the other.

    Sums and sums of squares of parts add up to those of the whole: q, k and v beside one fused
    weight, heads or experts as a list beside one tensor.
    """
    whole_graph, part_graph = graphs[whole_side], graphs[1 - whole_side]
    # infinite sums tell nothing
    open_rows = [
        np.flatnonzero((side.relation == NONE) & flags & (graph.values.nonfinite == 0))
        for side, flags, graph in zip(sides, informed, graphs, strict=True)
    ]
    wholes, parts = open_rows[whole_side], open_rows[1 - whole_side]
    totals = _totals(part_graph.values)
    for is_leaf in (True, False):
        own = wholes[(whole_graph.values.leaf[wholes] >= 0) == is_leaf]
        by_size = _by_size(whole_graph.values, own)
        for run in _runs(part_graph, parts[(part_graph.values.leaf[parts] >= 0) == is_leaf]):
            spaced = _equally_spaced(by_size, part_graph.values.numel, totals, run)
            for members, sizes in ((run, list(by_size)), *spaced):
                _match_runs(
                    (whole_graph, part_graph),
                    {size: by_size[size] for size in sizes},
                    _Summed(members, totals[members]),
                    (sides[whole_side], sides[1 - whole_side]),
                )


class _Summed(NamedTuple):
    """Values, and what `_totals` says of each."""

    rows: Indices
    totals: Floats


def _by_size(values: Values, rows: Indices) -> dict[int, _Summed]:
    """Return some values by their size, the smallest first."""
    sizes, totals = values.numel[rows], _totals(values)[rows]
    return {
        size: _Summed(rows[sizes == size], totals[sizes == size])
        for size in np.unique(sizes).tolist()
    }


def _runs(graph: Graph, values: Indices) -> Iterator[Indices]:
    """Yield values that may be parts of one whole, neighbors side by side: of leaves all, else
    those of one line.
    """
    if not len(values):
        return
    makers = graph.values.maker[values]
    if makers[0] < 0:
        yield values
        return
    keys = np.stack([graph.nodes.operation[makers], graph.nodes.line[makers]], axis=1)
    _, kind = np.unique(keys, axis=0, return_inverse=True)
    order = np.argsort(kind.reshape(-1), kind="stable")
    bounds = np.flatnonzero(np.diff(kind.reshape(-1)[order])) + 1
    for rows in np.split(order, bounds):
        run = values[rows]
        if len(run) > 1:
            yield run


def _equally_spaced(
    wholes: Mapping[int, _Summed], numel: Indices, totals: Floats, run: Indices
) -> Iterator[tuple[Indices, list[int]]]:
    """Yield runs in which values of one size that come at equal distances are neighbors, if some of
    them may add up to a whole; and the sizes of such wholes.

    A line that makes q, k and v of one head after the other, or is run for each layer and each
    sample, makes the parts of several wholes in turn.

    Args:
        wholes: What they may add up to, by size.
        numel, totals: Of all values among which the run is.
    """
    for size in np.unique(numel[run]).tolist():
        same = run[numel[run] == size]
        if 1 < len(same) < len(run):
            yield same, list(wholes)
        magnitudes = totals[same, 0]
        targets = {
            whole // size: np.sort(own.totals[:, 0])
            for whole, own in wholes.items()
            if whole % size == 0 and 1 < whole // size <= len(same)
        }
        most = min(len(same) // 2, PAIRS_AT_ONCE // len(same)) if targets else 0
        for distance in range(2, most + 1):
            order = np.concatenate(
                [np.arange(first, len(same), distance) for first in range(distance)]
            )
            sums = np.concatenate([[0], np.cumsum(magnitudes[order])])
            sizes = [
                n * size for n, near in targets.items() if _has_near(sums[n:] - sums[:-n], near)
            ]
            if sizes:
                yield same[order], sizes


def _has_near(sums: Floats, targets: Floats) -> bool:
    """Return whether one of the sums is a target; these are sorted."""
    place = np.searchsorted(targets, sums * (1 - STATISTICS_ERROR))
    nearest = targets[np.minimum(place, len(targets) - 1)]
    return bool(((place < len(targets)) & (nearest <= sums * (1 + STATISTICS_ERROR))).any())


def _match_runs(
    graphs: tuple[Graph, Graph],
    wholes: Mapping[int, _Summed],
    run: _Summed,
    sides: tuple[_Builder, _Builder],
) -> None:
    """Note wholes of the first graph that neighbors in a run of the second one add up to.

    Args:
        wholes: Values of the first graph, by size.
        run: Values of the second graph.
    """
    members, totals = run
    numel = graphs[1].values.numel[members]
    ends = np.concatenate([[0], np.cumsum(numel)])
    sums = np.concatenate([np.zeros((1, 3)), np.cumsum(totals, axis=0)])
    smallest, step = numel.min(), np.gcd.reduce(numel)
    for size, (own, targets) in wholes.items():
        if size % step or not smallest < size <= ends[-1]:
            continue
        stops = np.searchsorted(ends, ends[:-1] + size)
        starts = np.flatnonzero(stops < len(ends))
        stops = stops[starts]
        is_window = (ends[stops] - ends[starts] == size) & (stops - starts > 1)
        starts, stops = starts[is_window], stops[is_window]
        if not len(starts):
            continue
        windows = sums[stops] - sums[starts]
        if _fit_by_chance(windows, targets):
            continue
        order = np.argsort(windows[:, 0], kind="stable")
        lowest = np.searchsorted(windows[order, 0], targets[:, 0] * (1 - STATISTICS_ERROR))
        highest = np.searchsorted(
            windows[order, 0], targets[:, 0] * (1 + STATISTICS_ERROR), "right"
        )
        for rows, positions in in_windows(lowest, highest):
            chosen = order[positions]
            # sums may cancel: their error is relative to that of the magnitudes
            scale = np.maximum(targets[rows][:, [0, 0, 2]], 1e-300)
            errors = (np.abs(windows[chosen] - targets[rows]) / scale).max(axis=1)
            fits = np.flatnonzero(errors <= STATISTICS_ERROR)
            for row, window, error in zip(rows[fits], chosen[fits], errors[fits], strict=True):
                parts = members[starts[window] : stops[window]]
                if _have_other_rows(graphs, own[row], parts[0]):
                    continue
                sides[0].assign(own[[row]], parts[:1], np.array([error]), PART)
                # the smallest whole says most of a part
                known = sides[1].partner[parts]
                is_new = (known == NOTHING) | (graphs[0].values.numel[known] > size)
                parts = parts[is_new]
                count = len(parts)
                sides[1].assign(parts, np.full(count, own[row]), np.full(count, error), PART)


def _have_other_rows(graphs: tuple[Graph, Graph], whole: int, part: int) -> bool:
    """Return whether the rows of two values were measured and are of one size: those of a part
    would be among those of the whole.
    """
    values = [graph.values for graph in graphs]
    sizes = {table.shape[own][-1:] for table, own in zip(values, (whole, part), strict=True)}
    return len(sizes) == 1 and all(
        len(table.rows.of(own)) for table, own in zip(values, (whole, part), strict=True)
    )


def _fit_by_chance(windows: Floats, targets: Floats) -> bool:
    """Return whether sums are so alike that some would fit by chance: what a norm makes has always
    the same squares, and hardly a mean.
    """
    scale = np.maximum(windows[:, [0, 0, 2]].mean(axis=0), 1e-300)
    spread = windows.std(axis=0) / scale
    shares = np.minimum(2 * STATISTICS_ERROR / np.maximum(spread, STATISTICS_ERROR), 1.0)
    return bool(shares.prod() * (len(windows) - 1) * len(targets) > _CHANCE)


def _totals(values: Values) -> Floats:
    """Return the sums of magnitudes, of numbers and of squares of values, shape (values, 3)."""
    count, table = values.numel.astype(np.float64), values.statistics
    table = np.where(np.isfinite(table), table, 0.0)
    squares = table[:, STD] ** 2 * (count - 1) + table[:, MEAN] ** 2 * count
    totals = np.stack([table[:, 0] * count, table[:, MEAN] * count, squares], axis=1)
    return totals
