"""Make the metadata that one process would have written, of that of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from otel_torch.parity.layouts.numbering import Numbering
from otel_torch.parity.recording_source import Warn
from otel_torch.recording.metadata import read_metadata

Metadata = dict[str, Any]


def merge_metadata(
    reference: Path,
    ranks: dict[int, Path],
    numberings: dict[int, Numbering],
    warn: Warn,
    groups: int = 1,
    *,
    is_cut: bool = False,
) -> tuple[Metadata, int | None]:
    """Return the metadata of the first rank, with the modules and optimizers of all.

    Args:
        is_cut: Whether a rank's file has fewer records than its run wrote.
        groups: Among how many groups of ranks the calls of one process are divided.

    Returns:
        Also the first rank whose optimizers have other settings than the reference's, if not all
        have.
    """
    metadata = {rank: read_metadata(recording, warn) for rank, recording in ranks.items()}
    first = next(iter(metadata.values()))
    merged = {
        **first,
        "models": _merge_models(metadata, numberings, groups),
        "ended_cleanly": not is_cut
        and all(entry.get("ended_cleanly", True) for entry in metadata.values()),
    }
    merged.pop("records_written", None)  # those of one rank
    if "optimizers" in first:
        merged["optimizers"] = _merge_optimizers(metadata, numberings)
    expected = _settings(read_metadata(reference, lambda message: None))
    other = [rank for rank, entry in metadata.items() if _settings(entry) != expected]
    return merged, other[0] if 0 < len(other) < len(metadata) else None


def use_others_than_parameters(reference: Path, ranks: dict[int, Path]) -> bool:
    """Return whether the optimizers of all ranks hold other tensors than the parameters, which
    those of the reference hold: they are made of these, such as a flat part of all.
    """

    def hold_parameters(path: Path) -> bool:
        optimizers = read_metadata(path).get("optimizers") or ()
        return any(not optimizer.get("copies") for optimizer in optimizers)

    return hold_parameters(reference) and not any(map(hold_parameters, ranks.values()))


def _merge_models(
    metadata: dict[int, Metadata], numberings: dict[int, Numbering], groups: int
) -> Metadata:
    models: Metadata = {}
    for rank, entry in metadata.items():
        for model, facts in entry.get("models", {}).items():
            merged = models.setdefault(numberings[rank].chunk(model)[0], {**facts, "table": []})
            known = {line["module"]: line for line in merged["table"]}
            for line in facts.get("table", ()):
                name = numberings[rank].rename(model, line["module"])
                if name not in known:
                    merged["table"].append({**line, "module": name})
                elif line.get("called") is not False:
                    known[name]["called"] = True
    for facts in models.values():
        if "forwards" in facts:
            facts["forwards"] *= groups
    return models


def _merge_optimizers(
    metadata: dict[int, Metadata], numberings: dict[int, Numbering]
) -> list[Metadata]:
    """Return the optimizers of all ranks, those with equal settings once."""
    merged: list[Metadata] = []
    for rank, entry in metadata.items():
        for optimizer in entry.get("optimizers", ()):
            groups = [
                {
                    **group,
                    "parameters": [
                        _rename(name, numberings[rank]) for name in group.get("parameters", ())
                    ],
                }
                for group in optimizer.get("groups", ())
            ]
            frozen = [_rename(name, numberings[rank]) for name in optimizer.get("frozen", ())]
            renamed = {**optimizer, "groups": groups, "frozen": frozen}
            if renamed not in merged:
                merged.append(renamed)
    return merged


def _rename(name: str, numbering: Numbering) -> str:
    """Return a parameter, `model:module.name`, as the whole model names it."""
    model, _, path = name.partition(":")
    module, dot, parameter = path.rpartition(".")
    return f"{numbering.chunk(model)[0]}:{numbering.rename(model, module)}{dot}{parameter}"


def _settings(metadata: Metadata) -> list[Any]:
    return [
        (optimizer.get("class"), [group.get("settings") for group in optimizer.get("groups", ())])
        for optimizer in metadata.get("optimizers", ())
    ]
