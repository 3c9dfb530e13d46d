"""Training loops that count their own optimizer steps: each model has the step, phase, name and
gradients that its program says.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.frameworks.runs import distinct, record

pytestmark = pytest.mark.frameworks


@dataclass(frozen=True)
class Loop:
    """What a program does: its model, its optimizer steps, and the steps it evaluates at."""

    program: str
    model: str
    steps: int
    evaluated_at: tuple[int, ...] = ()
    calls: int = 1  # forwards per step: accumulation
    ranks: int = 1
    recomputes: bool = False  # activation checkpointing


LOOPS = (
    Loop("trainer.py", "LlamaForCausalLM", 6, (2, 4, 6), calls=2, recomputes=True),
    Loop("sft.py", "LlamaForCausalLM", 3, recomputes=True),
    Loop("sentence_encoder.py", "MultipleNegativesRankingLoss", 3, (3,)),
    Loop("accelerate_loop.py", "Sequential", 8, (4, 8), calls=2),
    Loop("accelerate_loop.py", "Sequential", 4, (2, 4), calls=2, ranks=2),
    Loop("sharded.py", "Net", 3, ranks=2, recomputes=True),
    Loop("grad_scaler.py", "GPT", 5, (0, 2, 4), calls=2),
    Loop("graph_network.py", "Net", 4, (1, 2, 3, 4)),
    Loop("ppo.py", "ActorCriticPolicy", 8, (0, 4)),
    Loop("detector.py", "FasterRCNN", 2, (2,)),
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
    assert len(run.messages) == loop.ranks, run.messages
