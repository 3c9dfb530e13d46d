"""Who this process is in its job: run id, rank, host. Read from the launcher's environment; imports
nothing heavy.
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
    """A process's place in its job. `world_size` is the number of ranks, `trace_id` 128 bits shared
    by all of them.
    """

    run_id: str
    rank: int
    local_rank: int
    world_size: int
    host: str
    pid: int

    @property
    def trace_id(self) -> int:
        """The run's trace id: every rank derives the same from the run id, so none has to ask
        another.
        """
        return int.from_bytes(hashlib.sha256(self.run_id.encode()).digest()[:16], "big") or 1


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    value = environ.get(name, "")
    return int(value) if value.isdecimal() else default


def name_run(environ: Mapping[str, str] = os.environ) -> str:
    """The run id: as set, else the launcher's job id with its restart count, else a new one. Safe
    in file names.

    A torchrun agent makes an id before its workers learn their job's: a made id, known by its form,
    yields to that. Where the job has none (torchrun's `none`), the made one tells restarts apart
    too.
    """
    chosen = environ.get("OTEL_TORCH_RUN_ID", "").strip()
    if chosen and not re.fullmatch(r"run-[0-9a-f]{12}", chosen):
        return _for_files(chosen)
    for job, restart in _JOBS:
        if (value := environ.get(job, "none")) != "none" and value:
            return _for_files(f"{value}.{_number(environ, restart, 0)}")
    made = chosen or f"run-{uuid.uuid4().hex[:12]}"
    restarts = _number(environ, "TORCHELASTIC_RESTART_COUNT", 0)
    return f"{made}.{restarts}" if restarts else made


def _for_files(run_id: str) -> str:
    """A run id as a part of file names: no separators, and no longer than they may be.

    >>> _for_files("a/b c"), len(_for_files("x" * 300))
    ('a_b_c', 109)
    """
    safe = re.sub(r"[^\w.+=-]", "_", run_id)
    return (
        safe
        if len(safe) <= 109
        else f"{safe[:100]}-{hashlib.sha256(run_id.encode()).hexdigest()[:8]}"
    )


def distributed_rank() -> tuple[int, int] | None:
    """(rank, world size) of torch.distributed where a process group is up; asks for nothing that is
    not loaded yet.
    """
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
    except Exception:
        pass
    return None


def this_job(environ: Mapping[str, str] = os.environ) -> Job:
    """Read this process's place from the environment, or from torch.distributed where the launcher
    set none.
    """
    rank = local_rank = 0
    world_size = 1
    for names in _LAUNCHERS:
        if environ.get(names[0], "").isdecimal():
            rank, world_size = _number(environ, names[0], 0), _number(environ, names[2], 1)
            local_rank = _number(environ, names[1], rank)
            break
    else:
        if (found := distributed_rank()) is not None:
            rank, world_size = found
            local_rank = _number(environ, "LOCAL_RANK", rank)
    return Job(
        name_run(environ), rank, local_rank, max(world_size, 1), socket.gethostname(), os.getpid()
    )
