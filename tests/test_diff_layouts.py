"""One process against the ranks of the same model: clean splits are silent, faults are named with
their module, their rank, and what the ranks hold.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from otel_torch.parity.diff import diff
from otel_torch.parity.finding import Report
from tests.support import PROGRAMS, run_python, run_ranks

pytestmark = pytest.mark.scoreboard

HAND, LIBRARY = PROGRAMS / "hand_split.py", PROGRAMS / "split_by_library.py"
RANKS = 2


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Return a function that records a program in one process, once for each choice of options."""
    folder, made = tmp_path_factory.mktemp("references"), {}

    def reference(program: Path, *options: str) -> Path:
        path = folder / f"reference{len(made)}.jsonl"
        if (program, options) not in made:
            run_python(folder, program, *options, **_recording(path, options))
            made[program, options] = path
        return made[program, options]

    return reference


def _recording(path: Path, options: tuple[str, ...]) -> dict[str, str]:
    capture = "training" if {"train", "alone"} & {*options} else "parity"
    return {"OTEL_TORCH_CAPTURE": capture, "OTEL_TORCH_JSONL": str(path)}


def _compare(tmp_path: Path, program: Path, reference: Path, *options: str) -> Report:
    kind = ("alone",) if program is LIBRARY else options
    run_ranks(
        tmp_path, program, *options, ranks=RANKS, **_recording(tmp_path / "ranks/run.jsonl", kind)
    )
    return diff(reference, tmp_path / "ranks")


@pytest.mark.parametrize(
    "options",
    [(), ("experts",), ("dropout",), ("fused", "train"), ("train",), ("sequence", "train")],
    ids=lambda options: " ".join(options) or "tensor",
)
def test_a_model_split_by_hand_matches_one_process(references, tmp_path, options):
    reference = references(HAND, *options)
    report = _compare(tmp_path, HAND, reference, *options)
    assert (report.verdict, report.introduced, report.warnings) == ("match", [], [])
    whole = {"norm", "head", "embed"}
    assert whole <= {pair.module for pair in report.compared}


@pytest.mark.parametrize("how", ["data", "fsdp", "tensor", "sequence"])
def test_a_model_split_by_a_library_matches_one_process(references, tmp_path, how):
    report = _compare(tmp_path, LIBRARY, references(LIBRARY, "alone"), how)
    assert (report.verdict, report.introduced, report.warnings) == ("match", [], [])
    assert not report.weaker and report.pairs > 100


def test_stages_that_count_from_0_are_numbered_as_the_whole(references, tmp_path):
    report = _compare(tmp_path, LIBRARY, references(LIBRARY, "stages"), "stages")
    assert (report.verdict, report.introduced, report.warnings) == ("match", [], [])
    assert report.unpaired == {"reference": [], "port": []}
    assert {f"blocks.{index}.down" for index in range(4)} <= {
        pair.port_module for pair in report.compared if pair.state == "right"
    }


# fault -> options, then what the finding says: module, tensor, phase, rank, cause
DOWN, PROJ, UP = "blocks.0.mlp.down", "blocks.0.attention.proj", "blocks.1.mlp.up"
FAULTS = {
    f"{DOWN}:missing": ((), DOWN, "out", "forward", 0, "partial_sum"),
    f"{PROJ}:missing": ((), PROJ, "out", "forward", 0, "partial_sum"),
    "blocks.1.mlp.down:missing": (
        ("fused",), "blocks.1.mlp.down", "out", "forward", 0, "partial_sum",
    ),
    "embed:missing": ((), "embed", "out", "forward", 0, "partial_sum"),
    f"{DOWN}:doubled": ((), DOWN, "out", "forward", 0, "reduced_twice"),
    f"{DOWN}:bias_before": ((), DOWN, "out", "forward", 0, "bias_on_each_rank"),
    f"{UP}:shard": ((), UP, "param.weight", "forward", 1, "another_ranks_part"),
    f"{DOWN}:shards_swapped": ((), DOWN, "param.weight", "forward", 0, "another_ranks_part"),
    "embed:rows": ((), "embed", "out", "forward", 0, None),
    "experts:offset": (("experts",), "blocks.0.mlp", "out", "forward", 0, None),
    "blocks.1:stream": (("dropout",), "blocks.1.dropout", "out", "forward", 0, "random_stream"),
    f"{DOWN}:swapped": (("sequence",), DOWN, "out", "forward", 0, "another_ranks_part"),
    f"{PROJ}:doubled": (("sequence",), PROJ, "out", "forward", 1, "another_ranks_part"),
    f"{UP}:backward": (("train",), UP, "grad_in[0]", "backward", 0, "partial_sum"),
    "blocks.1.attention.k:backward": (
        ("train",), "blocks.1.norm1", "grad", "backward", 0, "partial_sum",
    ),
    "blocks.0.norm1.weight:unreduced": (
        ("sequence", "train"), "blocks.0.norm1", "param_grad.weight", "backward", 0, "partial_sum",
    ),
    f"{PROJ}.bias:unreduced": (
        ("sequence", "train"), PROJ, "param_grad.bias", "backward", 0, "partial_sum",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_split_is_named_with_its_rank(references, tmp_path, fault):
    options, module, tensor, phase, rank, cause = FAULTS[fault]
    report = _compare(tmp_path, HAND, references(HAND, *options), *options, fault)
    first = report.first
    assert first is not None
    assert (first.port_module, first.port_tensor, first.phase) == (module, tensor, phase)
    assert (first.rank, first.cause and first.cause.kind) == (rank, cause)


def test_a_loss_averaged_over_local_tokens_is_named(references, tmp_path):
    reference = tmp_path / "reference.jsonl"
    run_python(tmp_path, LIBRARY, "data_wrong_mean", **_recording(reference, ("alone",)))
    first = _compare(tmp_path, LIBRARY, reference, "data_wrong_mean").first
    assert first is not None and (first.phase, first.tensor) == ("loss", "loss")
    assert first.cause is not None and first.cause.kind == "mean_of_means"


def test_a_partial_sum_is_said_in_words(references, tmp_path):
    first = _compare(tmp_path, HAND, references(HAND), "embed:missing").first
    assert first is not None
    assert first.explanation.startswith(
        "Each rank has a partial sum: the reference has the sum of those of the 2 ranks, so a "
        "reduction over the ranks (all-reduce, reduce-scatter) is missing."
    )


def test_only_one_wrong_rank_is_named(references, tmp_path):
    first = _compare(tmp_path, HAND, references(HAND), f"{UP}:shard").first
    assert first is not None and first.explanation.endswith("Only rank 1 is wrong.")
