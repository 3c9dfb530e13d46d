"""Who sends: the resource of everything that leaves this process. Never a command line, which may
hold secrets.
"""

from __future__ import annotations

from opentelemetry.sdk.resources import Resource

from otel_torch.job import Job

# what OpenTelemetry's process detector adds where it is asked for
_PRIVATE = frozenset({"process.command", "process.command_line", "process.command_args"})


def describe(job: Job) -> Resource:
    """The standard detection (OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, detectors), and under it
    rank, host and run.
    """
    ours = Resource({
        "host.name": job.host,
        "process.pid": job.pid,
        "dl.rank": job.rank,
        "dl.local_rank": job.local_rank,
        "dl.world_size": job.world_size,
        "otel_torch.run.id": job.run_id,
    })  # fmt: skip
    detected = Resource.create()  # with service.instance.id, new in every process
    merged = ours.merge(detected)
    return Resource(
        {key: value for key, value in merged.attributes.items() if key not in _PRIVATE},
        merged.schema_url,
    )
