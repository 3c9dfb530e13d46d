"""One process against a mesh of ranks: the silent faults that parallel layouts were found to have,
each beside the same layout without the fault.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from otel_torch.parity.diff import diff
from otel_torch.parity.finding import Report
from tests.support import PROGRAMS, run_python, run_ranks

pytestmark = pytest.mark.scoreboard

PROGRAM = PROGRAMS / "split_on_a_mesh.py"
# options that the model in one process does not have
LAYOUT = ("tensor", "context", "data", "balanced", "dealt")


@pytest.fixture(scope="module")
def compare(tmp_path_factory):
    """Return a function that compares one process with the ranks of a layout."""
    references: dict[tuple[str, ...], Path] = {}

    def record(path: Path) -> dict[str, str]:
        return {"OTEL_TORCH_CAPTURE": "training", "OTEL_TORCH_JSONL": str(path)}

    def compared(layout: str, *fault: str) -> Report:
        folder, options = tmp_path_factory.mktemp("mesh"), layout.split()
        model = tuple(option for option in options if not option.startswith(LAYOUT))
        if model not in references:
            references[model] = folder / "reference.jsonl"
            run_python(folder, PROGRAM, *model, **record(references[model]))
        ranks = math.prod(int(option.partition("=")[2]) for option in options if "=" in option)
        run_ranks(
            folder, PROGRAM, *options, *fault, ranks=ranks, **record(folder / "ranks/run.jsonl")
        )
        return diff(references[model], folder / "ranks")

    return compared


@pytest.mark.parametrize(
    "layout",
    [
        "tensor=2 smooth",
        "data=2 mtp",
        "context=2",
        "tensor=2 data=2",
        "tensor=2 data=2 mixture",
        "tensor=2 data=2 recompute",
        "tensor=2 context=2",
        "context=2 data=2",
        "context=2 balanced",
        "context=2 data=2 balanced",
        "data=2 dealt",
    ],
)
def test_a_clean_layout_matches_one_process(compare, layout):
    report = compare(layout)
    assert (report.verdict, report.introduced, report.warnings) == ("match", [], [])
    assert report.pairs > 300


# layout, fault -> what the finding says: module, tensor, phase, rank, cause
Q, V, PROJ = (f"blocks.1.attention.{part}" for part in ("q", "v", "proj"))
ROUTER, DOWN = "blocks.1.mlp.router", "blocks.1.mlp.down"
FAULTS = {
    ("tensor=2 smooth", "local_smoothing"): ("", "loss", "loss", 0, "ranks_differ"),
    ("tensor=2", "gathered_logits"): ("", "loss", "loss", 0, "whole_as_part"),
    ("data=2 mtp", "mtp_local_tokens"): ("", "loss", "loss", 0, "mean_of_means"),
    ("tensor=2 data=2 recompute", "recompute_group"): (
        DOWN, "param_grad.weight", "backward", None, None,
    ),
    ("tensor=2 data=2 mixture", "mask_group"): (ROUTER, "grad", "backward", None, None),
    ("tensor=2 data=2", f"{Q}:another_group"): (
        "blocks.1.norm1", "param_grad.bias", "backward", 0, "partial_sum",
    ),
    ("tensor=2 data=2", "embedding_group"): (
        "blocks.0.attention.q", "out", "forward", 2, "another_ranks_part",
    ),
    ("tensor=2", "sink_norm"): ("", "param_grad", "backward", None, "scaled"),
    ("context=2", "local_tokens"): ("", "loss", "loss", 0, "mean_of_means"),
    ("tensor=2 mixture", "router_count"): (ROUTER, "grad", "backward", 0, None),
    ("context=2", "positions_from_0"): ("positions", "in[0]", "forward", 1, "another_ranks_part"),
    ("context=2", "blocks.1.attention:missing_gather"): (PROJ, "in[0]", "forward", 1, None),
    ("context=2", "blocks.1.attention:local_mask"): (PROJ, "in[0]", "forward", 1, None),
    ("context=2", "blocks.1.attention:unreduced_keys"): (V, "grad", "backward", 0, None),
    ("context=2 balanced", "positions_from_0"): (
        "positions", "in[0]", "forward", 1, "another_ranks_part",
    ),
    ("context=2 balanced", "blocks.1.attention:local_mask"): (PROJ, "in[0]", "forward", None, None),
}  # fmt: skip


@pytest.mark.parametrize(("layout", "fault"), FAULTS, ids=lambda words: words)
def test_a_fault_of_a_layout_is_named(compare, layout, fault):
    first = compare(layout, fault).first
    assert first is not None
    named = (first.port_module, first.port_tensor, first.phase, first.rank)
    assert (*named, first.cause and first.cause.kind) == FAULTS[layout, fault]
