"""Ports with several faults: how they are drawn, and how an answer to one is graded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.corpora import corpus_of
from tests.corpora.bisected import Bisected
from tests.corpora.scores import Recorder
from tests.corpora.several import FaultyPort, judge, together

CAUSES = corpus_of("causes")


def port_with(*names: str) -> FaultyPort | None:
    return together(CAUSES, [CAUSES.cases[name] for name in names])


def test_both_faults_of_a_port_are_named_and_the_grade_needs_both(tmp_path: Path) -> None:
    port = port_with("wan_cubed", "wan_gate_missing")
    assert port is not None
    answer = Bisected(CAUSES).bisect(port.case, "fp32", Recorder(CAUSES, tmp_path))
    outcome = judge(port, answer)
    assert outcome.is_complete and (outcome.named, outcome.proven) == (2, 2)
    other = CAUSES.cases["wan_weight_not_loaded"].right
    assert other is not None
    missed = judge(replace(port, rights=(port.rights[0], other)), answer)
    assert not missed.is_complete and (missed.named, missed.elsewhere) == (1, 1)


def test_what_is_left_out_behind_what_was_healed_is_a_fault_of_its_own(tmp_path: Path) -> None:
    port = port_with("unet_channels_transposed", "unet_shortcut_missing")
    assert port is not None
    outcome = judge(port, Bisected(CAUSES).bisect(port.case, "fp32", Recorder(CAUSES, tmp_path)))
    assert outcome.is_complete and outcome.planted == 2


def test_faults_that_overlap_are_no_port() -> None:
    assert port_with("llama_residual_scaled", "llama_residual_missing") is None
    assert port_with("unet_kernel_zero", "unet_shifted") is None, "the second one is not seen"
    assert port_with("unet_shifted", "unet_skip_first") is not None
