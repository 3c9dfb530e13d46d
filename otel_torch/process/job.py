"""The place of this process in its job: run id, rank and host, from the launcher's environment.

Imports nothing heavy.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

# (rank, local rank, world size) variables, by launcher; the first whose rank is set wins
_LAUNCHERS = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
)
# (job id, restart count) variables, by launcher
_JOBS = (
    ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
)


@dataclass(frozen=True)
class Job:
    """The place of a process in its job of `world_size` ranks."""

    run_id: str
    rank: int
    local_rank: int
    world_size: int
    host: str
    pid: int

    @property
    def trace_id(self) -> int:
        """The run's trace id, 128 bits; every rank derives the same from the run id."""
        return int.from_bytes(hashlib.sha256(self.run_id.encode()).digest()[:16], "big") or 1


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    value = environ.get(name, "")
    return int(value) if value.isdecimal() else default


def name_run(environ: Mapping[str, str] = os.environ) -> str:
    """Return the run id, which is safe in file names.

    It is OTEL_TORCH_RUN_ID, else the launcher's job id with its restart count, else a generated
    one. A torchrun agent generates and exports an id before its workers know the job's, so an id of
    that form gives way to the job id. If there is no job id (torchrun's `none`), the restart count
    is added to the generated one.
    """
    configured = environ.get("OTEL_TORCH_RUN_ID", "").strip()
    if configured and not re.fullmatch(r"run-[0-9a-f]{12}", configured):
        return _file_name_part(configured)
    for job_variable, restart_variable in _JOBS:
        job_id = environ.get(job_variable, "none")
        if job_id and job_id != "none":
            return _file_name_part(f"{job_id}.{_number(environ, restart_variable, 0)}")
    generated = configured or f"run-{uuid.uuid4().hex[:12]}"
    restarts = _number(environ, "TORCHELASTIC_RESTART_COUNT", 0)
    return f"{generated}.{restarts}" if restarts else generated


def _file_name_part(run_id: str) -> str:
    """Return a run id without path separators, cut to the length that file names allow.

    >>> _file_name_part("a/b c"), len(_file_name_part("x" * 300))
    ('a_b_c', 109)
    """
    safe = re.sub(r"[^\w.+=-]", "_", run_id)
    if len(safe) <= 109:
        return safe
    return f"{safe[:100]}-{hashlib.sha256(run_id.encode()).hexdigest()[:8]}"


def distributed_rank() -> tuple[int, int] | None:
    """Return (rank, world size) of torch.distributed if it is loaded and initialized."""
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
    except Exception:
        pass
    return None


def this_job(environ: Mapping[str, str] = os.environ) -> Job:
    """Return this process's place, from the environment or else from torch.distributed."""
    rank = local_rank = 0
    world_size = 1
    for names in _LAUNCHERS:
        if environ.get(names[0], "").isdecimal():
            rank, world_size = _number(environ, names[0], 0), _number(environ, names[2], 1)
            local_rank = _number(environ, names[1], rank)
            break
    else:
        distributed = distributed_rank()
        if distributed is not None:
            rank, world_size = distributed
            local_rank = _number(environ, "LOCAL_RANK", rank)
    return Job(
        name_run(environ), rank, local_rank, max(world_size, 1), socket.gethostname(), os.getpid()
    )
