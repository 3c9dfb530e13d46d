"""Each training of the corpus has its defect and no other, and `otel-torch show` names that law alone.

`python -m tests.corpora.laws` runs all of them; here a fourteenth runs each day.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.corpora.laws.exam import PROGRAMS, named_laws, watched_laws
from tests.corpora.laws.program import LAWS, Program
from tests.sampling import sample

# no look from outside tells these healthy trainings from mistakes
LOOK_LIKE_MISTAKES = {
    "norms_adapted_to_a_new_domain_without_gradients": {"train_while_evaluating"},
    "coordinates_of_an_image_made_anew": {"same_batch"},
}
# what is named instead of the law that is broken
MISJUDGED: dict[str, set[str]] = LOOK_LIKE_MISTAKES | {
    # without an optimizer it looks like a map of saliency
    "descent_into_a_local_name": set(),
    # dropout makes the outputs of equal samples differ
    "trainer_whose_collator_pads_everything": set(),
    # both are true
    "class_token_taken_before_the_blocks": {"loss_ignores_inputs", "no_gradient"},
    # it looks like a loaded head on another body
    "checkpoint_without_what_is_frozen": set(),
    # what was loaded is as it was, and belongs to no model any more
    "layers_exchanged_for_some_without_biases_after_loading": set(),
    # dropout that stays on below a root in eval mode may be meant
    "training_set_to_false_at_the_root_alone": set(),
}
# of which hooks see less, or another law
BEYOND_HOOKS = {
    *LOOK_LIKE_MISTAKES, "weights_averaged_every_fourth_step", "checkpoint_without_what_is_frozen",
    "norms_of_split_layers_clipped_on_rank_0_alone", "norms_of_split_layers_clipped_on_both_ranks",
}  # fmt: skip


def cases(programs: Iterable[Program]) -> list[Any]:
    return [
        pytest.param(
            program,
            id=f"{program.law or 'healthy'}-{program.name}",
            marks=[pytest.mark.frameworks] * program.uses_frameworks,
        )
        for program in programs
    ]


@pytest.fixture
def frameworks(program: Program) -> None:
    """Skip where a program's framework is missing.

    It is not imported here: lightning sets a variable that torch reads while it is loaded, and all
    later programs would be started in fresh interpreters.
    """
    if program.uses_frameworks:
        for name in ("transformers", "lightning", "peft"):
            if find_spec(name) is None:
                pytest.skip(f"{name} is not installed; `make test-frameworks` does")


@pytest.mark.usefixtures("frameworks")
@pytest.mark.parametrize("program", cases(sample(PROGRAMS.values())))
def test_the_laws_that_are_named(program: Program, tmp_path: Path) -> None:
    expected = MISJUDGED.get(program.name, {program.law} - {None})
    assert set(named_laws(program, tmp_path)) == expected


@pytest.mark.scoreboard
@pytest.mark.usefixtures("frameworks")
@pytest.mark.parametrize("program", cases(sample(PROGRAMS.values())))
def test_a_program_has_its_defect_and_no_other(program: Program, tmp_path: Path) -> None:
    if program.name in BEYOND_HOOKS:
        pytest.skip("hooks cannot tell")
    assert set(watched_laws(program, tmp_path)) == {program.law} - {None}


def test_each_law_is_broken_by_several_programs() -> None:
    programs = Counter(program.law for program in PROGRAMS.values())
    assert {law for law in LAWS if programs[law] < 2} == set()
    assert PROGRAMS.keys() >= MISJUDGED.keys()
