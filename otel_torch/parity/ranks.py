"""A folder of the recordings of all ranks: put together where they hold parts of tensors, told
apart where they do not.

A tensor that is spread over ranks is nobody's: each rank's row is of its shard. What adds up (sums,
squares, counts, sketches) is added up, by position, to the row that one process with the whole
tensor would have written; what results is an ordinary recording. Sixty-four recordings are no work
for the memory: DuckDB groups their rows, on disk where it must.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from otel_torch.parity.call_graph import sketch_bytes
from otel_torch.parity.finding import Finding, Report
from otel_torch.recording.metadata import metadata_path, read_metadata
from otel_torch.recording.reader import RecordingError
from otel_torch.recording.rows import Row, parse_line
from otel_torch.records import spell

Problem = Callable[[str], None]
Parts = dict[str, list[Any]]  # what a row says, of each part

# the most memory that DuckDB may take before it uses the disk, and how many ranks' rows are grouped
# at a time
_MEMORY, _ROWS_AT_ONCE = "256MB", 100_000
# how far the magnitudes of a tensor that all ranks have may be apart, relative: ranks add up in
# different orders
_ROUNDING = 1e-4
# a row's place, without its rank
_KEY = ("module", "tensor", "model", "loop", "step", "call", "phase", "branch")
# what is known of a part, as DuckDB reads it
_PARTS = (
    "numel",
    "abs_mean",
    "sum",
    "min",
    "max",
    "std",
    "l2",
    "rms",
    "mean",
    "nonfinite",
    "zeros",
    "sketch",
    "row_sketch",
)
_TYPES = {
    **dict.fromkeys(
        ("module", "tensor", "model", "phase", "branch", "sketch", "row_sketch"), "VARCHAR"
    ),
    **dict.fromkeys(("loop", "step", "call", "numel", "nonfinite", "zeros"), "BIGINT"),
    **dict.fromkeys(
        ("abs_mean", "sum", "min", "max", "std", "l2", "rms", "mean"), "VARCHAR"
    ),  # NaN is spelled
    "shape": "BIGINT[]",
    "shard": 'STRUCT(shape BIGINT[], "offset" BIGINT[], partial BOOLEAN)',
}


@dataclass(frozen=True, slots=True)
class Part:
    """A recording to be compared. rank: None where it is of all ranks, or where there is one rank
    only.
    """

    rank: int | None
    path: Path


def parts_of(path: str | Path, temporary: Path, problem: Problem) -> list[Part]:
    """The recordings behind a path: the file itself, or for a folder those of its ranks; one, in
    `temporary`, where the ranks hold parts of tensors. Raises RecordingError. problem: is told what
    is left out, a line each.
    """
    path = Path(path)
    if not path.is_dir():
        return [Part(None, path)]
    ranks = _ranks_in(path)
    if len(ranks) == 1:
        return [Part(None, one) for one in ranks.values()]
    if not any(_has_shards(one) for one in ranks.values()):
        return [Part(rank, one) for rank, one in ranks.items()]
    return [Part(None, _put_together(path, ranks, temporary, problem))]


def pair_ranks(
    reference: list[Part], port: list[Part], problem: Problem
) -> list[tuple[Part, Part]]:
    """Rank with rank where both sides have the same ones; else, said, the first rank of each."""
    mine, theirs = {part.rank: part for part in reference}, {part.rank: part for part in port}
    if mine.keys() == theirs.keys():
        return [(part, theirs[rank]) for rank, part in mine.items()]
    if len(mine) == len(theirs) == 1:
        return [(reference[0], port[0])]
    counts = ["1 rank" if len(side) == 1 else f"{len(side)} ranks" for side in (mine, theirs)]
    problem(
        f"the reference has {counts[0]} and the port {counts[1]}, and their rows do not say of which part of a tensor they are: "
        f"only the first rank of each is compared"
    )
    return [(reference[0], port[0])]


def _ranks_in(folder: Path) -> dict[int, Path]:
    """The recordings in a folder by rank."""
    found: dict[int, Path] = {}
    for path in sorted(folder.glob("*.jsonl")):
        if re.search(r"\.\d+\.jsonl$", path.name):
            continue  # an earlier run's, renamed
        rank = read_metadata(path).get("rank")
        named = re.search(r"rank(\d+)", path.name)
        if not isinstance(rank, int):
            if named is None:
                raise RecordingError(
                    f"{path}: neither its name (.rank0.jsonl) nor its metadata says of which rank it is"
                )
            rank = int(named.group(1))
        if rank in found:
            raise RecordingError(
                f"{folder}: {found[rank].name} and {path.name} are both of rank {rank}; leave one run in it"
            )
        found[rank] = path
    if not found:
        raise RecordingError(f"{folder}: holds no recording (*.jsonl)")
    return dict(sorted(found.items()))


def _has_shards(path: Path) -> bool:
    with open(path, "rb") as file:
        return any(b'"shard"' in line for line in file)


# -- putting together
# --------------------------------------------------------------------------------------------------


def _put_together(folder: Path, ranks: dict[int, Path], temporary: Path, problem: Problem) -> Path:
    """One recording of the recordings of several ranks."""
    try:
        import duckdb
    except ModuleNotFoundError:
        raise RecordingError(
            f"{folder}: its ranks hold parts of tensors, which DuckDB puts together: pip install 'otel-torch[ranks]'"
        ) from None
    target = Path(tempfile.mkdtemp(dir=temporary)) / f"{folder.name}.jsonl"
    with duckdb.connect(str(target.with_suffix(".duckdb"))) as database:
        try:
            _load(database, list(ranks.values()), target.parent)
            _write(database, ranks, target, problem)
        except duckdb.Error as error:
            raise RecordingError(
                f"{folder}: cannot be put together ({' '.join(str(error).split())[:200]})"
            ) from None
    metas = [read_metadata(path, problem) for path in ranks.values()]
    meta = {**metas[0], "ended_cleanly": all(one.get("ended_cleanly", True) for one in metas)}
    metadata_path(target).write_text(json.dumps(meta), encoding="utf-8")
    return target


def _load(database: Any, paths: list[Path], temporary: Path) -> None:
    """Read all rows into the database: `at` counts them in the order of the ranks, `place` tells
    rows of one place.
    """
    database.execute(f"SET memory_limit = '{_MEMORY}'")
    database.execute("SET temp_directory = ?", [str(temporary)])
    key = ", ".join(f'"{name}"' for name in _KEY)
    numbers = {
        name: f'TRY_CAST("{name}" AS DOUBLE) AS "{name}"'
        if _TYPES.get(name) == "VARCHAR" and "sketch" not in name
        else f'"{name}"'
        for name in _PARTS
    }
    for number, path in enumerate(paths):
        into = "INSERT INTO rows" if number else "CREATE TABLE rows AS"
        database.execute(
            f"{into} SELECT {number}::INTEGER AS rank, row_number() OVER () AS line, hash({key}) AS place, "
            f'{", ".join(numbers.values())}, shape, shard.shape AS whole, shard."offset" AS at, '
            f"coalesce(shard.partial, false) AS partial "
            f"FROM read_json(?, format = 'newline_delimited', columns = ?, ignore_errors = true)",
            [str(path), _TYPES],
        )
    # the lowest rank that has a place owns it: its row is the one that is written
    database.execute(
        "CREATE TABLE places AS SELECT place, min(rank) AS owner, arg_min(line, rank) AS line, count(whole) > 0 AS spread, "
        "max(abs_mean) - min(abs_mean) AS apart, max(abs_mean) AS most, count(DISTINCT rank) AS ranks FROM rows GROUP BY place"
    )


def _write(database: Any, ranks: dict[int, Path], target: Path, problem: Problem) -> None:
    """Write the rows of the owners, those of parts of tensors as rows of the whole."""
    numbers = list(ranks)
    whole = _whole_rows(database)
    upcoming = next(whole, None)
    torn: list[Row] = []
    with open(target, "w", encoding="utf-8") as file:
        for number, path in enumerate(ranks.values()):  # of most, nothing is left to be written
            owned = (
                database.cursor()
                .execute("SELECT line FROM places WHERE owner = ? ORDER BY line", [number])
                .fetchnumpy()
            )
            wanted = iter(owned["line"].tolist())
            line_wanted = next(wanted, None)
            with open(path, "rb") as lines:
                for line, text in enumerate((text for text in lines if text.strip()), 1):
                    if line != line_wanted:
                        if line_wanted is None:
                            break
                        continue
                    line_wanted = next(wanted, None)
                    row = parse_line(text)
                    if not isinstance(row, dict):
                        continue
                    if upcoming is not None and upcoming[:2] == (number, line):
                        complete = _complete(row, upcoming[2])
                        upcoming = next(whole, None)
                        if not complete:
                            torn.append(row)
                            continue
                    file.write(
                        json.dumps(
                            {name: spell(value) for name, value in _of_rank(row, number).items()}
                        )
                        + "\n"
                    )
    if torn:
        problem(
            f"{len(torn)} rows are of tensors of which parts are missing (a rank's recording?) and were left out; the first is "
            f"{torn[0]['module'] or torn[0].get('model')} {torn[0]['tensor']}"
        )
    _say_disagreement(database, numbers, problem)


def _whole_rows(database: Any) -> Iterator[tuple[int, int, Parts]]:
    """(owner, line, parts of all ranks) of each place that is spread over ranks, in the order of
    writing.
    """
    names = (*_PARTS, "whole", "at", "partial", "shape")
    lists = ", ".join(f'list(r."{name}" ORDER BY r.rank)' for name in names)
    count, ranks = database.execute(
        "SELECT count(*), max(ranks) FROM places WHERE spread"
    ).fetchone()
    at_once = max(1, _ROWS_AT_ONCE // max(ranks or 1, 1))
    for start in range(0, count, at_once):
        found = database.cursor().execute(
            f"SELECT any_value(p.owner), any_value(p.line), {lists} FROM rows r JOIN (SELECT * FROM places WHERE spread "
            "ORDER BY owner, line LIMIT ? OFFSET ?) p USING (place) WHERE r.whole IS NOT NULL GROUP BY r.place ORDER BY 1, 2",
            [at_once, start],
        )
        while rows := found.fetchmany(500):
            for owner, line, *columns in rows:
                yield owner, line, dict(zip(names, columns, strict=True))


def _complete(row: Row, parts: Parts) -> bool:
    """Make a row of a part one of the whole tensor; False if parts are missing.

    Parts of a sum are of full shape each, and all of them count; of several at one position one
    does.
    """
    shape = parts["whole"][0]
    partial = any(parts["partial"])
    numel = math.prod(shape)
    if not partial:
        first = sorted(
            {tuple(at): number for number, at in reversed(list(enumerate(parts["at"])))}.values()
        )
        parts = {name: [values[number] for number in first] for name, values in parts.items()}
    sizes = [
        math.prod(part) if size is None else size
        for size, part in zip(parts["numel"], parts["shape"], strict=True)
    ]
    if not partial and sum(sizes) != numel:
        return False
    del row["shard"]
    row["shape"] = list(shape)
    summed = _added_up(parts, sizes, numel, partial)
    for name in (*_PARTS, "histogram"):
        if name in row:
            value = summed.get(name)
            if value is None:
                del row[name]
            else:
                row[name] = value
    return True


def _added_up(parts: Parts, sizes: list[int], numel: int, partial: bool) -> dict[str, Any]:
    """The statistics of the whole, so far as those of the parts tell them: of a sum only what is
    linear.
    """
    known = {name: parts[name] for name in _PARTS if None not in parts[name]}
    weights = np.array(sizes, dtype=np.float64)
    found: dict[str, Any] = {"numel": numel}
    if "sum" in known:
        found["sum"] = float(np.sum(known["sum"]))
        found["mean"] = found["sum"] / max(numel, 1)
    for name in ("nonfinite",) if partial else ("nonfinite", "zeros"):
        if name in known:
            found[name] = sum(known[name])
    for name in ("sketch", "row_sketch"):
        sketches = [sketch_bytes(text) for text in known.get(name, ())]
        if (
            sketches
            and sketches[0] is not None
            and all(one is not None and len(one) == len(sketches[0]) for one in sketches)
        ):
            total = np.frombuffer(b"".join(one or b"" for one in sketches), "<f4").reshape(
                len(sketches), -1
            )
            found[name] = b64encode(
                total.sum(axis=0, dtype=np.float64).astype("<f4").tobytes()
            ).decode("ascii")
    if partial:
        return found
    if "abs_mean" in known:
        found["abs_mean"] = float(np.dot(known["abs_mean"], weights)) / max(numel, 1)
    if "l2" in known or "rms" in known:
        squares = np.square(known["l2"]) if "l2" in known else np.square(known["rms"]) * weights
        found["l2"], found["rms"] = (
            float(np.sqrt(squares.sum())),
            float(np.sqrt(squares.sum() / max(numel, 1))),
        )
    if "std" in known and "mean" in known and numel > 1:
        means = np.array(known["mean"])
        around = np.square(known["std"]) * (weights - 1) + weights * np.square(
            means - np.dot(means, weights) / numel
        )
        found["std"] = float(np.sqrt(around.sum() / (numel - 1)))
    for name, extreme in (("min", np.min), ("max", np.max)):
        if name in known:
            found[name] = float(extreme(known[name]))
    return {name: spell(value) for name, value in found.items()}


def _of_rank(row: Row, rank: int) -> Row:
    """A row whose numbers of values and calls are no other rank's."""
    if rank == 0:
        return row
    ahead = rank * 10**9
    for name in ("value", "storage", "parent"):
        if isinstance(row.get(name), int):
            row[name] += ahead
    if isinstance(row.get("order"), list):
        row["order"] = [None if at is None else at + ahead for at in row["order"]]
    return row


