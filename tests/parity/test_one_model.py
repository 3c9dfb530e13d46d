"""Two models of one recording: a model and its port in one script, a trainer and its engine."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from otel_torch.cli.main import main
from otel_torch.parity.diff import diff
from otel_torch.parity.finding import Report
from otel_torch.parity.one_model import one_model
from otel_torch.parity.recording_source import RecordingSource
from otel_torch.parity.report.next_steps import next_steps
from otel_torch.parity.report.text import render_text
from tests.parity.tokens.test_tokens import (
    IDS,
    QWEN,
    engine_theta,
    engine_tokens,  # noqa: F401  # a fixture
    make,
    other_eps,
    prefill_and_decode,
    right_padded,
    serve,
    whole,
)
from tests.programs.packed_engine import ServingEngine
from tests.support import PROGRAMS, recording_to, run_python

MODELS = "Teacher", "Port"
LLAMA = LlamaForCausalLM, LlamaConfig


def run_script(folder: Path, *bugs: str, **settings: str) -> Path:
    """Record the model and its port in one script."""
    folder.mkdir(exist_ok=True)
    script = PROGRAMS / "port_in_one_script.py"
    run_python(folder, script, *bugs, **{"OTEL_TORCH_CAPTURE": "parity"} | settings)
    return folder / "run.jsonl"


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_script(tmp_path_factory.mktemp("clean"))


# -- a model and its port in one script


def test_two_models_of_one_recording_match_and_nothing_else_is_compared(
    clean: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(clean), "--models", *MODELS, "--json", "-", "--all"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["warnings"] == []
    assert content["unpaired"] == {"reference": [], "port": []}
    pairs = {(pair["model"], pair["port_model"]) for pair in content["compared"]}
    assert pairs == {MODELS}
    modules = {(pair["module"], pair["port_module"]) for pair in content["compared"]}
    assert {("embed", "stem"), ("query", "qkv"), ("head", "out")} <= modules


@pytest.mark.parametrize(
    ("bug", "module", "side", "words"),
    [
        ("scale", "fn", "input", "the code before fn did"),
        ("act", "fn", "output", "uses SiLU"),
        ("bias", "out", "output", "lacks the bias head.bias"),
    ],
)
def test_a_fault_of_the_port_is_named(
    tmp_path: Path, bug: str, module: str, side: str, words: str
) -> None:
    first = diff(run_script(tmp_path, bug), models=MODELS).first
    assert first is not None
    assert (first.model, first.port_model) == MODELS
    assert (first.port_module, first.port_side) == (module, side)
    text = first.explanation if first.cause is None else first.cause.text
    assert words in text


def test_each_model_has_the_sketches_of_what_both_were_given(clean: Path) -> None:
    """A recording has the sketch of a tensor once, be it an input or a parameter of both."""
    for model in MODELS:
        made = one_model(RecordingSource(clean), model, lambda warning: None)
        rows = list(made.rows())
        assert {row["model"] for row in rows} == {model}
        assert set(made.metadata()["models"]) == {model}
        first = {row["value"]: row for row in reversed(rows)}
        bare = [(row["module"], row["tensor"]) for row in first.values() if "sketch" not in row]
        assert bare == []
    (stem,) = (row for row in rows if (row["module"], row["tensor"]) == ("stem", "param.weight"))
    assert "row_sketch" in stem


def test_one_run_is_told_to_be_recorded_again_once(tmp_path: Path) -> None:
    report = diff(run_script(tmp_path, "bias"), models=MODELS)
    text = " ".join(render_text(report, color=False, width=400).split())
    assert text.startswith(f"reference Teacher of {tmp_path}/run.jsonl, port Port of {tmp_path}")
    again, compare = next_steps(report)
    run_script(tmp_path, "bias", **again.environment)
    _, _, recording, *words = compare.command
    assert words[:4] == ["--models", *MODELS, "--tensors"]
    first = diff(recording, models=MODELS, tensors=(words[4], words[5])).first
    assert first is not None and first.port_module == "out"
    assert "worst channels" in " ".join(first.breakdown)


def test_tensors_beside_the_recording_are_found(tmp_path: Path) -> None:
    recording = run_script(tmp_path, "scale", OTEL_TORCH_TENSORS="tensors")
    first = diff(recording, models=MODELS).first
    assert first is not None
    assert "worst tokens" in " ".join(first.breakdown)


def test_two_faults_are_told_apart_by_isolation(tmp_path: Path) -> None:
    whole = str(tmp_path / "whole")
    recording = run_script(tmp_path / "first", "scale", "bias", OTEL_TORCH_TENSORS=whole)
    assert len(diff(recording, models=MODELS, save_isolation=whole).introduced) == 1
    isolated = run_script(tmp_path / "second", "scale", "bias", OTEL_TORCH_ISOLATE=whole)
    report = diff(isolated, models=MODELS)
    assert [finding.port_module for finding in report.introduced] == ["fn", "out"]


def test_noise_golden_and_a_map_apply_to_the_chosen_models(clean: Path, tmp_path: Path) -> None:
    noise = run_script(tmp_path / "noise", OTEL_TORCH_NOISE="1")
    golden = run_script(tmp_path / "golden", OTEL_TORCH_UPCAST="float64")
    wrong = run_script(tmp_path / "wrong", "bias")
    map = tmp_path / "map.toml"
    report = diff(wrong, models=MODELS, noise=noise, golden=golden, save_map=map)
    assert report.first is not None and report.first.port_module == "out"
    assert report.golden is not None
    assert (report.golden.end.port_model, report.golden.end.nearer) == ("Port", "reference")
    assert f'# port: "{wrong}"' in map.read_text()
    assert diff(clean, models=MODELS, map=map).verdict == "match"


def test_models_are_chosen_of_two_recordings_as_well(clean: Path, tmp_path: Path) -> None:
    wrong = run_script(tmp_path, "act")
    report = diff(clean, wrong, models=("Port", "Port"))
    assert report.first is not None
    assert (report.first.model, report.first.module) == ("Port", "fn")
    assert diff(clean, wrong, models=("Teacher", "Teacher")).verdict == "match"


def test_models_of_several_ranks_are_compared_rank_by_rank(tmp_path: Path) -> None:
    for rank, bugs in enumerate(([], ["act"])):
        run_script(tmp_path, *bugs, RANK=str(rank), WORLD_SIZE="2", OTEL_TORCH_RUN_ID="run")
    first = diff(tmp_path, models=MODELS).first
    assert first is not None
    assert (first.rank, first.model, first.port_module) == (1, "Teacher", "fn")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--models", "Teacher", "Prot"], "run.jsonl: has no model 'Prot'; it has Port, Teacher"),
        (["--models", "Student", "Port"], "has no model 'Student'; it has Port, Teacher"),
        ([], "the following arguments are required: PORT"),
        (["--models", *MODELS, "--bitwise"], "leave out"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    clean: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(clean), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_a_function_call_with_one_recording_needs_models(clean: Path) -> None:
    with pytest.raises(ValueError, match="is one recording"):
        diff(clean)
    report = diff(clean, models=("Port", "Port"))
    assert "are the same file" in report.warnings[0]


def test_the_line_of_a_damaged_recording_is_that_of_the_file(clean: Path, tmp_path: Path) -> None:
    text = clean.read_text().splitlines()
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text("\n".join([*text[:50], "{", *text[50:]]) + "\n")
    with pytest.raises(ValueError, match=rf"{re.escape(str(damaged))}: line 51 is not JSON"):
        diff(damaged, models=MODELS)
    cut = tmp_path / "cut.jsonl"
    cut.write_text("\n".join(text)[:-9])
    (warning,) = diff(cut, models=MODELS).warnings
    assert warning.startswith(f"{cut}: line {len(text)} was cut off")


# -- a trainer and the engine that makes its rollouts, in one process


def record_both(
    path: Path,
    rollout: tuple[Callable[[Any], None], nn.Module],
    training: tuple[Callable[[Any], None], nn.Module],
) -> Path:
    """Serve some requests with the engine, then compute all their tokens with the trainer."""
    with recording_to(path, capture="tokens"):
        for run, model in (rollout, training):
            run(model)
    return path


def compare_engine(
    tmp_path: Path, fault: Callable[[Any], None], model: tuple[type, type] = LLAMA
) -> Report:
    trainer = make(*model)
    engine = ServingEngine(trainer)
    fault(engine)
    recording = record_both(tmp_path / "rl.jsonl", (serve, engine), (right_padded, trainer))
    return diff(recording, models=(type(trainer).__name__, "ServingEngine"))


@pytest.mark.parametrize("model", [LLAMA, QWEN])
def test_a_trainer_and_its_engine_match(
    tmp_path: Path, engine_tokens: None, model: tuple[type, type]
) -> None:
    report = compare_engine(tmp_path, lambda engine: None, model)
    assert (report.verdict, report.harmless) == ("match", [])
    assert "20 tokens of 2 requests" in report.warnings[0]
    assert len(report.warnings) == 1
    modules = {(pair.module, pair.port_module) for pair in report.compared}
    assert ("model.layers.1.self_attn.q_proj", "layers.1.self_attn.qkv_proj") in modules
    assert ("lm_head", "logits_processor") in modules
    assert {pair.port_model for pair in report.compared} == {"ServingEngine"}
    assert report.by_tokens
    assert report.log_probabilities is not None and report.log_probabilities.largest < 1e-5


def train(trainer: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(trainer.parameters(), 0.1)
    for _ in range(steps):
        with torch.enable_grad():
            loss = trainer(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("steps", [1, 2])
def test_a_training_of_several_steps_is_warned_of(
    tmp_path: Path,
    engine_tokens: None,
    steps: int,
) -> None:
    trainer = make(*LLAMA)
    recording = record_both(
        tmp_path / "rl.jsonl",
        (serve, ServingEngine(trainer)),
        (lambda model: train(model, steps), trainer),
    )
    report = diff(recording, models=("LlamaForCausalLM", "ServingEngine"))
    assert report.first is None
    # the engine serves before the training, whose second step has no counterpart
    assert report.verdict == ("match" if steps == 1 else "partial")
    warned = [text for text in report.warnings if "changed between its 2 steps" in text]
    assert len(warned) == steps - 1


def test_a_fault_of_the_engine_is_named(tmp_path: Path, engine_tokens: None) -> None:
    first = compare_engine(tmp_path, engine_theta).first
    assert first is not None
    assert first.port_model == "ServingEngine"
    assert first.port_module == "layers.1.self_attn.rotary_emb"
    assert "token 1 of request 0" in first.explanation


@pytest.mark.parametrize("fault", [None, other_eps])
def test_two_models_of_one_class_are_told_apart_by_their_number(
    tmp_path: Path, fault: Callable[[Any], None] | None
) -> None:
    trainer = make()
    engine = copy.deepcopy(trainer)
    if fault is not None:
        fault(engine)
    recording = record_both(tmp_path / "rl.jsonl", (prefill_and_decode, engine), (whole, trainer))
    report = diff(recording, models=("Qwen3ForCausalLM#2", "Qwen3ForCausalLM"))
    first = report.first and (report.first.model, report.first.port_module)
    expected = ("Qwen3ForCausalLM#2", "model.layers.1.input_layernorm")
    assert first == (None if fault is None else expected)
    assert "20 tokens of 2 requests" in report.warnings[0]
