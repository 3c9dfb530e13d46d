"""Runs a framework's program twice, bare and recorded, and compares what it printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.interpreters import command_of_tests, run_script
from tests.support import checked, environment, lines, metadata

PROGRAMS = Path(__file__).with_name("programs")
TIMEOUT_S = 300
# their programs are forked from an interpreter of their own, which has this environment; frameworks
# are imported by each program
WARM = ("torch", "torch._dynamo", "torch.distributed.fsdp")
# what the frameworks would look for on a network, print, or start
QUIET = {
    "ACCELERATE_USE_CPU": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "YOLO_OFFLINE": "true",
}

Row = dict[str, Any]


@dataclass
class Recorded:
    """The recordings of one program, one per rank, and what it printed."""

    ranks: list[Path]
    output: str
    messages: list[str]

    @property
    def broken_laws(self) -> set[str]:
        """The laws of training that any rank has said to be broken."""
        return {found[1] for line in self.messages if (found := re.search(r"\(law: (\w+)\)", line))}

    @property
    def notes(self) -> list[str]:
        """The messages that are about no law."""
        return [line for line in self.messages if "(law: " not in line]

    @property
    def rows(self) -> list[Row]:
        """All rows of rank 0."""
        return lines(self.ranks[0])

    def metadata(self, rank: int = 0) -> dict[str, Any]:
        return metadata(self.ranks[rank])


def record(tmp_path: Path, program: str, ranks: int = 1, **variables: str) -> Recorded:
    """Run a program of `programs/` bare and then recorded. Both must exit with 0 and print the
    same lines that begin with CHECK.

    Args:
        ranks: more than one starts the program with torchrun.
        variables: the environment of both runs; settings of ours affect only the recorded one.
    """
    bare = _run(tmp_path / "bare", program, ranks, variables | {"OTEL_TORCH_ENABLED": "0"})
    done = _run(tmp_path / "recorded", program, ranks, variables)
    assert _checks(bare.stdout), f"{program} checks nothing"
    assert _checks(done.stdout) == _checks(bare.stdout)
    return Recorded(
        sorted((tmp_path / "recorded").glob("run*.jsonl")),
        done.stdout,
        [line for line in done.stderr.splitlines() if line.startswith("otel_torch")],
    )


def _run(folder: Path, program: str, ranks: int, variables: dict[str, str]) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    command = [str(PROGRAMS / program)]
    if ranks > 1:
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command.append(str(PROGRAMS / program))
    settings = {"OTEL_TORCH_CAPTURE": "inputs,outputs,gradients,parameters"} | QUIET | variables
    env = environment(folder, **settings)
    env["PYTHONPATH"] = os.pathsep.join([str(PROGRAMS), *filter(None, [env.get("PYTHONPATH")])])
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    if ranks == 1:
        return checked(run_script(command, env, folder, TIMEOUT_S, WARM))
    return checked(
        subprocess.run(
            [command_of_tests("python"), *command],
            env=env,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    )


def _checks(output: str) -> list[str]:
    """Return the lines to compare; ranks print in any order."""
    return sorted(line for line in output.splitlines() if line.startswith("CHECK"))


def check_logged(run: Recorded, *, rel: float = 1e-5) -> set[str]:
    """Compare what the program reports of its training with the rows of rank 0.

    Args:
        rel: relative error that is allowed.

    Returns:
        the quantities that were compared, such as `loss`; `Net/loss` where the program says of
        which model.
    """
    logged: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for line in run.output.splitlines():
        if line.startswith("CHECK logged "):
            *_, quantity, step, value = line.split()
            logged[quantity, int(step)].append(float.fromhex(value))
    recorded: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for row in run.rows:
        if row["phase"] == "train" and row["module"] == "":
            for quantity in (row["tensor"], f"{row['model']}/{row['tensor']}"):
                recorded[quantity, row["step"]].append(float(row["mean"]))
    for place, values in logged.items():
        # a framework reports the sum of the losses of all backward passes of a step
        assert sum(recorded[place]) == pytest.approx(sum(values), rel=rel), (place, values)
    for quantity in {quantity for quantity, _ in logged}:
        steps = [
            {step for name, step in places if name == quantity} for places in (logged, recorded)
        ]
        assert steps[0] == steps[1], quantity
    return {quantity for quantity, _ in logged}


def distinct(rows: Iterable[Row], *fields: str) -> list[Any]:
    """Return the distinct values of the fields in order of first appearance: tuples, or bare
    values for one field.
    """
    values = (tuple(row.get(field) for field in fields) for row in rows)
    return [value if len(fields) > 1 else value[0] for value in dict.fromkeys(values)]
