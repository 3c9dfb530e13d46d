"""FastVideo's two trainers, unmodified: optimizer steps, gradient accumulation, activation
checkpointing, FSDP, torchrun.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.fastvideo.runs import Run

pytestmark = pytest.mark.fastvideo

# run -> the outermost owner of the trained transformer, and by what name it holds it: the newer
# trainer's method owns its models
TRAINED = {
    "training": ("WanTransformer3DModel", ""),
    "training_in_two_ranks": ("WanTransformer3DModel", ""),
    "new_training": ("FineTuneMethod", "role_modules.student.transformer"),
}


class Trained:
    """A training run: its transformer's records a rank, their modules named relative to the
    transformer, and the rows of phase `train` a rank.
    """

    def __init__(self, run: Run, model: str, root: str) -> None:
        self.run, self.model, self.root = run, model, root
        self.ranks: list[list[dict[str, Any]]] = []
        self.health: list[list[dict[str, Any]]] = []
        for path in run.recordings():
            of_model = [record for record in run.records_of(path) if record["model"] == model]
            self.health.append([record for record in of_model if record["phase"] == "train"])
            records = [record for record in of_model if record["phase"] != "train"]
            assert all(record["module"].startswith(root) for record in records)
            self.ranks.append(
                [{**r, "module": r["module"][len(root) :].removeprefix(".")} for r in records]
            )


@pytest.fixture(params=TRAINED)
def trained(request: pytest.FixtureRequest) -> Trained:
    run: Run = request.getfixturevalue(request.param)
    assert run.status == 0, run.output
    return Trained(run, *TRAINED[request.param])


def test_steps_are_the_optimizers_and_accumulated_forwards_are_calls(trained: Trained) -> None:
    for records in trained.ranks:
        seen = [
            (r["step"], r["call"]) for r in records if r["module"] == "" and r["phase"] == "forward"
        ]
        assert seen == [(step, call) for step in (0, 1, 2) for call in (0, 1)]


def test_every_step_has_its_losses_rate_and_norm(trained: Trained) -> None:
    for rows in trained.health:
        for quantity, calls in {"loss": 2, "lr[0]": 1, "grad_norm": 1}.items():
            seen = [
                (row["step"], row["call"])
                for row in rows
                if (row["module"], row["tensor"]) == ("", quantity)
            ]
            assert seen == [(step, call) for step in (0, 1, 2) for call in range(calls)], quantity
        assert not any(row["nonfinite"] for row in rows)


def test_recomputed_blocks_are_labelled(trained: Trained) -> None:
    for records in trained.ranks:
        layer = Counter((r["step"], r["phase"]) for r in records if r["module"] == "blocks.1.to_q")
        assert layer == {
            (step, phase): 2 for step in (0, 1, 2) for phase in ("forward", "recompute")
        }
        assert {record["phase"] for record in records} == {"forward", "recompute"}
        assert {r["module"].split(".")[0] for r in records if r["phase"] == "recompute"} == {
            "blocks"
        }


def test_names_are_canonical(trained: Trained) -> None:
    for records in trained.ranks:
        modules = {record["module"] for record in records}
        assert {"", "blocks.0", "blocks.1", "blocks.1.ffn", "proj_out"} <= modules
        assert not any("wrapped" in module or "_orig_mod" in module for module in modules)
    assert not any("FSDP" in record["model"] for record in trained.run.records())


def test_no_two_records_share_a_key(trained: Trained) -> None:
    fields = ("model", "module", "tensor", "loop", "step", "call", "phase")
    for path in trained.run.recordings():
        keys = Counter(
            tuple(record[field] for field in fields) for record in trained.run.records_of(path)
        )
        assert max(keys.values()) == 1


def test_what_a_step_consists_of_is_timed(trained: Trained) -> None:
    for metadata in trained.run.metadata():
        counts = {
            name.rpartition("_region_")[2]: row["count"]
            for name, row in metadata["regions"].items()
        }
        assert {
            "training_step": 3,
            "training_backward": 6,
            "training_optimizer": 3,
        }.items() <= counts.items()


def test_registered_regions_are_timed(training: Run) -> None:
    (metadata,) = training.metadata()
    counts = {
        name.rpartition("_region_")[2]: row["count"] for name, row in metadata["regions"].items()
    }
    entered = {
        "model_loading": 1,
        "training_train": 1,
        "training_train_one_step": 3,
        "training_save_checkpoint": 1,
    }
    assert entered.items() <= counts.items()


def test_each_rank_has_its_recording_and_no_other_process_has_one(
    training_in_two_ranks: Run,
) -> None:
    assert [path.name.split(".")[-2] for path in training_in_two_ranks.recordings()] == [
        "rank0",
        "rank1",
    ]
    assert [(data["rank"], data["world_size"]) for data in training_in_two_ranks.metadata()] == [
        (0, 2),
        (1, 2),
    ]
    assert len({data["run_id"] for data in training_in_two_ranks.metadata()}) == 1
