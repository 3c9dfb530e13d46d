"""One process against the ranks of a model that Megatron-core or DeepSpeed splits."""

from __future__ import annotations

import pytest

from tests.parity.layouts.corpus import Expected, Recorder
from tests.parity.layouts.trainings import FRAMEWORK_CLEAN, FRAMEWORK_FAULTS

pytestmark = pytest.mark.frameworks


@pytest.fixture(scope="module")
def recorder(tmp_path_factory) -> Recorder:
    return Recorder(tmp_path_factory.mktemp("split"))


@pytest.mark.parametrize(("program", "options"), FRAMEWORK_CLEAN)
def test_a_model_that_a_framework_splits_matches_one_process(recorder, program, options):
    report = recorder.compare(program, options)
    assert (report.verdict, report.introduced, report.warnings) == ("match", [], [])
    assert report.pairs > {"megatron": 1500, "deepspeed": 200}[program]


@pytest.mark.parametrize(("program", "options", "fault"), FRAMEWORK_FAULTS)
def test_a_fault_of_a_split_framework_is_named(recorder, program, options, fault):
    first = recorder.compare(program, options, fault).first
    assert first is not None
    assert Expected.of(first) == FRAMEWORK_FAULTS[program, options, fault]
