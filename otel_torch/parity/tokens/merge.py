"""Make one forward of several: the tensors of all tokens that were matched, in one order.

    a prefill      fc out   rows of tokens 0 1 2
    a step         fc out   row of token 3
    merged         fc out   sketch: those of the rows 0 1 2 3, one after the other

Two runs so merged have equal batches, and the rest of the comparison takes them for forwards. Its
`sketch` of a tensor is then the sketches of the rows, which are as linear.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

import numpy as np
from numpy.typing import NDArray

from otel_torch.parity.forwards import ForwardRows
from otel_torch.parity.modules import ModulePairs, ModulePath
from otel_torch.parity.sides import Sides
from otel_torch.parity.tokens.final_outputs import find_final_outputs
from otel_torch.parity.tokens.merged_tensor import Flags, Indices, MergedTensor, Sketches, TensorKey
from otel_torch.parity.tokens.modules_by_rows import pair_by_rows
from otel_torch.parity.tokens.requests import TokenForward, TokenPlace
from otel_torch.recording.reader import LineBatch
from otel_torch.recording.row_batches import RowBatch, RowKinds
from otel_torch.recording.rows import Row
from otel_torch.statistics.row_layout import ROW_NUMBERS

_KEPT = ("module", "tensor", "step", "call", "loop", "model", "phase", "class", "argument", "dtype")


class MergedForward:
    """The forwards of one side, as one.

    Args:
        forwards: Those that computed the tokens.
        places: Where each of the matched tokens was computed.
        first_names: Those of shared modules, by their other names. A module that goes only by
            another name, that of the module which calls it, gets its first one.
    """

    def __init__(
        self,
        forwards: Sequence[TokenForward],
        places: Sequence[Sequence[TokenPlace]],
        first_names: Mapping[ModulePath, ModulePath],
    ) -> None:
        self.tensors: dict[TensorKey, MergedTensor] = {}
        self._first = max(forwards, key=lambda forward: len(forward.positions)).rows
        self._end = -1
        # sketches by number of the value, which only its first record has
        self._sketches: dict[int, bytes] = {}
        where = np.array(
            [(token, *place) for token, several in enumerate(places) for place in several]
        )
        self._tokens = len(places)
        # the forward with the most tokens says in which order the modules run
        decoded = [(index, forward, forward.rows.rows) for index, forward in enumerate(forwards)]
        for _, _, rows in decoded:
            self._keep_sketches(rows)
        called = {(row.get("model") or "", row["module"]) for _, _, rows in decoded for row in rows}
        names = Counter(first for alias, first in first_names.items() if alias in called)
        self._first_names = {
            alias: first
            for alias, first in first_names.items()
            if first not in called and names[first] == 1
        }
        decoded.sort(key=lambda entry: -len(entry[1].positions))
        for index, forward, rows in decoded:
            self._add(index, forward, rows, where)

    def _keep_sketches(self, rows: Iterable[Row]) -> None:
        for row in rows:
            if "rows" in row and isinstance(row.get("value"), int):
                self._sketches[row["value"]] = base64.b64decode(row["rows"])

    def _add(self, index: int, forward: TokenForward, rows: list[Row], where: Indices) -> None:
        tokens, _, rows_of_tokens = where[where[:, 1] == index].T
        events = [event for row in rows for event in row.get("order") or () if event is not None]
        offset = self._end + 1 - min(events, default=0)
        counts: Counter[tuple[str, str, str]] = Counter()
        is_first = not self.tensors
        known_calls = {(model, module, count) for model, module, _, count in self.tensors}
        kept = _rows_of_outputs(rows)
        for row in map(self._by_first_name, rows):
            name = (row.get("model") or "", row["module"], row["tensor"])
            counts[name] += 1
            sketches = self._sketches_of(row)
            by_token = (
                None if sketches is None else arrange(sketches, row["shape"], forward.grid, kept)
            )
            if by_token is None or row.get("dtype") == "torch.bool":
                continue  # not of the tokens, or a mask
            key, call = (*name, counts[name]), (*name[:2], counts[name])
            if key not in self.tensors:
                if call in known_calls:
                    continue  # an argument that only some forwards have, such as a mask
                self.tensors[key] = _new(row, 0 if is_first else offset, by_token, self._tokens)
            merged = self.tensors[key]
            numbers, is_known = by_token
            if numbers.shape[1:] != merged.sketches.shape[1:]:
                continue
            known = is_known[rows_of_tokens]
            chosen = rows_of_tokens[known]
            merged.fill(index, tokens[known], numbers[chosen])
            merged.values.append((index, row.get("value", id(row))))
            merged.lengths.add((row["shape"][-1], forward.grid[-1]))
        self._end = max(self._end, max(events, default=0) + (0 if is_first else offset))

    def _by_first_name(self, row: Row) -> Row:
        first = self._first_names.get((row.get("model") or "", row["module"]))
        return row if first is None else row | {"module": first[1]}

    def _sketches_of(self, row: Row) -> NDArray[np.float32] | None:
        number = row.get("value")
        if "rows" in row:
            data: bytes | None = base64.b64decode(row["rows"])
        else:
            data = self._sketches.get(number) if isinstance(number, int) else None
        if not data or not isinstance(row.get("shape"), list):
            return None
        return np.frombuffer(data, "<f4").reshape(-1, ROW_NUMBERS)

    def coverage(self) -> dict[ModulePath, Flags]:
        """Return for each module which tokens all of its tensors have."""
        covered: dict[ModulePath, Flags] = {}
        for (model, module, _, _), tensor in self.tensors.items():
            path = model, module
            covered[path] = covered[path] & tensor.present if path in covered else tensor.present
        return covered

    def as_forward(
        self, coverage: dict[ModulePath, Flags], final: dict[TensorKey, Flags], kinds: RowKinds
    ) -> ForwardRows:
        """Return it as a forward, whose tensors have the tokens of `final`, else of `coverage`."""
        numbers: dict[object, int] = {}
        rows = []
        for key, tensor in self.tensors.items():
            covered = final.get(key, coverage[key[:2]])
            if covered.any():
                value = numbers.setdefault((*tensor.values, covered.tobytes()), len(numbers))
                rows.append(_merged_row(tensor, covered, value))
        forward = ForwardRows(self._first.key, kinds)
        if rows:
            batch = RowBatch.of_rows(rows, kinds, LineBatch(""))
            forward.append(batch, 0, len(rows))
        return forward


def _rows_of_outputs(rows: Iterable[Row]) -> set[int]:
    """Return how many rows a request has in the outputs of the model, which may keep the last."""
    shapes = (row["shape"] for row in rows if not row["module"] and row["tensor"].startswith("out"))
    return {shape[-2] for shape in shapes if isinstance(shape, list) and len(shape) > 1}


def _new(row: Row, offset: int, by_token: tuple[Sketches, Flags], tokens: int) -> MergedTensor:
    events = (row.get("order") or (None, None), (row.get("parent"),))
    order, (parent,) = (
        tuple(None if event is None else event + offset for event in group) for group in events
    )
    shape = (tokens, *by_token[0].shape[1:])
    return MergedTensor(
        row, order, parent, np.full(shape, np.nan, np.float32), np.full(tokens, -1, np.int64)
    )


def _merged_row(tensor: MergedTensor, covered: Flags, value: int) -> Row:
    """Return a record of the tokens of `covered`.

    Its `tokens` are their numbers, its `squares` their sums of squares.
    """
    sketches = tensor.sketches[covered]
    projections = np.ascontiguousarray(sketches[:, :, :-1])
    row = {name: tensor.row[name] for name in _KEPT if name in tensor.row}
    return row | {
        "order": list(tensor.order),
        "parent": tensor.parent,
        "value": value,
        "shape": [len(sketches), tensor.width],
        "numel": len(sketches) * tensor.width,
        "nonfinite": int(not np.isfinite(sketches).all()),
        "l2": math.sqrt(float(sketches[:, :, -1].astype(np.float64).sum())),
        "squares": tensor.squares[covered].tolist(),
        "sketch": base64.b64encode(projections.astype("<f4").tobytes()).decode(),
        "tokens": np.flatnonzero(covered).tolist(),
    }


def arrange(
    sketches: NDArray[np.float32], shape: Sequence[int], grid: tuple[int, ...], kept: Set[int]
) -> tuple[Sketches, Flags] | None:
    """Return the sketches of the rows by token, and which tokens have any.

    None if the rows are not those of the tokens.

    Args:
        sketches: Of the rows along the last dimension, shape (rows, ROW_NUMBERS).
        shape: Of the tensor.
        grid: Of the tokens: (tokens,) or (requests, tokens).
        kept: The tokens that the model has outputs for. Another number of rows is not that of the
            last tokens, but of windows, for example.
    """
    count, rows = math.prod(grid), tuple(shape[:-1])
    if math.prod(rows) != len(sketches) or not rows:
        return None
    known = np.ones(count, np.bool_)
    if rows[: len(grid)] == grid:
        return sketches.reshape(count, -1, ROW_NUMBERS), known
    if len(grid) == 2:
        requests, length = grid
        if rows in ((length,), (1, length)):  # the same for all requests, as rotary tables
            return np.tile(sketches.reshape(length, 1, -1), (requests, 1, 1)), known
        if len(rows) == 3 and (rows[0], rows[2]) == grid:  # heads before tokens
            by_head = sketches.reshape(*rows, ROW_NUMBERS).swapaxes(1, 2)
            return by_head.reshape(count, rows[1], ROW_NUMBERS), known
        if len(rows) == 2 and rows[0] == requests and rows[1] < length and rows[1] in kept:
            # the last tokens only
            numbers = np.full((requests, length, 1, ROW_NUMBERS), np.nan, np.float32)
            numbers[:, -rows[1] :, 0] = sketches.reshape(*rows, ROW_NUMBERS)
            is_last = np.zeros(grid, np.bool_)
            is_last[:, -rows[1] :] = True
            return numbers.reshape(count, 1, ROW_NUMBERS), is_last.reshape(-1)
    if count in np.cumprod(rows):  # other dimensions, in the order of the tokens
        return sketches.reshape(count, -1, ROW_NUMBERS), known
    return None


def merge_forwards(
    forwards: Sides[list[TokenForward]],
    places: Sides[list[list[TokenPlace]]],
    modules: ModulePairs,
    kinds: Sides[RowKinds],
    first_names: Sides[Mapping[ModulePath, ModulePath]],
) -> Sides[ForwardRows]:
    """Return the forwards of either side as one, with the tokens that both have.

    Args:
        modules: Pairs that only the rows of the tokens show are added.
        first_names: Those of shared modules, by their other names.
    """
    sides = Sides(
        *(MergedForward(*side) for side in zip(forwards, places, first_names, strict=True))
    )
    _leave_out_keys(sides.map(lambda side: side.tensors), modules)
    pair_by_rows(sides.map(lambda side: side.tensors), modules)
    coverage = sides.map(MergedForward.coverage)
    for reference, port in _groups(modules):
        covered = [coverage.reference[path] for path in reference if path in coverage.reference]
        covered += [coverage.port[path] for path in port if path in coverage.port]
        if len(covered) == len(reference) + len(port):
            both: Flags = np.all(covered, axis=0)
            coverage.reference.update(dict.fromkeys(reference, both))
            coverage.port.update(dict.fromkeys(port, both))
    final = find_final_outputs(sides.map(lambda side: side.tensors), modules, coverage)
    return Sides(
        *(
            side.as_forward(*arguments)
            for side, arguments in zip(sides, zip(coverage, final, kinds, strict=True), strict=True)
        )
    )


def _leave_out_keys(tensors: Sides[dict[TensorKey, MergedTensor]], modules: ModulePairs) -> None:
    """Leave out masks and attention weights: how many keys a row has is up to the batches."""
    for key, tensor in list(tensors.reference.items()):
        path = modules.matched.get(key[:2])
        if path is None:
            continue
        port_key = *path, *key[2:]
        other = tensors.port.get(port_key)
        if other is None:
            continue
        varies = len(tensor.row_lengths) > 1 or len(other.row_lengths) > 1
        differs = tensor.row_lengths != other.row_lengths
        if varies or (differs and tensor.is_of_keys and other.is_of_keys):
            del tensors.reference[key], tensors.port[port_key]


def _groups(modules: ModulePairs) -> Iterator[Sides[list[ModulePath]]]:
    """Yield what corresponds: one module of either side, or several of one."""
    yield from (Sides([module], [match]) for module, match in modules.matched.items())
    yield from (Sides(parts, [whole]) for whole, parts in modules.parts.items())
    yield from (Sides([whole], parts) for whole, parts in modules.wholes.items())
