"""Runs one program of the corpus in a process of its own, and reads which laws were named."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path

from otel_torch.cli import main as command
from tests.corpora.laws import (  # noqa: F401  each enters its programs in the table
    broken_gradients,
    broken_loops,
    broken_optimizers,
    by_lightning,
    by_transformers,
    healthy,
    ranks,
    second_broken,
    second_healthy,
    third,
    traincheck,
)
from tests.corpora.laws.program import PROGRAMS as PROGRAMS
from tests.corpora.laws.program import Program
from tests.corpora.laws.watch import laws_of_ranks
from tests.interpreters import TORCH, run_group, run_script
from tests.support import checked, environment

RUN = Path(__file__).with_name("run.py")
TIMEOUT_S = 120
QUIET = {
    "ACCELERATE_USE_CPU": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}  # fmt: skip
# what frameworks import beside themselves, loaded once; they themselves are imported by each program
WARM = {
    by_transformers.__name__: (*TORCH, "scipy.signal", "sklearn.metrics", "torchvision"),
    by_lightning.__name__: (*TORCH, "scipy.signal", "sklearn.metrics", "torchmetrics"),
}


def execute(program: Program, folder: Path, *options: str, **variables: str) -> str:
    """Run a program; return what it printed."""
    argv = [str(RUN), program.module, program.name, *options]
    env = environment(folder, **QUIET, **variables)
    if program.ranks > 1:
        done = run_group(argv, env, folder, TIMEOUT_S, program.ranks)
        if done is None:
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
            done = run_script([*launch, *argv], env, folder, TIMEOUT_S, fresh=True)
    else:
        done = run_script(argv, env, folder, TIMEOUT_S, WARM.get(program.module, TORCH))
    return checked(done).stdout


def named_laws(program: Program, folder: Path) -> dict[str, str]:
    """Record a program; return the laws that `otel-torch show` names, with its words."""
    execute(program, folder)
    recording = folder if program.ranks > 1 else folder / "run.jsonl"
    with redirect_stdout(io.StringIO()) as shown:
        status = command.main(["show", str(recording), "--json"])
    assert status == 0, shown.getvalue()
    training = json.loads(shown.getvalue()).get("training") or {}
    return {law["law"]: law["text"] for law in training.get("laws", [])}


def watched_laws(program: Program, folder: Path) -> dict[str, str]:
    """Run a program without recording; return the laws that it is seen to break.

    Raises: AssertionError, where a healthy training changes no parameter.
    """
    printed = execute(program, folder, "--watch", OTEL_TORCH_ENABLED="0")
    watched = [
        json.loads(line.removeprefix("WATCHED "))
        for line in printed.splitlines()
        if line.startswith("WATCHED ")
    ]
    laws: dict[str, str] = {}
    for rank in watched:
        laws |= rank["laws"]
        assert program.law or rank["changed"], "no parameter changes"
    if program.ranks > 1:
        laws |= laws_of_ranks([rank["rank"] for rank in watched])
    return laws
