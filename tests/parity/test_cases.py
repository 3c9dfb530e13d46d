"""The corpus itself: faults are where its table says, its programs say nothing of us, and the
scores mean what they say.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from tests.parity import scoreboard, truth
from tests.parity.case import Case, Place
from tests.parity.cases import CASES, families
from tests.parity.cases.bugs import BUGS, Patches

BY_NAME = {case.name: case for case in CASES}
# one of each way in which a fault is planted and shows, and every family that is quick
CHECKED = (
    "llama_rope_interleaved",
    "llama_layers_exchanged",
    "llama_last_layer_skipped",
    "qwen3_k_norm_epsilon",
    "mistral_rope_theta",
    "gpt2_gelu_exact",
    "wan_token_order",
    "wan_timestep_halves_swapped",
    "flux_norm_out_swapped",
    "unet_skip_order",
    "vae_scaling_factor",
)


@pytest.mark.parametrize("name", CHECKED)
def test_a_fault_begins_where_the_table_says_and_is_as_large(name: str) -> None:
    found, case = truth.first_difference(name), BY_NAME[name]
    assert found.place == case.expected[0]
    assert found.error == pytest.approx(case.error, rel=0.2)
    in_weights = any(place.side == "parameter" for place in case.expected)
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
    assert 0 < truth.relative(port, reference) < {"fp32": 3e-6, "bf16": 3e-2}[dtype]


def test_every_fault_is_in_the_table_once() -> None:
    assert [case.name for case in CASES if not case.clean] == list(BUGS)
    assert [case.name for case in CASES if case.clean] == list(families.FAMILIES)
    assert all((case.name.partition("_")[0]) == case.family for case in CASES)


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
    assert not [path.name for path in folder.glob("*.py") if "otel" in path.read_text().lower()]


# ---- the scoreboard


def _row(
    module: str, tensor: str, order: tuple[int, int], **statistics: object
) -> dict[str, object]:
    row = {"module": module, "tensor": tensor, "step": 0, "phase": "forward", "order": order}
    return row | {"shape": [2], "abs_mean": 1.0, "max": 2.0} | statistics


def _recording(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def recordings(tmp_path: Path) -> scoreboard.Recordings:
    """a, then b, which holds b.c, then d; the port's b.c is 1 % off, and so is all that follows."""
    order = {"a": (1, 2), "b.c": (4, 5), "b": (3, 6), "d": (7, 8), "": (0, 9)}
    off = {"b.c", "b", "d", ""}
    reference = _recording(
        tmp_path / "reference.jsonl", *(_row(name, "out", order[name]) for name in order)
    )
    port = _recording(
        tmp_path / "port.jsonl",
        *(_row(name, "out", order[name], abs_mean=1.01 if name in off else 1.0) for name in order),
    )
    return scoreboard.Recordings(reference, port, reference)


def _case(*expected: Place) -> Case:
    return Case(
        name="x", family="x", bug="", program=Path(), reference=(), port=(), expected=expected
    )


@pytest.mark.parametrize(
    ("place", "outcome"),
    [
        (Place("output", "b.c"), "exact"),
        (Place("input", "b.c"), "adjacent"),  # the same module
        (Place("output", "b"), "adjacent"),  # its parent
        (Place("input", "d"), "late"),
        (Place("output", ""), "late"),
        (Place("output", "a"), "false"),
        (Place("parameter", "a"), "false"),
        (None, "missed"),
    ],
)
def test_a_named_place_is_scored_by_its_distance(
    recordings: scoreboard.Recordings, place: Place | None, outcome: str
) -> None:
    named = None if place is None else scoreboard.Named(place, place)
    assert scoreboard.outcome(_case(Place("output", "b.c")), named, recordings) == outcome
    assert scoreboard.outcome(_case(), named, recordings) == ("false" if place else "silent")


def test_the_event_next_to_the_right_one_is_adjacent(recordings: scoreboard.Recordings) -> None:
    named = scoreboard.Named(None, Place("input", "d"))
    assert scoreboard.outcome(_case(Place("output", "b")), named, recordings) == "adjacent"


def test_fastvideos_rule_names_the_first_output_that_is_half_a_percent_off(
    recordings: scoreboard.Recordings,
) -> None:
    named = scoreboard.fastvideo_rule(recordings)
    assert named is not None and named.port == Place("output", "b.c")
    same = scoreboard.Recordings(recordings.port, recordings.port, recordings.port)
    assert scoreboard.fastvideo_rule(same) is None


def test_two_processes_are_recorded_by_environment_alone_and_once(tmp_path: Path) -> None:
    recorder, case = scoreboard.Recorder(tmp_path, fresh=False), BY_NAME["gpt2_bias_missing"]
    made = recorder.record(case, "fp32")
    assert made.reference.read_bytes() != made.noise.read_bytes()
    again = made.port.stat().st_mtime_ns
    assert recorder.record(case, "fp32") == made
    assert made.port.stat().st_mtime_ns == again
    order = scoreboard.timeline(made.port)
    assert order.index(Place("input", "transformer.h.2.mlp.c_fc")) < order.index(case.expected[0])
    # FastVideo's rule sees this one, for a missing bias moves a mean
    scored = scoreboard.score(case, "fp32", made, "FastVideo 0.5 %")
    assert scored.outcome == "exact", scored
