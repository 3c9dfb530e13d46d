"""`otel-torch diff` on plain transformers and diffusers models: planted faults are named, clean pairs
are left alone. And the corpus itself: faults are where its table says, and its programs say nothing
of us.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from tests.corpora import corpus_of, truth
from tests.corpora.checks import cases_of, check, fixture_of
from tests.corpora.judge import OURS, RULE, timeline
from tests.corpora.scores import Board, Recorder, score
from tests.corpora.small import families
from tests.corpora.small.bugs import BUGS, Patches
from tests.corpora.small.cases import FIGURES
from tests.sampling import sample

SMALL = corpus_of("small")
# one of each kind that is quick, so that `make test` sees a difference that stays unnamed or is made up
QUICK = (
    "llama", "gpt2", "wan", "llama_swiglu_swapped", "gpt2_query_and_key_exchanged", "wan_token_order",
    "flux_norm_out_swapped",
)  # fmt: skip
# a family each, and each way in which a fault shows: in front of a module, in its output, in its
# weights, as a missing call
PROCESSES = (
    "llama_rope_interleaved", "qwen3_q_norm_missing", "gpt2_bias_missing", "wan_unpatchify_order", "unet_skip_order", "vae",
)  # fmt: skip
# one of each way in which a fault is planted and shows, and every family that is quick
CHECKED = (
    "llama_rope_interleaved", "llama_layers_exchanged", "llama_last_layer_skipped", "qwen3_k_norm_epsilon", "mistral_rope_theta",
    "gpt2_gelu_exact", "wan_token_order", "wan_timestep_halves_swapped", "flux_norm_out_swapped", "unet_skip_order",
    "vae_scaling_factor",
)  # fmt: skip

board = fixture_of(SMALL)


@pytest.mark.parametrize(("name", "variant"), cases_of("small", QUICK))
def test_a_case_is_judged_as_known(board: Board, name: str, variant: str) -> None:
    check(board, name, variant)


@pytest.mark.scoreboard
@pytest.mark.parametrize("name", sample(PROCESSES, len(PROCESSES)))
def test_two_unmodified_processes_switched_on_by_environment_alone(
    tmp_path: Path, name: str
) -> None:
    recorder = Recorder(SMALL, tmp_path, together=False, fresh=True)
    for answers in score(SMALL, recorder, [SMALL.cases[name]], ["fp32"]):
        expected = "silent" if SMALL.cases[name].clean else "exact"
        assert answers[0].grade == expected, answers[0].said


@pytest.mark.scoreboard
def test_fastvideos_own_rule_names_fewer_on_the_same_recordings(board: Board) -> None:
    exact = {
        judge: sum(board.ours(name, "fp32", judge).grade == "exact" for name in BUGS)
        for judge in (OURS, RULE)
    }
    assert exact[RULE] < exact[OURS] / 2


def test_two_processes_are_recorded_by_environment_alone_and_once(tmp_path: Path) -> None:
    recorder = Recorder(SMALL, tmp_path, together=False)
    case = SMALL.cases["gpt2_bias_missing"]
    made = recorder.recordings(case, "fp32")
    assert made.noise is not None and made.reference.read_bytes() != made.noise.read_bytes()
    again = made.port.stat().st_mtime_ns
    assert recorder.recordings(case, "fp32") == made
    assert made.port.stat().st_mtime_ns == again
    order = [str(place) for place in timeline(made.port)]
    assert order.index("input transformer.h.2.mlp.c_fc") < order.index(str(case.right.places[0]))
    # FastVideo's rule sees this one, for a missing bias moves a mean
    ((_, rule),) = score(SMALL, recorder, [case], ["fp32"])
    assert (rule.judge, rule.grade) == (RULE, "exact"), rule


# ---- the corpus


@pytest.mark.parametrize("name", CHECKED)
def test_a_fault_begins_where_the_table_says_and_is_as_large(name: str) -> None:
    found, right = truth.measure(name), SMALL.cases[name].right
    assert found.place == right.places[0]
    assert found.error == pytest.approx(FIGURES[name].error, rel=0.2)
    in_weights = any(place.side == "parameter" for place in right.places)
    assert bool(found.weights) == in_weights


@pytest.mark.parametrize("family", ["llama", "wan", "vae"])
@pytest.mark.parametrize("dtype", list(families.DTYPES))
def test_the_sides_of_a_clean_pair_differ_by_rounding_and_not_by_nothing(
    family: str, dtype: str
) -> None:
    reference, port = (
        families.run(family, families.load(family, side, dtype, 0), dtype, 0)
        for side in ("reference", "port")
    )
    assert 0 < truth.relative_error(port, reference) < {"fp32": 3e-6, "bf16": 3e-2}[dtype]


def test_every_fault_is_in_the_table_once() -> None:
    cases = SMALL.load()
    assert [case.name for case in cases if not case.clean] == list(BUGS)
    assert [case.name for case in cases if case.clean] == list(families.FAMILIES)


def test_patches_refuse_code_that_they_do_not_know_and_can_be_undone() -> None:
    model = families.load("llama", "port", "fp32", 0)
    kind, patches = type(model.model.layers[0].mlp), Patches()
    before = kind.forward
    with pytest.raises(ValueError, match=r"LlamaMLP\.forward holds 0 times"):
        patches.edit(kind, "forward", "no such line", "")
    BUGS["llama_swiglu_swapped"](model, patches)
    assert kind.forward is not before
    patches.undo()
    assert kind.forward is before


def test_the_programs_know_nothing_of_us() -> None:
    folder = Path(families.__file__).parent
    programs = [folder / "families.py", folder / "bugs.py", *folder.parent.glob("side.py")]
    assert len(programs) == 3
    assert not [path.name for path in programs if "otel" in path.read_text().lower()]
