"""`otel-torch diff` says what a fault is, looks into whole tensors of every kind of finding, and names
commands that lead on.
"""

from __future__ import annotations

import copy
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import otel_torch
from tests.corpora.case import SIDE
from tests.interpreters import command_of_tests
from tests.reports.sides import command
from tests.support import environment, recording_to, run_python

pytest.importorskip("safetensors")

SLOW = pytest.mark.scoreboard


def test_a_weight_in_bf16_is_told_from_its_rounding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()).bfloat16()
    port = copy.deepcopy(reference)
    with torch.no_grad():
        port[0].weight.mul_(1.1)
    recordings = [tmp_path / "reference.jsonl", tmp_path / "port.jsonl"]
    for model, recording in zip((reference, port), recordings, strict=True):
        with recording_to(recording, grad=True):
            model(torch.ones(2, 64, dtype=torch.bfloat16))
    first = otel_torch.diff(*recordings).first
    assert first is not None and first.cause is not None
    assert (first.cause.kind, first.cause.certain) == ("scaled", True)
    assert first.cause.text.endswith("0.weight is the reference's times 1.1")


# -- whole tensors, of every kind of finding
# --------------------------------------------------------------------------------------------------


def record(folder: Path, name: str, *arguments: str, **variables: str) -> None:
    """Run one side of a fault in a process of its own, switched on by environment alone."""
    recorded = {"OTEL_TORCH_CAPTURE": "parity", "OTEL_TORCH_JSONL": f"{name}.jsonl"}
    run_python(folder, SIDE, "causes", *arguments, **(recorded | variables))


