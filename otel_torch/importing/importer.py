"""Writes the recording of a dump: one tensor is in memory at a time."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from otel_torch.importing.calls import DumpedCall
from otel_torch.importing.dump import Dump
from otel_torch.importing.manifest import ManifestError
from otel_torch.process.job import Job, name_run
from otel_torch.recording.append_file import AppendFile
from otel_torch.recording.disk_budget import DiskBudget
from otel_torch.recording.metadata import RECORDING_SCHEMA, describe_process, metadata_path
from otel_torch.recording.rows import encode_rows
from otel_torch.statistics import cpu_kernel


def import_dump(
    manifest: str | Path,
    output: str | Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[Path, int]:
    """Write the recording of the tensors that a manifest lists.

    Args:
        manifest: A manifest, or an .npz file whose keys are the names in order.
        output: By default `NAME.recording.jsonl` beside the manifest.
        progress: Called with a short text from time to time.

    Returns:
        The path of the recording, and the number of its records.

    Raises:
        ManifestError: The manifest or a file that it names is bad; nothing is written then.
        OSError: A file cannot be read or written.
    """
    path = Path(manifest).expanduser()
    dump = Dump(path)
    dump.check(progress)
    output = path.with_name(f"{path.stem}.recording.jsonl") if output is None else Path(output)
    output = output.expanduser()
    if output.exists() and any(map(output.samefile, (path, *dump.files))):
        raise ManifestError(f"{output}: the import reads this file; choose another --output")
    file = _open_recording(output, dump)
    try:
        for number, record in enumerate(dump.records(), start=1):
            file.append(encode_rows([record]), 1)
            progress(f"{number} of {len(dump.entries)} tensors")
    except BaseException:
        _remove(file)
        raise
    file.close()
    assert file.path is not None
    return file.path, file.items


def _open_recording(path: Path, dump: Dump) -> AppendFile:
    # an import within a cluster's job is no rank of it
    job = Job(name_run(), 0, 0, 1, socket.gethostname(), os.getpid())
    file = AppendFile(
        str(path), job, DiskBudget(sys.maxsize), lambda ended: _describe(file, job, dump, ended)
    )
    file.open()
    return file


def _remove(file: AppendFile) -> None:
    """Remove what was written: half a dump would match as far as it goes."""
    file.close()
    if file.path is not None:
        file.path.unlink(missing_ok=True)
        metadata_path(file.path).unlink(missing_ok=True)


def _describe(file: AppendFile, job: Job, dump: Dump, ended_cleanly: bool) -> dict[str, Any]:
    """Return the metadata of the recording; of the program, only what the manifest says."""
    return {
        "schema": RECORDING_SCHEMA,
        **describe_process(job, f"{job.trace_id:032x}"),
        "versions": {name: text for entry in dump.entries for name, text in entry.versions.items()},
        "kernels": cpu_kernel.describe(),
        "models": _describe_models(dump),
        "settings": {},
        "imported": True,
        **file.describe_times(ended_cleanly),
        "records_written": file.items,
        "lost": [],
        "regions": {},
        **file.describe_end(ended_cleanly),
    }


def _describe_models(dump: Dump) -> dict[str, dict[str, Any]]:
    """Return what is known of each model: its modules, their parameters, how often it ran."""
    tables: dict[str, dict[str, dict[str, Any]]] = {}
    forwards: dict[str, set[DumpedCall]] = {}
    for entry, call in zip(dump.entries, dump.calls, strict=True):
        new: dict[str, Any] = {
            "module": entry.module,
            "class": "",
            "called": None,
            "parameters": [],
            "aliases": [],
        }
        line = tables.setdefault(entry.model, {}).setdefault(entry.module, new)
        line["class"] = line["class"] or entry.class_name
        if call is not None:
            line["called"] = True
            forwards.setdefault(entry.model, set()).add(call.outermost)
        elif entry.tensor.startswith("param."):
            line["parameters"].append(entry.tensor.partition(".")[2])
    return {
        model: {
            "modules": len(table),
            "forwards": len(forwards.get(model, ())),
            "held_as": [],
            "trained": False,
            "table": list(table.values()),
        }
        for model, table in tables.items()
    }
