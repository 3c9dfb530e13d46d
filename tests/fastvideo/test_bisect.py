"""`otel-torch bisect` of a generation by FastVideo beside one by a broken copy of it: worker processes,
a text encoder, three denoise steps, a VAE.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fastvideo.runs import EXAMPLES, HERE

pytestmark = pytest.mark.fastvideo

# in the transformer, whose other steps are not recorded: the VAE gets what they have made
FILE, RIGHT, WRONG = "layers/layernorm.py", "return residual + x * gate", "return residual + x"


def broken_copy(folder: Path) -> Path:
    """Return a folder with a copy of FastVideo in which a line is wrong."""
    spec = importlib.util.find_spec("fastvideo")
    assert spec is not None and spec.origin is not None
    package = folder / "fastvideo"
    shutil.copytree(Path(spec.origin).parent, package, copy_function=os.symlink)
    file = package / FILE
    text = file.read_text()
    assert text.count(RIGHT) == 1
    file.unlink()
    file.write_text(text.replace(RIGHT, WRONG))
    return folder


def test_the_line_of_a_fault_in_a_copy_of_fastvideo(tmp_path: Path, wan: Path) -> None:
    for name in ("model", "data"):
        (tmp_path / name).symlink_to(wan / name)
    harness, broken = HERE / "cpu", broken_copy(tmp_path / "broken")
    program = [sys.executable, str(EXAMPLES / "fastvideo_generate.py"), "model"]
    command = [
        *(sys.executable, "-m", "otel_torch", "bisect", "--json", "-", "--timeout", "180", "--"),
        *("env", f"PYTHONPATH={harness}", *program, "right"),
        "--",
        *("env", f"PYTHONPATH={broken}:{harness}", *program, "wrong"),
    ]
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 1, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["healed"]
    first = answer["faults"][0]
    assert first["proof"] == "proven" and first["line"]["text"].strip() == RIGHT
    assert first["port_line"]["file"].endswith(FILE)
    assert first["port_line"]["text"].strip() == WRONG