def diff(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run `otel-torch diff`; return its JSON and its screen."""
    status, out, err = command(folder, "diff", *arguments, "--json", "diff.json")
    assert status == 1, err
    return json.loads((folder / "diff.json").read_text()), " ".join(out.split())


@pytest.mark.parametrize(
    ("fault", "kind", "side", "sentence"),
    [
        ("wan_attention_negated", "value", "input", "with the other sign"),
        pytest.param("unet_relu", "value", "output", "spread over all", marks=SLOW),
        pytest.param(
            "unet_sine_before_cosine",
            "layout",
            "output",
            "two halves of its channels swapped",
            marks=SLOW,
        ),
        pytest.param(
            "wan_one_token_nan", "nonfinite", "input", "are NaN or Inf on one side only", marks=SLOW
        ),
        pytest.param(
            "wan_last_token_lost",
            "shape",
            "input",
            "The shapes are [24] in the reference, [23]",
            marks=SLOW,
        ),
        ("llama_down_scaled", "weights", "parameter", "times 0.5"),
        pytest.param(
            "llama_query_part_scaled",
            "weights",
            "parameter",
            "rows 0 to 63 of 128, the first half",
            marks=SLOW,
        ),
        ("llama_bias_left_out", "value", "output", "spread over all"),
        pytest.param("unet_bias_left_out", "value", "output", "spread over all", marks=SLOW),
        ("wan_norm_left_out", "missing", "output", ""),
    ],
)
def test_every_kind_of_finding_is_broken_down(
    tmp_path: Path, fault: str, kind: str, side: str, sentence: str
) -> None:
    family = fault.partition("_")[0]
    record(tmp_path, "reference", family, "reference", OTEL_TORCH_TENSORS="whole/reference")
    record(tmp_path, "port", fault, "port", OTEL_TORCH_TENSORS="whole/port")
    recordings = "reference.jsonl", "port.jsonl"
    report, screen = diff(tmp_path, *recordings, "--tensors", "whole/reference", "whole/port")
    first = report["first"]
    assert (first["kind"], first["side"]) == (kind, side)
    assert sentence in " ".join(first["breakdown"]) and sentence in screen
    # the recordings say where their tensors are
    found = otel_torch.diff(*(tmp_path / recording for recording in recordings)).first
    assert found is not None and list(found.breakdown) == first["breakdown"]


def test_a_tensor_that_one_run_did_not_keep_is_named(tmp_path: Path) -> None:
    record(tmp_path, "reference", "wan", "reference", OTEL_TORCH_TENSORS="whole")
    record(tmp_path, "port", "wan_attention_negated", "port")
    record(
        tmp_path, "other", "wan", "port", OTEL_TORCH_TENSORS="other", OTEL_TORCH_MODULES="norm_out"
    )
    recordings = "reference.jsonl", "port.jsonl"
    report, _ = diff(tmp_path, *recordings, "--tensors", "whole", "other")
    (line,) = report["first"]["breakdown"]
    assert "The port kept no whole tensor of the input of blocks.0.attn.to_out" in line
    assert report["first"]["cause"]["kind"] == "negated"


def test_tensors_that_cannot_be_read_are_an_error_only_if_named(tmp_path: Path) -> None:
    record(tmp_path, "reference", "wan", "reference", OTEL_TORCH_TENSORS="whole")
    record(tmp_path, "port", "wan_attention_negated", "port", OTEL_TORCH_TENSORS="whole")
    for file in (tmp_path / "whole").glob("*/*"):
        file.write_bytes(b"\xff" * 64)
    recordings = tmp_path / "reference.jsonl", tmp_path / "port.jsonl"
    first = otel_torch.diff(*recordings).first
    assert first is not None and first.cause is not None and first.cause.kind == "negated"
    with pytest.raises(ValueError, match="not readable as safetensors"):
        otel_torch.diff(*recordings, tensors=(tmp_path / "whole", tmp_path / "whole"))


# -- the next step
# --------------------------------------------------------------------------------------------------


def test_the_commands_lead_to_the_line(tmp_path: Path) -> None:
    record(tmp_path, "reference", "llama", "reference")
    record(tmp_path, "port", "llama_rotary_pairs", "port")
    report, _ = diff(tmp_path, "reference.jsonl", "port.jsonl")
    assert report["first"]["cause"] is None and report["first"]["breakdown"] == []

    for line in commands(tmp_path, "reference.jsonl", "port.jsonl"):
        last = run(tmp_path, line)
    assert last.returncode == 1, last.stderr
    assert re.search(
        r"First divergence: \S+\.py:\d+ of the port computes something else", screen(last)
    )


def commands(folder: Path, *recordings: str) -> list[str]:
    """Return the commands that the report of a comparison names."""
    done = run(folder, f"otel-torch diff {' '.join(recordings)}")
    return re.findall(r"^  ((?:OTEL_TORCH_ENABLED|otel-torch).*)$", done.stdout, re.M)


def run(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of a report in a shell, with the programs of the corpus put in."""
    python = f"{command_of_tests('python')} {shlex.quote(str(SIDE))} causes"
    for word, replacement in {
        "REFERENCE_COMMAND": f"{python} llama reference",
        "PORT_COMMAND": f"{python} llama_rotary_pairs port",
        "otel-torch": command_of_tests("otel-torch"),
    }.items():
        command = re.sub(rf"(?<!\S){word}(?!\S)", lambda _, text=replacement: text, command)
    environ = environment(folder)
    environ.pop("OTEL_TORCH_ENABLED", None)
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environ, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def screen(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("seed", "rate", "kind"), [(1, 0.2, None), (2, 0.2, "random_stream"), (2, 0.6, "")]
)
def test_active_dropout_of_both_programs(
    tmp_path: Path, seed: int, rate: float, kind: str | None
) -> None:
    def recorded(name: str, seed: int, rate: float) -> Path:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(rate)).train()
        inputs = torch.randn(20, 32)
        with recording_to(tmp_path / name, grad=True):
            torch.manual_seed(seed)
            net(inputs)
        return tmp_path / name

    report = otel_torch.diff(recorded("one.jsonl", 1, 0.2), recorded("other.jsonl", seed, rate))
    if kind is None:
        assert report.verdict == "match"
        return
    cause = report.first.cause
    assert (report.first.module, "" if cause is None else cause.kind) == ("1", kind)
    if kind:
        assert "fallback_random" in cause.text
