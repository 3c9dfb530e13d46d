"""A robot that looks for the fault of a port. It knows nothing but `next`: it runs the steps of an
answer in order, takes the first further answer, and ends where none leads to a new one.

It mends nothing, so what asks for that, and compares again, is where it ends.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from otel_torch.cli.main import main

Answer = dict[str, Any]
_ANSWERING = ("bisect", "diff")


class Robot:
    """Follows `next` in a folder.

    Args:
        programs: The arguments that `REFERENCE_COMMAND` and `PORT_COMMAND` stand for.
        start: Runs a program in the folder, with an environment.
    """

    def __init__(
        self,
        folder: Path,
        programs: Mapping[str, Sequence[str]],
        start: Callable[[Sequence[str], Mapping[str, str]], object],
    ) -> None:
        self.folder, self.programs, self.start = folder, programs, start
        self.asked: list[tuple[str, ...]] = []

    def follow(self, command: Sequence[str]) -> Answer:
        """Run a command and what its answer leads to; return the last answer."""
        answer = self.ask(command)
        while (further := self.run(answer["next"])) is not None:
            answer = further
        return answer

    def run(self, steps: Sequence[Answer]) -> Answer | None:
        """Run steps until one answers; None if all of their answers are known."""
        commands = [tuple(step["command"]) for step in steps]
        if not any(is_answering(words) and words not in self.asked for words in commands):
            return None
        for step, words in zip(steps, commands, strict=True):
            if words[0] in self.programs:
                self.start(self.programs[words[0]], step.get("environment", {}))
            elif is_answering(words) and words not in self.asked:
                return self.ask(words)
        return None

    def ask(self, command: Sequence[str]) -> Answer:
        """Run a command that prints an answer."""
        self.asked.append(tuple(command))
        words = [argument for word in command for argument in self.programs.get(word, [word])]
        printed = io.StringIO()
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(printed):
            status = main([words[1], "--json", "-", *words[2:]])
        answer: Answer = json.loads(printed.getvalue())
        assert status == {"match": 0, "diverged": 1}.get(answer["verdict"], 2)
        return answer


def is_answering(command: Sequence[str]) -> bool:
    """Return whether a command prints an answer."""
    return command[0] == "otel-torch" and command[1] in _ANSWERING
