"""`diff` of the files that FastVideo's own trace writes: module, tensor, step and two statistics.

A row has no model, no call, no inputs and no sketch. Its step is null where the pipeline does not
report it, guidance makes two forwards with equal keys, and NaN and Inf are bare tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from otel_torch.parity.diff import diff
from otel_torch.parity.finding import Report
from otel_torch.parity.report.text import render_text

Row = dict[str, Any]
STEPS, FORWARDS = 3, 6


class Linear(nn.Linear):
    """Returns its bias with its result, as FastVideo's linear layers do."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = (
            nn.LayerNorm(8),
            Linear(8, 16),
            nn.GELU(),
            Linear(16, 8),
        )
        self.residual = Residual()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.residual(x, self.down(self.act(self.up(self.norm(x))[0]))[0])


class Residual(nn.Module):
    gate = 0.5

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + self.gate * y


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def trace(guidance: float = 3.0, **changes: float) -> list[Row]:
    """Return the rows of three denoise steps with guidance.

    changes: gates of blocks, by number: `gate_1=0.4`.
    """
    torch.manual_seed(0)
    model, rows = Transformer(), []
    for name, gate in changes.items():
        model.blocks[int(name[-1])].residual.gate = gate  # type: ignore[union-attr, assignment]

    def write(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tensors = (
                {"out": output}
                if isinstance(output, torch.Tensor)
                else {f"out[{i}]": t for i, t in enumerate(output)}
            )
            for label, tensor in tensors.items():
                if tensor is not None:
                    numbers = tensor.detach().float()
                    rows.append(
                        {
                            "module": name,
                            "tensor": label,
                            "step": None,
                            "abs_mean": float(numbers.abs().mean()),
                            "sum": float(numbers.sum()),
                        }
                    )

        return hook

    for name, module in model.named_modules():
        if name:  # FastVideo passes over the root
            module.register_forward_hook(write(name))
    latents, prompts = torch.randn(1, 5, 4), torch.randn(2, 1, 5, 4)
    with torch.no_grad():
        for _ in range(STEPS):
            cond, uncond = (model(latents + prompt) for prompt in prompts)
            latents = latents - 0.1 * (uncond + guidance * (cond - uncond))
    return rows


def forwards(rows: list[Row]) -> list[list[Row]]:
    size = len(rows) // FORWARDS
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def numbered(rows: list[Row]) -> list[Row]:
    """Add the steps that a pipeline with `trace_step` reports."""
    return [
        {**row, "step": number // 2}
        for number, forward in enumerate(forwards(rows))
        for row in forward
    ]


@pytest.fixture(scope="module")
def clean() -> list[Row]:
    return trace()


@pytest.fixture(scope="module")
def wrong() -> list[Row]:
    return trace(gate_1=0.4)


@pytest.fixture
def compared(tmp_path: Path) -> Callable[[list[Row], list[Row]], Report]:
    def compared(reference: list[Row], port: list[Row]) -> Report:
        paths = []
        for name, rows in (("reference", reference), ("port", port)):
            paths.append(tmp_path / f"{name}.jsonl")
            paths[-1].write_text(
                "".join(json.dumps(row) + "\n" for row in rows)
            )  # NaN as a bare token, as FastVideo does
        return diff(*paths)

    return compared


def names(report: Report) -> list[tuple[str, str, int | None]]:
    return [(pair.module, pair.tensor, pair.step) for pair in report.introduced]


# -- what is the same
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [list, numbered], ids=["null steps", "steps"])
def test_the_same_run_matches_row_by_row(clean, compared, write):
    report = compared(write(clean), write(clean))
    assert (report.verdict, report.pairs, report.introduced, report.harmless) == (
        "match",
        len(clean),
        [],
        [],
    )


def test_two_forwards_of_a_step_are_paired_in_order_of_occurrence_and_that_is_said(clean, compared):
    report = compared(numbered(clean), numbered(clean))
    assert report.verdict == "match" and any(
        "order of occurrence" in line for line in report.warnings
    )
    exchanged = [
        row
        for pair in zip(forwards(clean)[1::2], forwards(clean)[::2], strict=True)
        for part in pair
        for row in part
    ]
    assert compared(numbered(clean), numbered(exchanged)).verdict == "diverged", (
        "the other branch is another value"
    )


def test_null_steps_meet_numbered_ones(clean, compared):
    report = compared(clean, numbered(clean))
    assert (report.verdict, report.pairs) == ("match", len(clean))


def test_rounding_of_sums_is_no_difference(clean, compared):
    rounded = [
        {**row, "sum": row["sum"] * (1 + 2e-7), "abs_mean": row["abs_mean"] * (1 - 1e-7)}
        for row in clean
    ]
    assert compared(clean, rounded).verdict == "match"


def test_names_that_wrapping_left_behind_are_the_names_without(clean, wrong, compared):
    def wrapped(rows: list[Row]) -> list[Row]:
        return [
            {
                **row,
                "module": "_orig_mod."
                + row["module"].replace("blocks.1", "blocks.1._checkpoint_wrapped_module"),
            }
            for row in rows
        ]

    report = compared(clean, wrapped(clean))
    assert (report.verdict, report.pairs) == ("match", len(clean))
    (finding,) = compared(clean, wrapped(wrong)).introduced
    assert finding.module == "blocks.1.residual"
    assert finding.port_module == "_orig_mod.blocks.1._checkpoint_wrapped_module.residual"


def test_another_order_within_a_forward_is_no_difference(clean, compared):
    turned = [row for forward in forwards(clean) for row in reversed(forward)]
    report = compared(clean, turned)
    assert (report.verdict, report.pairs) == ("match", len(clean))


# -- what is not
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write, step", [(list, None), (numbered, 0)], ids=["null steps", "steps"])
def test_the_first_wrong_module_is_named_and_no_later_one(clean, wrong, compared, write, step):
    report = compared(write(clean), write(wrong))
    assert report.verdict == "diverged" and names(report) == [("blocks.1.residual", "out", step)]


def test_what_comes_between_two_steps_shows_at_the_first_module_of_the_next(clean, compared):
    report = compared(numbered(clean), numbered(trace(guidance=3.5)))
    assert names(report) == [("embed", "out", 1)]


def test_a_difference_of_which_nothing_comes_is_harmless(clean, compared):
    changed = [
        {**row, "abs_mean": row["abs_mean"] * 1.1} if row["module"] == "blocks.0.up" else row
        for row in clean
    ]
    report = compared(clean, changed)
    assert report.verdict == "match"
    assert {(pair.module, pair.tensor) for pair in report.harmless} == {("blocks.0.up", "out[0]")}


@pytest.mark.parametrize("spelled", [math.nan, "NaN"], ids=["a bare token", "a string"])
def test_a_value_that_is_not_finite_is_named_as_such(clean, compared, spelled):
    index = next(number for number, row in enumerate(clean) if row["module"] == "blocks.1.act")
    broken = clean[:index] + [{**row, "abs_mean": spelled, "sum": spelled} for row in clean[index:]]
    report = compared(clean, broken)
    assert (report.introduced[0].kind, report.introduced[0].error) == ("nonfinite", math.inf)
    assert names(report) == [("blocks.1.act", "out", None)]
    assert compared(broken, broken).verdict == "match", (
        "what is not finite on both sides is the same"
    )


@pytest.mark.parametrize("module", ["embed", "blocks.0.act", "head"])
def test_rows_that_one_side_lacks_disturb_no_others(clean, wrong, compared, module):
    def without(rows: list[Row]) -> list[Row]:
        return [row for row in rows if row["module"] != module]

    report = compared(clean, without(clean))
    assert (report.verdict, report.pairs) == ("match", len(without(clean)))
    assert [pair.module for pair in report.unpaired["reference"]] == [module]
    assert names(compared(without(clean), wrong)) == [("blocks.1.residual", "out", None)]


def test_a_run_that_was_shorter_says_what_was_not_compared(clean, compared):
    report = compared(clean, [row for forward in forwards(clean)[:4] for row in forward])
    assert report.verdict == "partial" and any(
        "2 forwards" in line and "not compared" in line for line in report.warnings
    )


# -- what cannot be said
# --------------------------------------------------------------------------------------------------


def test_no_name_in_common_is_no_match(clean, compared):
    strangers = [{**row, "module": f"part{row['module'].replace('.', '_')}"} for row in clean]
    report = compared(clean, strangers)
    assert report.verdict == "incomparable" and "a model that its rows do not name" in report.reason


def test_it_is_said_that_statistics_alone_are_weaker(clean, wrong, compared):
    for port in (clean, wrong):
        report = compared(clean, port)
        assert report.weaker
        assert "weaker" in " ".join(render_text(report, color=False).split())


def test_nothing_is_claimed_of_inputs_that_were_not_recorded(clean, wrong, compared):
    explanation = compared(clean, wrong).first.explanation
    assert "enters it is right" not in explanation
