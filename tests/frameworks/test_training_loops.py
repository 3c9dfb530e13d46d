"""Training loops that count their own optimizer steps: each model has the step, phase, name, gradients,
loss, rate and norm that its program says.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.frameworks.runs import check_logged, distinct, record
from tests.support import lines

pytestmark = pytest.mark.frameworks


LOGS = frozenset({"loss", "lr[0]", "grad_norm"})
NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Loop:
    """What a program does: its model, its optimizer steps, and the steps it evaluates at.

    calls: forwards per step: accumulation. recomputes: by activation checkpointing. logs: what it
    reports of each step. says: lines per rank on stderr, without those about laws.
    breaks: a law of training that is named.
    """

    program: str
    model: str
    steps: int
    evaluated_at: tuple[int, ...] = ()
    calls: int = 1
    ranks: int = 1
    recomputes: bool = False
    logs: frozenset[str] = LOGS
    says: int = 1
    breaks: str = ""


LOOPS = (
    Loop("trainers/trainer.py", "LlamaForCausalLM", 6, (2, 4, 6), calls=2, recomputes=True),
    Loop("trainers/lora_trainer.py", "LlamaForCausalLM", 3, calls=2, recomputes=True),
    Loop("trainers/sft.py", "LlamaForCausalLM", 3, recomputes=True),
    # of whose model a part runs for nothing
    Loop(
        "trainers/sentence_encoder.py",
        "MultipleNegativesRankingLoss",
        3,
        (3,),
        breaks="no_gradient",
    ),
    Loop("trainers/accelerate_loop.py", "Sequential", 8, (4, 8), calls=2),
    Loop("trainers/accelerate_loop.py", "Sequential", 4, (2, 4), calls=2, ranks=2),
    Loop("trainers/lightning_ranks.py", "Regression", 2, (0, 2), calls=2, ranks=2),
    Loop("sharded.py", "Net", 3, ranks=2, recomputes=True, says=3),  # what a rank cannot know
    # which slices the same rows in each step
    Loop(
        "grad_scaler.py",
        "GPT",
        5,
        (0, 2, 4),
        calls=2,
        logs=LOGS | {"loss_scale"},
        breaks="same_batch",
    ),
    Loop("megatron_gpt.py", "GPTModel", 3, (1, 2, 3), calls=2, ranks=2),
    Loop("graph_network.py", "Net", 4, (1, 2, 3, 4), logs=NOTHING),
    Loop("trainers/ppo.py", "ActorCriticPolicy", 8, (0, 4), logs=NOTHING),
    Loop("trainers/keras_fit.py", "Classifier", 6, (3, 6), logs=frozenset({"loss"})),
    Loop("detector.py", "FasterRCNN", 2, (2,), logs=NOTHING),
)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: f"{loop.program}-{loop.ranks}")
def test_a_loop_is_recorded_by_its_own_steps(loop: Loop, tmp_path: Path) -> None:
    run = record(tmp_path, loop.program, ranks=loop.ranks)
    assert distinct(run.rows, "model") == [loop.model]
    forwards = [row for row in run.rows if row["phase"] == "forward"]
    calls = sorted(distinct(forwards, "step", "call"))
    assert {step for step, _ in calls} == set(range(loop.steps))
    assert {call for _, call in calls} >= set(range(loop.calls))
    evaluations = [row for row in run.rows if row["phase"] == "eval"]
    assert tuple(distinct(evaluations, "step")) == loop.evaluated_at
    gradients = [row for row in run.rows if row["tensor"].startswith("param_grad.")]
    assert distinct(gradients, "step") == list(range(loop.steps))
    recomputed = [row for row in run.rows if row["phase"] == "recompute"]
    assert distinct(recomputed, "step") == list(range(loop.steps) if loop.recomputes else [])
    assert not any("module." in row["module"] for row in run.rows)
    assert len(run.ranks) == loop.ranks
    assert len(run.notes) == loop.ranks * loop.says, run.notes
    assert not loop.breaks or loop.breaks in run.broken_laws
    assert check_logged(run) == loop.logs


def test_gradients_that_megatron_shards_are_counted(tmp_path: Path) -> None:
    """A shard may have all of a parameter. The norm that clips is that of all ranks."""
    run = record(tmp_path, "megatron_gpt.py", ranks=2, DATA_PARALLEL="1")
    everything, recorded = set(), []
    for rank in range(2):
        rows = lines(run.ranks[rank])
        everything |= {(r["module"], r["tensor"]) for r in rows if r["phase"] == "attach"}
        gradients = [r for r in rows if r["tensor"].startswith("param_grad.")]
        recorded.append(distinct(gradients, "module", "tensor"))
        lost = {loss["reason"]: loss["count"] for loss in run.metadata(rank)["lost"]}
        assert lost == {"spread_over_ranks": 3 * (len(everything) - len(recorded[rank]))}
    assert all(recorded)
    assert check_logged(run) == LOGS


def test_each_model_of_a_loop_has_its_own_losses_rates_and_norms(tmp_path: Path) -> None:
    """A closure for LBFGS, flat fp32 master weights, a GAN with an EMA copy."""
    run = record(tmp_path, "plain_loops.py")
    assert check_logged(run) == {"Fit/loss", "Fit/lr[0]"} | {
        f"{model}/{quantity}" for model in ("Half", "Generator", "Critic") for quantity in LOGS
    }
    assert len(run.notes) == 1, run.notes
