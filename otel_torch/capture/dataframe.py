"""A table with a row for each tensor and a column for each statistic, of what was tracked or of a
recording.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from otel_torch.recording.reader import read_recording
from otel_torch.statistics.measure import measure
from otel_torch.statistics.read_rows import read_rows
from otel_torch.statistics.table import DEFINITIONS, columns_for, derive

if TYPE_CHECKING:
    import pandas

    from otel_torch.capture.track import Stash

Statistic = str | Callable[[Tensor], Any]
Statistics = Statistic | Sequence[Statistic] | Mapping[str, Statistic]


def frame_of_stashes(
    stashes: Sequence[Stash], stat: Statistics, stat_name: str | None = None
) -> pandas.DataFrame:
    """See `Tracker.to_frame`."""
    pandas = _pandas()
    columns = {name: _function(one) for name, one in _named(stat, stat_name).items()}
    recomputed = any(stash.recompute for stash in stashes)
    rows = []
    for stash in stashes:
        row: dict[str, Any] = {
            "name": stash.name, "type": f"{stash.type.__module__}.{stash.type.__name__}", "grad": stash.grad,
        }  # fmt: skip
        if recomputed:
            row["recompute"] = stash.recompute
        value = stash.first_value
        row |= {
            name: function(value) if isinstance(value, Tensor) else None
            for name, function in columns.items()
        }
        rows.append(row)
    return pandas.DataFrame(
        rows, columns=["name", "type", "grad", *["recompute"] * recomputed, *columns]
    )


def frame_of_recording(
    path: str | Path, stat: Statistics, stat_name: str | None = None
) -> pandas.DataFrame:
    """See `otel_torch.to_frame`."""
    pandas = _pandas()
    columns = _named(stat, stat_name)
    rows: list[Any] = read_recording(path)
    for name in columns.values():
        if not isinstance(name, str):
            raise ValueError(
                f"{path}: of a recording there are no tensors; name recorded statistics instead of functions"
            )
        if rows and not any(name in row for row in rows):
            raise ValueError(f"{path}: {name!r} was not recorded; see OTEL_TORCH_STATS")
    facts = ("tensor", "step", "call", "loop", "model")
    table = [
        {
            "name": row["module"],
            "grad": row.get("phase") == "backward",
            "recompute": row.get("phase") == "recompute",
        }
        | {fact: row.get(fact) for fact in facts}
        | {column: row.get(name) for column, name in columns.items()}
        for row in rows
    ]
    return pandas.DataFrame(table, columns=["name", "grad", "recompute", *facts, *columns])


def _named(stat: Statistics, stat_name: str | None) -> dict[str, Statistic]:
    """The columns, by name."""
    if isinstance(stat, Mapping):
        return dict(stat)
    if isinstance(stat, str) or callable(stat):
        return {stat_name or _name(stat): stat}
    return {_name(one): one for one in stat}


def _name(stat: Statistic) -> str:
    return stat if isinstance(stat, str) else getattr(stat, "__name__", "value")


def _function(stat: Statistic) -> Callable[[Tensor], Any]:
    if callable(stat):

        def of(tensor: Tensor) -> Any:
            # of whole numbers and truth values torch has no deviation
            found = stat(
                tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.double()
            )
            return found.item() if isinstance(found, Tensor) else found

        return of
    if stat not in DEFINITIONS:
        raise ValueError(f"{stat!r} is no statistic; there are {', '.join(DEFINITIONS)}")

    def ours(tensor: Tensor) -> Any:
        measured = measure(tensor, columns_for((stat,)))
        return derive((stat,), read_rows([measured])[0], measured).get(stat)

    return ours


def _pandas() -> Any:
    try:
        import pandas
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "a frame needs pandas: pip install 'otel-torch[pandas]'"
        ) from None
    return pandas