def _say_disagreement(database: Any, ranks: list[int], problem: Problem) -> None:
    """Tensors that every rank has as a whole, and that are not the same on all."""
    where = f"NOT spread AND ranks > 1 AND apart > {_ROUNDING} * most"
    (count,) = database.execute(f"SELECT count(*) FROM places WHERE {where}").fetchone()
    if not count:
        return
    place, owner, line = database.execute(
        f"SELECT place, owner, line FROM places WHERE {where} ORDER BY owner, line LIMIT 1"
    ).fetchone()
    values = database.execute(
        "SELECT rank, abs_mean FROM rows WHERE place = ? ORDER BY rank", [place]
    ).fetchall()
    other, _ = max(values, key=lambda one: abs(one[1] - values[0][1]))
    problem(
        f"{count} tensors that are not spread over ranks are not the same on all of them, first on rank {ranks[other]} the one "
        f"in line {line} of rank {ranks[owner]}: the lowest rank's is compared"
    )


# -- comparing by rank
# --------------------------------------------------------------------------------------------------


def compare_ranks(
    reference: Path,
    port: Path,
    noise: Path | None,
    compare_two: Callable[[Path, Path, Path | None], Report],
) -> Report:
    """Compare two sides of which one at least is a folder of ranks. compare_two: compares
    recordings of one process each.
    """
    said: list[str] = []
    with ExitStack() as stack:
        temporary = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="otel-torch-ranks-"))
        )
        sides = [parts_of(path, temporary, said.append) for path in (reference, port)]
        noises = (
            {}
            if noise is None
            else {part.rank: part.path for part in parts_of(noise, temporary, said.append)}
        )
        reports = []
        for one, other in pair_ranks(sides[0], sides[1], said.append):
            again = noises.get(one.rank, next(iter(noises.values())) if len(noises) == 1 else None)
            if noise is not None and again is None:
                said.append(
                    f"{noise}: has no recording of rank {one.rank}, which is compared without noise"
                )
            named = {
                str(part.path): str(path)
                for part, path in ((one, reference), (other, port))
                if part.rank is None
            }
            try:
                found = compare_two(one.path, other.path, again)
            except RecordingError as error:
                raise RecordingError(_renamed(str(error), named)) from None
            found.warnings = [_renamed(warning, named) for warning in found.warnings]
            reports.append((one.rank, found))
    report = _merged(reports)
    report.reference, report.port = str(reference), str(port)
    report.warnings[:0] = said
    return report


