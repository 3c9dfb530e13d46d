"""The names of our variables as attributes: how `opentelemetry-instrument --torch_steps 0-3` learns
which options exist.
"""

import dataclasses

from otel_torch.settings import Settings

globals().update(
    {row.metadata["name"]: row.metadata["name"] for row in dataclasses.fields(Settings)}
)
