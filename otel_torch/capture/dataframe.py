"""Build a DataFrame with one row per tensor and one column per statistic, from stashes or from a
recording.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from otel_torch.capture.stash import Stash
from otel_torch.recording.reader import read_recording
from otel_torch.statistics.measure import measure
from otel_torch.statistics.read_rows import read_rows
from otel_torch.statistics.table import DEFINITIONS, columns_for, derive

if TYPE_CHECKING:
    import pandas

Statistic = str | Callable[[Tensor], Any]
Statistics = Statistic | Sequence[Statistic] | Mapping[str, Statistic]


def frame_of_stashes(
    stashes: Sequence[Stash], stat: Statistics, stat_name: str | None = None
) -> pandas.DataFrame:
    """Return the DataFrame that `Tracker.to_frame` documents."""
    pandas = _import_pandas()
    columns = {
        column: _make_function(statistic)
        for column, statistic in _name_columns(stat, stat_name).items()
    }
    has_recompute = any(stash.recompute for stash in stashes)
    rows = []
    for stash in stashes:
        type_name = f"{stash.type.__module__}.{stash.type.__name__}"
        row: dict[str, Any] = {"name": stash.name, "type": type_name, "grad": stash.grad}
        if has_recompute:
            row["recompute"] = stash.recompute
        value = stash.first_value
        for column, function in columns.items():
            row[column] = function(value) if isinstance(value, Tensor) else None
        rows.append(row)
    fields = ["name", "type", "grad", *(["recompute"] if has_recompute else [])]
    return pandas.DataFrame(rows, columns=[*fields, *columns])


def frame_of_recording(
    path: str | Path, stat: Statistics, stat_name: str | None = None
) -> pandas.DataFrame:
    """Return the DataFrame that `otel_torch.to_frame` documents for a recording."""
    pandas = _import_pandas()
    columns = _name_columns(stat, stat_name)
    records: list[Any] = read_recording(path)
    for statistic in columns.values():
        if not isinstance(statistic, str):
            raise ValueError(
                f"{path}: a recording holds no tensors; "
                "name recorded statistics instead of functions"
            )
        if records and not any(statistic in record for record in records):
            raise ValueError(f"{path}: {statistic!r} was not recorded; see OTEL_TORCH_STATS")
    keys = ("tensor", "step", "call", "loop", "model")
    rows = []
    for record in records:
        phase = record.get("phase")
        row = {
            "name": record["module"],
            "grad": phase == "backward",
            "recompute": phase == "recompute",
        }
        row |= {key: record.get(key) for key in keys}
        row |= {column: record.get(statistic) for column, statistic in columns.items()}
        rows.append(row)
    return pandas.DataFrame(rows, columns=["name", "grad", "recompute", *keys, *columns])


def _name_columns(stat: Statistics, stat_name: str | None) -> dict[str, Statistic]:
    if isinstance(stat, Mapping):
        return dict(stat)
    if isinstance(stat, str) or callable(stat):
        return {stat_name or _name_of(stat): stat}
    return {_name_of(statistic): statistic for statistic in stat}


def _name_of(statistic: Statistic) -> str:
    return statistic if isinstance(statistic, str) else getattr(statistic, "__name__", "value")


def _make_function(statistic: Statistic) -> Callable[[Tensor], Any]:
    if not isinstance(statistic, str):
        return _wrap_function(statistic)
    name = statistic
    if name not in DEFINITIONS:
        raise ValueError(f"{name!r} is not a statistic; use {', '.join(DEFINITIONS)}")

    def compute(tensor: Tensor) -> Any:
        measured = measure(tensor, columns_for((name,)))
        return derive((name,), read_rows([measured])[0], measured).get(name)

    return compute


def _wrap_function(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def compute(tensor: Tensor) -> Any:
        # torch has no standard deviation of integers and booleans
        is_inexact = tensor.is_floating_point() or tensor.is_complex()
        value = function(tensor if is_inexact else tensor.double())
        return value.item() if isinstance(value, Tensor) else value

    return compute


def _import_pandas() -> Any:
    try:
        import pandas
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "a DataFrame needs pandas: pip install 'otel-torch[pandas]'"
        ) from None
    return pandas
