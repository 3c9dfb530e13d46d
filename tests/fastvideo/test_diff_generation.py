"""FastVideo's generation against diffusers', from one model folder: text encoder, every denoising
step, VAE.

Both run unmodified, as processes of their own that the environment alone switches on; FastVideo
makes a video without a mistake first, and one with each mistake after it, which must be named at
its own place and nowhere else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from otel_torch.parity.diff import diff
from otel_torch.parity.finding import Finding, Report
from tests.fastvideo.runs import HERE, Run, run

pytestmark = pytest.mark.fastvideo

TRANSFORMER, TEXT_ENCODER, VAE = "WanTransformer3DModel", "UMT5EncoderModel", "AutoencoderKLWan"
MISTAKES = ("none", "gate", "guidance", "decode", "timestep", "as_it_is")
PARITY = {"OTEL_TORCH_CAPTURE": "parity"}


def program(name: str, *arguments: str) -> list[str]:
    return [str(HERE / "programs" / name), "model", "float32", *arguments]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, wan: Path) -> Run:
    command = program("wan_in_diffusers.py", str(len(MISTAKES)))
    return run(tmp_path_factory.mktemp("wan_in_diffusers") / "run", wan, command, **PARITY)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory, wan: Path) -> Run:
    return run(
        tmp_path_factory.mktemp("wan_in_fastvideo") / "run",
        wan,
        program("wan_in_fastvideo.py", *MISTAKES),
        **PARITY,
    )


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, wan: Path) -> list[list[str]]:
    """The lines of FastVideo's own trace, without us: of a video without a mistake, and of two with
    one.
    """
    variables = {
        "FASTVIDEO_TRACE_ACTIVATIONS": "1",
        "FASTVIDEO_TRACE_OUTPUT": "trace.jsonl",
        "OTEL_TORCH_ENABLED": "0",
    }
    command = program("wan_in_fastvideo.py", "none", "gate", "guidance")
    done = run(tmp_path_factory.mktemp("traced") / "run", wan, command, **variables)
    assert done.status == 0, done.output
    lines = (done.folder / "trace.jsonl").read_text().splitlines(keepends=True)
    size = len(lines) // 3
    return [lines[at : at + size] for at in range(0, len(lines), size)]


@pytest.fixture(scope="module")
def report(reference: Run, port: Run) -> Report:
    assert (reference.status, port.status) == (0, 0), reference.output + port.output
    return diff(*reference.recordings(), *port.recordings())


@dataclass(frozen=True)
class Place:
    """Where something was found: what of which call of the port, in which video (0 is the first)
    and which step of it.
    """

    video: int | None
    model: str | None
    module: str | None
    tensor: str | None
    side: str | None
    kind: str
    step: int | None
    call: int | None


def place(one: Finding) -> Place:
    return Place(
        one.port_loop,
        one.port_model,
        one.port_module,
        one.port_tensor,
        one.port_side,
        one.kind,
        one.port_step,
        one.port_call,
    )


def found(report: Report, mistake: str) -> list[Place]:
    return [place(one) for one in report.introduced if one.port_loop == MISTAKES.index(mistake)]


def test_a_generation_without_a_mistake_is_the_same_from_prompt_to_pixels(report: Report) -> None:
    assert found(report, "none") == []
    compared = {
        (one.port_model, one.port_step, one.port_call)
        for one in report.compared
        if one.port_loop == 0
    }
    assert {(TRANSFORMER, step, call) for step in (0, 1, 2) for call in (0, 1)} <= compared
    assert {model for model, _, _ in compared} == {TRANSFORMER, TEXT_ENCODER, VAE}


def test_a_wrong_gate_is_named_in_the_first_block_of_the_first_step(report: Report) -> None:
    expected = Place(1, TRANSFORMER, "blocks.0.mlp_residual", "out", "output", "value", 0, 0)
    assert found(report, "gate") == [expected]
    (finding,) = (one for one in report.introduced if one.port_loop == 1)
    assert (finding.module, finding.tensor) == ("blocks.0", "out"), (
        "diffusers adds the gated branch in the block itself"
    )


def test_wrong_guidance_shows_as_what_enters_the_next_step(report: Report) -> None:
    assert found(report, "guidance") == [Place(2, TRANSFORMER, "", "in[0]", "input", "value", 1, 0)]


def test_latents_without_their_mean_show_as_what_enters_the_vae(report: Report) -> None:
    (one,) = found(report, "decode")
    assert (one.model, one.module, one.tensor, one.side) == (
        VAE,
        "post_quant_conv",
        "in[0]",
        "input",
    )


def test_a_wrong_timestep_shows_as_itself(report: Report) -> None:
    assert found(report, "timestep") == [Place(4, TRANSFORMER, "", "in[2]", "input", "value", 1, 0)]


def test_what_fastvideo_does_otherwise_is_found_too(report: Report) -> None:
    """No padding behind the prompt: another shape from its very indices on. That its schedule is
    shifted twice shows in the second step, and is named in the transformer, not where it enters.
    """
    encoding, *later = found(report, "as_it_is")
    assert {(one.model, one.step) for one in later} <= {(TRANSFORMER, 1)}
    assert (encoding.model, encoding.module, encoding.tensor) == (TEXT_ENCODER, "", "in.input_ids")
    assert (encoding.side, encoding.kind) == ("input", "shape")


# -- FastVideo's own trace of the same


def written(folder: Path, name: str, lines: list[str]) -> Path:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(lines))
    return path


def test_its_own_trace_names_no_step_and_no_call(traced: list[list[str]]) -> None:
    assert {len(lines) for lines in traced} == {6 * 77}
    row = json.loads(traced[0][0])
    assert row.keys() == {"module", "tensor", "step", "abs_mean", "sum"} and row["step"] is None


def test_its_own_traces_of_two_runs_are_compared_row_by_row(
    traced: list[list[str]], tmp_path: Path
) -> None:
    clean, gate, guidance = (
        written(tmp_path, name, lines)
        for name, lines in zip(("clean", "gate", "guidance"), traced, strict=True)
    )
    again = written(tmp_path, "again", traced[0])
    same = diff(clean, again)
    assert (same.verdict, same.pairs, same.weaker) == ("match", len(traced[0]), True)
    assert [one.module for one in diff(clean, gate).introduced] == ["blocks.0.mlp_residual"]
    between = diff(clean, guidance)
    assert [one.module for one in between.introduced] == ["patch_embedding.proj"]
    (at,) = {
        one.depth
        for one in between.compared
        if one.module == "patch_embedding.proj" and one.state == "introduced"
    }
    assert at == 0, "the first module of the second step: whatever came before it is right"


def test_its_own_trace_is_compared_with_a_recording_of_diffusers(
    reference: Run, traced: list[list[str]], tmp_path: Path
) -> None:
    report = diff(*reference.recordings(), written(tmp_path, "gate", traced[1]))
    assert report.verdict in ("diverged", "incomparable") and (
        report.first is not None or report.reason
    ), "never a match"
