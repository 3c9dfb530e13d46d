"""A misspelt module name is answered at the level at which it is misspelt."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import otel_torch
from otel_torch.rendering.near_name import near_name
from tests.support import run_python

LAYER = ["self_attn", "self_attn.q_proj", "self_attn.k_proj", "mlp", "mlp.gate_proj"]
NAMES = [
    "model", "model.embed_tokens", "model.layers",
    *[name for index in range(12) for name in
      (f"model.layers.{index}", *(f"model.layers.{index}.{part}" for part in LAYER))],
    "model.norm", "lm_head",
]  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        (r"model\.layers\.0\.self_atn", r"; model.layers.0 has self_attn, mlp; did you mean 'model\.layers\.0\.self_attn'?"),
        ("^model.layers.9.self_attn.q_prj$", "; model.layers.9.self_attn has q_proj, k_proj; did you mean '^model.layers.9.self_attn.q_proj$'?"),
        (r"layers\.\d+\.mpl", r"; model.layers.0 has self_attn, mlp; did you mean 'layers\.\d+\.mlp'?"),
        (r"layers\.12$", "; model.layers has 0 to 11"),
        ("self_atn", "; model.layers.0 has self_attn, mlp; did you mean 'self_attn'?"),
        ("^layers", "; it has model, lm_head"),
        (r"^model\.layres\.0", r"; model has embed_tokens, layers, norm; did you mean '^model\.layers\.0'?"),
        (r"model.norm.weight", "; model.norm has no modules"),
        # what cannot be taken apart is not guessed
        (r"(blocks\.0|blocks\.1)", ""),
        (r"[^.]+\.attention", ""),
        # a module matches: another setting excludes it
        (r"layers\.\d+\.mlp", ""),
    ],
)  # fmt: skip
def test_a_pattern_is_followed_as_far_as_it_goes(pattern: str, hint: str) -> None:
    assert near_name(pattern, NAMES) == hint


@pytest.mark.parametrize("pattern", ["", "^", "$", ".", "a..b", "\\", "*", ".*", "a.", r"\.", "["])
def test_no_pattern_is_too_odd(pattern: str) -> None:
    for names in (NAMES, [], [""]):
        assert isinstance(near_name(pattern, names), str)
        assert isinstance(near_name(pattern, names, is_regex=False), str)


PROGRAM = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    def forward(self, x):
        return self.encoder(x)
Net()(torch.ones(1, 4))
"""
HINT = r"; it has encoder; did you mean '^encoder\.0$'?"


def test_the_setting_of_a_run_is_answered(tmp_path: Path) -> None:
    done = run_python(tmp_path, PROGRAM, OTEL_TORCH_MODULES=r"^encodr\.0$")
    (line,) = [line for line in done.stderr.splitlines() if "is selected" in line]
    assert line.endswith(f"see OTEL_TORCH_MODULES and OTEL_TORCH_EXCLUDE{HINT}")


def test_the_option_of_show_is_answered(tmp_path: Path) -> None:
    row = {"module": "encoder.0", "tensor": "out", "step": 0, "abs_mean": 1.0}
    (tmp_path / "run.jsonl").write_text(json.dumps(row) + "\n")
    command = [sys.executable, "-m", "otel_torch", "show", "run.jsonl", "--module", r"^encodr\.0$"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.strip().endswith(HINT)


def test_the_tools_for_code_answer(capfd: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential()
    model.encoder = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.raises(ValueError, match=r"; it has encoder; did you mean 'encoder\.0'\?"):
        otel_torch.Cache(["encodr.0"]).attach(model)
    with otel_torch.track(model, include=r"^encodr\.0$"):
        pass
    assert HINT in capfd.readouterr().err
    with (
        otel_torch.interleave(model).invoke(torch.ones(1, 4)) as run,
        pytest.raises(AttributeError, match=r"it has encoder; did you mean 'encoder'\?"),
    ):
        run.encodr  # noqa: B018