def _renamed(text: str, names: dict[str, str]) -> str:
    """A text that names the folder, and not the file that was made of it."""
    for name, folder in names.items():
        text = text.replace(name, folder)
    return text


def _merged(reports: list[tuple[int | None, Report]]) -> Report:
    """The reports of several ranks as one: that of the rank which goes wrong first, with the
    findings of all.
    """
    if len(reports) == 1:
        return reports[0][1]

    def begins(item: tuple[int | None, Report]) -> tuple[int, int, int]:
        first = item[1].first
        if first is None:
            return 2, 0, 0
        return (0, first.loop or 0, first.step or 0) if first.phase != "attach" else (0, -1, -1)

    _, leading = min(reports, key=begins)
    merged = replace(leading, warnings=[], introduced=[], harmless=[])
    for name in ("introduced", "harmless"):
        setattr(merged, name, _of_all(reports, name))
    merged.first = next(
        (
            one
            for one in merged.introduced
            if leading.first and _place(one) == _place(leading.first)
        ),
        None,
    )
    if merged.first is not None:
        merged.introduced.sort(key=lambda one: one is not merged.first)
        merged.verdict = "diverged"
    elif any(report.verdict == "incomparable" for _, report in reports):
        bad = next(report for _, report in reports if report.verdict == "incomparable")
        merged.verdict, merged.reason = bad.verdict, bad.reason
    merged.pairs = sum(report.pairs for _, report in reports)
    merged.compared_left_out = merged.pairs - len(merged.compared)
    merged.warnings = [
        f"rank {rank}: {warning}" for rank, report in reports for warning in report.warnings
    ]
    return merged


def _of_all(reports: list[tuple[int | None, Report]], name: str) -> list[Finding]:
    """The findings of all ranks, one of the same place once, with the first rank that has it."""
    found: dict[tuple[Any, ...], Finding] = {}
    ranks: dict[tuple[Any, ...], list[int | None]] = {}
    for rank, report in reports:
        for one in getattr(report, name):
            found.setdefault(_place(one), replace(one, rank=rank))
            ranks.setdefault(_place(one), []).append(rank)
    return [
        replace(
            one, explanation=f"{one.explanation} Likewise on {len(ranks[place]) - 1} other ranks."
        )
        if len(ranks[place]) > 1
        else one
        for place, one in found.items()
    ]


def _place(one: Finding) -> tuple[Any, ...]:
    return one.kind, one.model, one.module, one.side, one.port_model, one.port_module, one.port_side
