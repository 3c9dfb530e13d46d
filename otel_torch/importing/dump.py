"""The tensors that a manifest lists, as the records that a run of torch would have written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import torch

from otel_torch.importing.arrays import (
    ZIP_MAGIC,
    ArrayFile,
    NpzFile,
    check_array,
    open_arrays,
    read_tensor,
)
from otel_torch.importing.calls import DumpedCall, find_calls
from otel_torch.importing.manifest import Entry, ManifestError, entries_of_keys, read_manifest
from otel_torch.recording.file_kinds import MANIFEST, NPZ, OTHER_JSON, FileKind, refusal
from otel_torch.recording.input_file import require_regular_file
from otel_torch.records import PARAMETER_PHASES, Record, Statistic, TensorPosition
from otel_torch.settings import PARITY_STATISTICS, Settings
from otel_torch.statistics.measure import measure
from otel_torch.statistics.read_rows import read_rows
from otel_torch.statistics.table import columns_for, derive

# the archives that may stand beside a manifest, under its name
_ARCHIVES = (".npz", ".safetensors")
# arrays that keep no order, so that they are no manifest
_UNORDERED = frozenset({".npy", ".safetensors"})
_OPEN_FILES = 16


class Dump:
    """The tensors that a manifest lists.

    Attributes:
        entries: In the order of execution.
        calls: The call of each entry; None for parameters and gradients.

    Raises:
        ManifestError: The manifest is bad.
        OSError: It cannot be read.
    """

    def __init__(self, manifest: Path) -> None:
        require_regular_file(manifest)
        self._path = manifest
        self._open = lru_cache(_OPEN_FILES)(open_arrays)
        self.entries = self._read_entries()
        if not self.entries:
            raise ManifestError(f"{manifest}: lists no tensor")
        self.calls = find_calls(self.entries)

    def _read_entries(self) -> list[Entry]:
        if self._path.suffix in _UNORDERED:
            raise ManifestError(
                f"{self._path}: says nothing of the order of execution; list the names of its "
                f"tensors in a manifest, {self._path.with_suffix('.json').name}"
            )
        with open(self._path, "rb") as file:
            is_archive = file.read(len(ZIP_MAGIC)) == ZIP_MAGIC
        try:
            if is_archive:
                self._reject_other_kinds(NPZ)
                return entries_of_keys(NpzFile(self._path).keys, self._path)
            return read_manifest(self._path)
        except ManifestError:
            self._reject_other_kinds(MANIFEST, OTHER_JSON)
            raise

    def _reject_other_kinds(self, *taken: FileKind) -> None:
        if line := refusal(self._path, *taken):
            raise ManifestError(line) from None

    # -- files

    @property
    def files(self) -> list[Path]:
        return list(dict.fromkeys(map(self._file_of, self.entries)))

    def _file_of(self, entry: Entry) -> Path:
        if entry.file is not None:
            return self._path.parent / Path(entry.file).expanduser()
        beside = [self._path.with_suffix(suffix) for suffix in _ARCHIVES]
        found = next((path for path in beside if path.exists()), None)
        if found is None:
            names = " nor ".join(path.name for path in beside)
            raise ManifestError(f'names no "file", and there is neither {names}')
        return found

    def _arrays_of(self, entry: Entry) -> ArrayFile:
        path = self._file_of(entry)
        if not path.exists():
            raise ManifestError(f"{path}: there is no such file")
        return self._open(path)

    # -- checks

    def check(self, progress: Callable[[str], None]) -> None:
        """Check by headers alone that each tensor is there, can be read, and is listed once.

        Raises:
            ManifestError: One is not.
            OSError: A file cannot be read.
        """
        first: dict[tuple[Any, ...], Entry] = {}
        for number, entry in enumerate(self.entries, start=1):
            previous = first.setdefault(entry.identity, entry)
            if previous is not entry:
                raise ManifestError(
                    f"{entry.where}: is the same tensor of the same step as {previous.place}; "
                    "tell them apart by step, call or loop"
                )
            try:
                self._check_array(entry)
            except ManifestError as error:
                raise ManifestError(f"{entry.where}: {error}") from None
            progress(f"{number} of {len(self.entries)} tensors checked")

    def _check_array(self, entry: Entry) -> None:
        dimensions = check_array(self._arrays_of(entry), entry.key, entry.dtype)
        if entry.permute is not None and len(entry.permute) != dimensions:
            raise ManifestError(
                f"permute has {len(entry.permute)} axes, and {entry.key!r} {dimensions}"
            )

    # -- records

    def records(self) -> Iterator[Record]:
        """Yield the record of each tensor. One tensor is in memory at a time.

        Raises:
            ManifestError: A tensor cannot be read.
            OSError: Likewise.
        """
        numbers = count()
        for entry, call in zip(self.entries, self.calls, strict=True):
            try:
                tensor = read_tensor(self._arrays_of(entry), entry.key, entry.dtype)
            except ManifestError as error:
                raise ManifestError(f"{entry.where}: {error}") from None
            if entry.permute is not None:
                tensor = tensor.permute(entry.permute)
            yield _record(entry, _position(entry, call, next(numbers)), _statistics(entry, tensor))


def _statistics(entry: Entry, tensor: torch.Tensor) -> dict[str, Statistic]:
    """Return what OTEL_TORCH_CAPTURE=parity records of a tensor."""
    names = [*Settings.from_env({}).stats, *PARITY_STATISTICS]
    if entry.phase in PARAMETER_PHASES:
        names.append("row_sketch")
    names = list(dict.fromkeys(names))
    measurement = measure(tensor, columns_for(names))
    return derive(names, read_rows([measurement])[0], measurement)


def _position(entry: Entry, call: DumpedCall | None, number: int) -> TensorPosition:
    order: tuple[int | None, int | None] = None, None
    parent = None
    if call is not None:
        order = call.entered, call.exited
        parent = None if call.parent is None else call.parent.entered
    return TensorPosition(entry.class_name, entry.argument, number, None, order, parent, shard=None)


def _record(entry: Entry, position: TensorPosition, stats: dict[str, Statistic]) -> Record:
    return Record(
        entry.module,
        entry.tensor,
        entry.step,
        entry.call,
        entry.loop,
        entry.model,
        entry.phase,
        None,
        stats,
        time_ns=0,
        position=position,
    )
