"""Scores planted faults: python -m tests.corpora.versions.score_planted FOLDER [--draws 20]

FOLDER receives the packages (pip), environments and runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch  # noqa: F401 - forks of this process need it
from numpy.typing import NDArray

from tests.corpora.versions.planted import PlantedFault, plant
from tests.corpora.versions.tiny_environments import install, make_environment

HARMLESS = 40
PROGRAMS = {
    "timm": (
        "timm==1.0.31",
        """\
import timm, timm.loss, timm.optim, torch
torch.manual_seed(0)
model = timm.create_model(
    "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=24, num_heads=3,
    global_pool="avg", qk_norm=True, init_values=0.5, num_classes=5, class_token=True,
).train()
other = timm.create_model("convnext_atto", depths=(1, 1, 1, 1), dims=(4, 4, 8, 8), num_classes=5).train()
x = torch.randn(2, 3, 32, 32)
optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-2, weight_decay=0.1)
loss = timm.loss.LabelSmoothingCrossEntropy(0.1)(model(x) + other(x), torch.tensor([1, 3]))
loss.backward()
optimizer.step()
print("RESULT", torch.cat([p.detach().flatten() for p in (*model.parameters(), loss)]).numpy().tobytes().hex())
""",
    ),
    "diffusers": (
        "diffusers==0.42.1",
        """\
import torch
from diffusers import DDIMScheduler, DPMSolverMultistepScheduler, UNet2DConditionModel
torch.manual_seed(0)
model = UNet2DConditionModel(
    sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
    cross_attention_dim=8, attention_head_dim=4,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
).eval()
x, text = torch.randn(1, 4, 8, 8), torch.randn(1, 3, 8)
ends = []
with torch.no_grad():
    for scheduler in (DDIMScheduler(), DPMSolverMultistepScheduler(use_karras_sigmas=True)):
        scheduler.set_timesteps(2)
        sample = x
        for step in scheduler.timesteps:
            sample = scheduler.step(model(sample, step, text).sample, step, sample).prev_sample
        ends.append(sample)
print("RESULT", torch.stack(ends).numpy().tobytes().hex())
""",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--draws", type=int, default=20, help="of each package")
    parser.add_argument("--first", type=int, default=0, help="go on with this draw")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    for name in PROGRAMS:
        if options.only in name:
            _score(name, options)


def _score(name: str, options: argparse.Namespace) -> None:
    requirement, program = PROGRAMS[name]
    folder: Path = options.folder.resolve() / f"planted-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    old = install(requirement, options.folder.resolve())
    new = folder / "new"
    (folder / "train.py").write_text(program)
    pythons = [make_environment(folder / x, [own]) for x, own in (("a", old), ("b", new))]
    right = _result(old, folder)
    assert right is not None, "the program fails without a fault"
    ran = _functions_that_ran(pythons[0], old, folder)
    draw = random.Random(options.seed)
    for number in range(options.draws):
        while True:
            shutil.rmtree(new, ignore_errors=True)
            shutil.copytree(old, new, ignore=shutil.ignore_patterns("__pycache__"))
            fault = plant(new, ran, HARMLESS, draw)
            if _differ(right, _result(new, folder)):
                break
        if number < options.first:
            continue
        answer = _bisect(pythons, folder)
        print(json.dumps({"package": name, "draw": number, **_grade(fault, answer)}), flush=True)


def _differ(right: NDArray[Any], result: NDArray[Any] | None) -> bool:
    """Return whether a program that ran computes something else, by more than rounding."""
    if result is None:
        return False
    return not (result.shape == right.shape and np.allclose(result, right, rtol=1e-5, atol=1e-6))


def _result(package: Path, folder: Path) -> NDArray[Any] | None:
    """Return what the program computes, None if it fails.

    In a fork of this process, which has torch already: most of a run is its import.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writer, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.path.insert(0, str(package))
        try:
            runpy.run_path(str(folder / "train.py"), run_name="__main__")
            sys.stdout.flush()
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        lines = [line for line in stream.read().splitlines() if line.startswith("RESULT")]
    os.waitpid(child, 0)
    return np.frombuffer(bytes.fromhex(lines[-1].split()[1]), np.float32) if lines else None


def _functions_that_ran(python: Path, package: Path, folder: Path) -> list[tuple[str, str]]:
    code = (
        "import runpy, sys\nsys.path.insert(0, '.')\n"
        "from otel_torch.code_exchange.executed_functions import note_executed\n"
        f"note_executed([{str(package)!r}], 'ran')\n"
        "runpy.run_path('train.py', run_name='__main__')\n"
    )
    shutil.rmtree(folder / "ran", ignore_errors=True)
    root = Path(__file__).parents[3]
    environment = {"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    command = [python, "-c", code]
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for own in (folder / "ran").iterdir() for line in own.open()]
    return [
        (str(Path(file).relative_to(package)), name) for file, name, *_ in lines if "<" not in name
    ]


def _bisect(pythons: list[Path], folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "otel_torch", "bisect", "--json", "-", "--out", "runs"]
    command += ["--python-a", str(pythons[0]), "--python-b", str(pythons[1]), "--", "train.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _grade(fault: PlantedFault, answer: dict[str, Any]) -> dict[str, Any]:
    names = [change["name"] for change in answer["changes"]]
    right = (
        f"{fault.file.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}.{fault.name}"
    )
    return {
        "is_right": names == [right] and answer["healed"],
        "fault": right,
        "what": fault.what,
        "named": names,
        "healed": answer["healed"],
        "verdict": answer["verdict"],
        "reason": answer["reason"],
        "runs": len(answer["runs"]) + len(answer["failed"]) + bool(answer["crash"]),
        "candidates": answer["candidates"],
    }


if __name__ == "__main__":
    main()
