"""Writes whole tensors of the selected modules, one safetensors file per step, for questions that
statistics cannot answer.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from otel_torch.process.console import say
from otel_torch.process.job import Job
from otel_torch.recorder import Sink
from otel_torch.recording.disk_budget import DiskBudget
from otel_torch.recording.replace_file import NEW_FILE
from otel_torch.recording.run_file import make_folder
from otel_torch.recording.tensor_files import tensor_key
from otel_torch.records import Batch, Losses


class TensorSink(Sink):
    """Writes `FOLDER/<run>.rank<rank>/loop<L>.step<S>.safetensors`; further files of a step get
    `.1`, `.2` and so on.
    """

    accepts_deferred_regions = True

    def __init__(self, folder: str, job: Job, losses: Losses, budget: DiskBudget) -> None:
        self.written = 0
        self.folder = Path(folder).expanduser() / f"{job.run_id}.rank{job.rank}"
        self._job, self._losses, self._budget = job, losses, budget
        self._folder_exists = self._ended = False

    def write(self, batch: Batch) -> None:
        tensors_by_step: dict[tuple[int, int], dict[str, Any]] = defaultdict(dict)
        for record in batch.records:
            if record.data:
                step_tensors = tensors_by_step[record.loop, record.step]
                key = tensor_key(
                    record.model, record.module, record.tensor, record.call, record.phase
                )
                step_tensors[key] = record.data.pop()
        for (loop, step), tensors in tensors_by_step.items():
            if not self._ended and self._budget.is_exhausted:
                self._end(f"OTEL_TORCH_MAX_BYTES ({self._budget.limit} bytes) is reached")
            if self._ended:
                self._losses.count("tensor", "disk", len(tensors))
            else:
                self._save(f"loop{loop}.step{step}", tensors)

    def finish(self, deadline: float) -> None:
        if self.written:
            say(f"{self.written} tensors in {self.folder}")

    def _save(self, name: str, tensors: dict[str, Any]) -> None:
        from safetensors.torch import save_file

        path = None
        try:
            path = self._make_path(name)
            save_file(tensors, path, {"run_id": self._job.run_id, "rank": str(self._job.rank)})
        except Exception as error:
            self._losses.count("tensor", "disk", len(tensors))
            first_line = str(error).partition("\n")[0]
            self._end(f"{path or self.folder} cannot be written ({first_line})")
            if path is not None:
                path.unlink(missing_ok=True)
        else:
            self.written += len(tensors)
            self._budget.spend(path.stat().st_size)

    def _make_path(self, name: str) -> Path:
        """Create an empty file that did not exist and return its path; make its folder first."""
        if not self._folder_exists:
            self._make_folder()
            self._folder_exists = True
        for number in itertools.count():
            suffix = f".{number}" if number else ""
            path = self.folder / f"{name}{suffix}.safetensors"
            with contextlib.suppress(FileExistsError):
                os.close(os.open(path, NEW_FILE, 0o666))
                break
        return path

    def _make_folder(self) -> None:
        """Make a folder that did not exist: one that does is of another process of this run and
        rank, of an earlier run with this name, or was planted.
        """
        make_folder(self.folder.parent)
        name = f"{self.folder.name}.pid{os.getpid()}"
        numbered = (f"{name}.{number}" for number in itertools.count(1))
        names = itertools.chain([self.folder.name, name], numbered)
        for folder in map(self.folder.with_name, names):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o755)
                self.folder = folder
                return

    def _end(self, reason: str) -> None:
        self._ended = True
        say(f"no more tensors are written: {reason}; the program continues")
