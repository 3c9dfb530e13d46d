"""The environment variables as attributes.

`opentelemetry-instrument` reads its command-line options from here: `--torch_steps 0-3`.
"""

import dataclasses

from otel_torch.settings import Settings

globals().update(
    {row.metadata["name"]: row.metadata["name"] for row in dataclasses.fields(Settings)}
)
