"""The resource of everything that a process sends. Never holds a command line, which may contain
secrets.
"""

from __future__ import annotations

from opentelemetry.sdk.resources import Resource

from otel_torch.process.job import Job

# added by OpenTelemetry's process detector if a user enables it
_PRIVATE = frozenset({"process.command", "process.command_line", "process.command_args"})


def build_resource(job: Job) -> Resource:
    """Return the resource of this process: what the standard detection finds (OTEL_SERVICE_NAME,
    OTEL_RESOURCE_ATTRIBUTES, detectors), which overrides rank, host and run.
    """
    own = Resource({
        "host.name": job.host,
        "process.pid": job.pid,
        "dl.rank": job.rank,
        "dl.local_rank": job.local_rank,
        "dl.world_size": job.world_size,
        "otel_torch.run.id": job.run_id,
    })  # fmt: skip
    detected = Resource.create()  # with service.instance.id, new in every process
    merged = own.merge(detected)
    return Resource(
        {key: value for key, value in merged.attributes.items() if key not in _PRIVATE},
        merged.schema_url,
    )
