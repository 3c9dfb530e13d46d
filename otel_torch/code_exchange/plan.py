"""The plan that a child process follows: a file, named by OTEL_TORCH_EXCHANGE."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """What to replace in a child process, and what to record about it.

    Attributes:
        sources: Files that are compiled in place of the modules' own, by the modules' files.
        attributes: Names in torch, such as `torch.backends.mkldnn.enabled`, and what they are set
            to. A function is called with the value.
        watched: Folders and files whose functions are noted as they run.
        executed: Folder that receives the notes, a file for each process.
    """

    sources: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, str] = field(default_factory=dict)
    watched: Sequence[str] = ()
    executed: str | None = None

    def write(self, file: Path) -> None:
        """Write the plan where a child can read it."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")


def read_plan(file: str) -> ExchangePlan:
    return ExchangePlan(**json.loads(Path(file).read_text(encoding="utf-8")))
