"""The next step after an answer: a command as data, for programs, and as the text that people read.

What a command advises is a list of these in the order in which they are run. A command that prints
its own `next` replaces the rest of the list: what follows it is another way to the same answer.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class NextStep:
    """A command to run next.

    Attributes:
        command: Its arguments. A word in capitals that ends in `_COMMAND` stands for how a program
            is started, which no recording holds.
        why: What the command is for; steps for one purpose share it.
        expects: What shows that it worked.
        environment: The variables that it is run with.
    """

    command: Sequence[str]
    why: str
    expects: str
    environment: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the entry of `next` in JSON; without `environment` where it sets nothing.

        >>> NextStep(["otel-torch", "doctor"], "look", "status 0").as_json()
        {'command': ['otel-torch', 'doctor'], 'why': 'look', 'expects': 'status 0'}
        """
        entry: dict[str, Any] = {
            "command": list(self.command),
            "why": self.why,
            "expects": self.expects,
        }
        if self.environment:
            entry["environment"] = dict(self.environment)
        return entry

    @property
    def line(self) -> str:
        """The command for a POSIX shell.

        >>> NextStep(["python", "my port.py"], "", "", {"OTEL_TORCH_MODULES": "a|b"}).line
        "OTEL_TORCH_MODULES='a|b' python 'my port.py'"
        """
        settings = (f"{name}={shlex.quote(value)}" for name, value in self.environment.items())
        return " ".join([*settings, *map(shlex.quote, self.command)])


def record(
    program: str,
    recording: str,
    why: str,
    settings: Mapping[str, str] = MappingProxyType({}),
    *,
    capture: str | None = None,
    expects: str = "the recording is written",
) -> NextStep:
    """Return the step that records a program.

    Args:
        program: `reference`, `port`, or `program` where there is only one.
        recording: The file to write, or a folder for the recordings of all ranks.

    >>> record("port", "runs", "record it", {"OTEL_TORCH_STEPS": "0"}, capture="graph").line
    'OTEL_TORCH_ENABLED=1 OTEL_TORCH_CAPTURE=graph OTEL_TORCH_JSONL=runs/port.jsonl \
OTEL_TORCH_STEPS=0 PORT_COMMAND'
    """
    environment = {"OTEL_TORCH_ENABLED": "1"}
    if capture is not None:
        environment["OTEL_TORCH_CAPTURE"] = capture
    is_file = bool(Path(recording).suffix)
    environment["OTEL_TORCH_JSONL"] = recording if is_file else f"{recording}/{program}.jsonl"
    command = [f"{program.upper()}_COMMAND"]
    return NextStep(command, why, expects, {**environment, **settings})


def beside(recording: str, word: str, *, is_folder: bool = False) -> str:
    """Return a name beside a recording, for a file or a folder.

    >>> beside("runs/port.jsonl", "near"), beside("runs/port.jsonl", "tensors", is_folder=True)
    ('runs/port-near.jsonl', 'runs/port-tensors')
    """
    path = Path(recording.removesuffix(".gz"))
    return str(path.parent / f"{path.stem}-{word}{'' if is_folder else path.suffix}")


def advice(steps: Iterable[NextStep]) -> Iterator[tuple[str, list[str]]]:
    """Yield the steps as people read them: a sentence for each purpose, and its commands.

    >>> look = NextStep(["otel-torch", "show", "a.jsonl"], "look at it", "a table")
    >>> list(advice([look]))
    [('Next: look at it:', ['otel-torch show a.jsonl'])]
    """
    for index, (why, group) in enumerate(groupby(steps, lambda step: step.why)):
        sentence = f"{why[:1].upper()}{why[1:]}:" if index else f"Next: {why}:"
        yield sentence, [step.line for step in group]


def advice_lines(steps: Iterable[NextStep]) -> list[str]:
    return [
        line
        for sentence, commands in advice(steps)
        for line in (sentence, *(f"  {command}" for command in commands))
    ]
