"""What the numbers of ranks say: which part is wrong, over which group, by which factor."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from otel_torch import torch_private
from otel_torch.parity.layouts.equal_rows import EqualRows
from otel_torch.parity.layouts.gradient_scales import describe_all_gradients, find_unscaled
from otel_torch.parity.layouts.judged_places import JudgedPlace, judge_places
from otel_torch.parity.layouts.mesh_layout import is_on_mesh, recognize_on_mesh
from otel_torch.parity.layouts.padded_tables import PaddedTables
from otel_torch.parity.layouts.rank_rows import PlaceKey, RankRow, TensorPlace
from otel_torch.parity.layouts.wrong_part import find_wrong_parts
from otel_torch.parity.layouts.wrong_places import Biases, describe_wrong
from otel_torch.statistics.sketch import sketch

PARAMETERS = [f"layers.{index}" for index in range(6)]


def random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sketch_of(values):
    return np.array(sketch(values).tolist())


def row(rank, values, key, count=1):
    """Return a row of a rank, with the sketches as one of `count` equal parts."""
    numbers = key._asdict() | {
        "l2": float(values.norm()),
        "sum": float(values.sum()),
        "min": float(values.min()),
        "max": float(values.max()),
        "numel": values.numel(),
        "shape": list(values.shape),
        "dtype": "torch.float32",
    }
    as_part = []
    for dim in range(values.dim() if count > 1 else 0):
        parts = [torch.zeros_like(values)] * count
        parts[rank] = values
        as_part.append(sketch_of(torch.cat(parts, dim)))
    return RankRow(rank, numbers, sketch_of(values), tuple(as_part))


def place(module, tensor, phase, whole, *ranks, count=0):
    key = PlaceKey("Model", module, tensor, 0, 0, 0, phase, None)
    rows = [row(rank, values, key, count or len(ranks)) for rank, values in enumerate(ranks)]
    return TensorPlace(key, row(-1, whole, key), rows)


def gradients(*factors, term=None):
    """Return the gradients of ranks that multiply theirs by a factor each.

    Args:
        term: The parameter of which each rank has a term of the sum.
    """
    places = []
    for index, name in enumerate(PARAMETERS):
        whole = random(index, 8, 8)
        terms = [whole] * len(factors)
        if name == term:
            terms = [random(20 + rank, 8, 8) for rank in range(len(factors))]
            whole = torch.stack(terms).sum(0)
        held = [factor * values for factor, values in zip(factors, terms, strict=True)]
        places.append(place(name, "param_grad.weight", "backward", whole, *held))
    return places


def test_a_sum_that_was_not_reduced_is_found_behind_clipping():
    judged = judge_places(gradients(1.02, 1.02, term="layers.2"), 2)
    assert not any(entry.unreduced for entry in judged)
    find_unscaled(judged)
    unreduced = [entry.place.key[1] for entry in judged if entry.unreduced]
    assert unreduced == ["layers.2"]
    assert describe_all_gradients(judged, {}) == {}


def test_ranks_that_clip_by_their_own_norms_get_one_factor():
    judged = judge_places(gradients(1.6, 1.9), 2)
    find_unscaled(judged)
    (wrong,) = describe_all_gradients(judged, {}).values()
    assert (wrong.rank, wrong.cause and wrong.cause.kind) == (0, "clipped_by_own_norm")
    for entry in judged:
        assert {round(row.l2 / entry.place.reference.l2, 3) for row in entry.rows} == {1.9}


def test_gradients_that_are_right_are_not_scaled():
    judged = judge_places(gradients(1.0, 1.0), 2)
    find_unscaled(judged)
    assert not any(entry.is_wrong or entry.unreduced for entry in judged)
    assert describe_all_gradients(judged, {}) == {}


def test_gradients_that_others_are_made_of_may_be_clipped_afterwards():
    places = gradients(20.0, 20.0, term="layers.2")
    judged = judge_places(places, 2)
    find_unscaled(judged, are_used_elsewhere=True)
    assert not any(entry.is_wrong or entry.unreduced for entry in judged)


def test_a_rank_that_scales_its_gradients_alone_is_the_wrong_one():
    judged = judge_places(gradients(1.0, 0.5), 2)
    find_unscaled(judged)
    assert {entry.layout.wrong for entry in judged} == {1}


def test_equal_values_of_all_ranks_are_no_terms_of_a_sum():
    whole = random(1, 8, 8)
    (judged,) = judge_places([place("up", "out", "forward", whole, whole / 2, whole / 2)], 2)
    assert not judged.unreduced
    cause = describe_wrong(judged, Biases()).cause
    assert cause is not None
    assert cause.kind == "averaged_twice"


@pytest.mark.parametrize(
    ("factor", "kind"),
    [(0.5, "averaged_twice"), (2.0, "reduced_twice"), (1.0, "bias_on_each_rank")],
)
def test_a_bias_is_any_only_vector_of_a_module(factor, kind):
    product, bias, biases = random(1, 8, 16), random(2, 16), Biases()
    (attached,) = judge_places([place("down", "param.shift", "attach", bias, bias, bias)], 2)
    biases.learn(attached)
    held = factor * product + (2 * bias if factor == 1 else bias)
    (judged,) = judge_places([place("down", "out", "forward", product + bias, held, held)], 2)
    cause = describe_wrong(judged, biases).cause
    assert cause is not None
    assert cause.kind == kind


def test_a_sum_is_no_fault_where_the_gradients_of_its_module_are_reduced():
    whole, own = random(1, 4, 8), random(2, 4, 8)
    weight, other = random(3, 8, 8), random(4, 8, 8)
    judged = judge_places(
        [
            place("text", "grad", "backward", whole, own, whole - own),
            place("image", "grad", "backward", other, *random(5, 8, 8).chunk(2)),
            place("text", "param_grad.weight", "backward", weight, weight, weight),
        ],
        2,
    )
    assert [entry.is_wrong for entry in judged] == [False, True, False]


def test_a_gradient_that_is_not_added_up_is_marked_where_the_terms_begin():
    ids, whole, own = random(0, 4, 8), random(1, 4, 8), random(2, 4, 8)
    head, weight, own_weight = random(3, 4, 8), random(4, 8, 8), random(5, 8, 8)
    judged = judge_places(
        [
            place("", "in[0]", "forward", ids, ids, ids),
            place("head", "grad", "backward", head, *head.chunk(2, 1)),
            place("norm", "grad", "backward", whole, own, whole - own),
            place("norm", "param_grad.weight", "backward", weight, own_weight, weight - own_weight),
        ],
        2,
    )
    assert [entry.unreduced for entry in judged] == [False, False, True, True]


def test_gradients_of_experts_on_two_ranks_each_may_be_larger():
    ids, whole = random(0, 8, 6), random(1, 4, 8)
    parts = ids.chunk(2)
    judged = judge_places(
        [
            place("", "in[0]", "forward", ids, parts[0], parts[0], parts[1], parts[1]),
            place("expert", "grad", "backward", whole, 2 * whole, 2 * whole),
        ],
        4,
    )
    assert not any(entry.is_wrong for entry in judged)


def test_inputs_that_were_cut_in_order_once_are_not_in_another_one_later():
    def step(*parts):
        judged = judge_places([place("", "in[0]", "forward", whole, *parts)], 2, (), 1, in_order)
        return judged[0].is_wrong

    whole, in_order = random(1, 8, 6), set()
    first, second = whole.chunk(2)
    assert not step(second, first)  # another cut
    assert not step(first, second)
    assert step(second, first)


def judged_parts(*wrong: int) -> list[JudgedPlace]:
    """Return the places of a block in which the parts of these ranks are wrong."""
    places = []
    for index in range(8):
        whole = random(index, 8, 12)
        parts = list(whole.chunk(2))
        for rank in wrong:
            parts[rank] = 0.6 * parts[rank] + random(40 + 2 * index + rank, 4, 12) / 3
        places.append(place(f"layers.1.m{index}", "out", "forward", whole, *parts))
    return judge_places(places, 2)


@pytest.mark.parametrize("wrong", [[0], [1], [0, 1]])
def test_wrong_parts_are_found_by_all_places_of_a_block(wrong):
    first, *following = judged_parts(*wrong)
    assert find_wrong_parts(first, following) == wrong


def test_one_place_alone_does_not_show_a_part_that_is_slightly_wrong():
    whole = random(0, 8, 12)
    parts = list(whole.chunk(2))
    parts[1] = parts[1] + random(1, 4, 12) / 10
    (entry,) = judge_places([place("layers.1.m", "out", "forward", whole, *parts)], 2)
    assert entry.is_wrong and find_wrong_parts(entry, []) == []


def test_a_reduction_over_another_group_is_found_by_the_ranks_that_agree():
    top, bottom = random(0, 8, 6).chunk(2)
    whole, wrong = torch.cat([top, bottom]), (top + bottom, top - bottom)
    before = place("norm", "out", "forward", whole, top, top, bottom, bottom)
    after = place("mlp", "out", "forward", whole, *wrong, *wrong)
    causes = EqualRows().find_causes(judge_places([before, after], 4))
    (cause,) = causes.values()
    assert cause.kind == "another_group"
    assert cause.text.startswith("ranks 0 and 2, 1 and 3 have equal values, where ranks 0 and 1")


def test_gradients_of_different_parameters_that_are_equal_are_mixed():
    mixed = random(9, 8)
    places = []
    for rank, name in enumerate(("experts.0", "experts.1")):
        entry = place(name, "param_grad.bias", "backward", random(rank, 8), mixed)
        entry.ranks[0].rank = rank
        places.append(entry)
    causes = EqualRows().find_causes(judge_places(places, 2))
    assert {cause.kind for cause in causes.values()} == {"gradients_mixed"}
    assert len(causes) == 2


def test_unequal_shards_of_two_replicas_are_parts():
    whole = random(0, 16)
    shards = whole[:12], whole[12:], whole[:12], whole[12:]
    entry = place("norm", "param_grad.bias", "backward", whole, *shards)
    assert is_on_mesh(entry.reference, entry.ranks, 4)
    parts, layout = recognize_on_mesh(entry.reference, entry.ranks, 4)
    assert [part.numel for part in parts] == [12, 4] and not layout.is_wrong


def test_stages_of_a_pipeline_learn_shapes_by_methods_of_these_names():
    stage = pytest.importorskip("torch.distributed.pipelining.stage").PipelineStage
    assert set(torch_private.PIPELINE_SHAPE_METHODS) & set(vars(stage))


def test_a_loss_that_a_model_returns_is_each_ranks_own_where_the_batch_is_split():
    ids = random(0, 4, 6)
    batch = place("", "in[0]", "forward", ids, *ids.chunk(2))

    def judged_loss(whole, *ranks):
        values = [torch.tensor(value) for value in (whole, *ranks)]
        loss = place("", "out[0]", "forward", *values, count=1)
        for loss_row in (loss.reference, *loss.ranks):
            loss_row.row["mean"] = loss_row.row["sum"]
        return judge_places([batch, loss], 2)[1]

    assert judged_loss(3.0, 2.9, 3.1).is_own
    assert not judged_loss(3.0, 3.2, 3.1).is_own  # beyond those of both ranks


def test_rows_of_one_rank_in_another_order_are_no_other_cut_of_the_batch():
    whole = random(0, 8, 6)
    top, bottom = whole.chunk(2)
    dealt = whole[::2], whole[1::2]
    is_wrong = [
        judge_places([place("", "in[0]", "forward", whole, *parts)], 2)[0].is_wrong
        for parts in ((top, bottom), dealt, (top, bottom.flip(-1)))
    ]
    assert is_wrong == [False, False, True]


def test_the_gradient_of_a_part_of_a_parameter_is_not_a_mean_over_fewer_rows():
    whole = random(0, 8, 6)
    parts = [2 * part for part in whole.chunk(2)]
    places = [place("m", tensor, "backward", whole, *parts) for tensor in ("grad", "param_grad.w")]
    assert [entry.is_wrong for entry in judge_places(places, 2)] == [False, True]


def test_a_factor_that_gradients_inside_of_the_model_have_is_no_clipping():
    inside = random(50, 4, 8)
    activation = place("layers.0", "grad", "backward", inside, 2 * inside, 3 * inside)
    places = [*gradients(2.0, 3.0), activation]
    judged = judge_places(places, 2)
    find_unscaled(judged)
    assert describe_all_gradients(judged, {}) == {}
    assert not any(entry.rank_scales for entry in judged)


def test_rows_that_all_ranks_have_are_no_padding_of_a_vocabulary():
    whole, shared = random(0, 22, 4), random(1, 22, 4)
    padded = [whole[:12], torch.cat([whole[12:], torch.zeros(2, 4)])]
    ids = torch.arange(6.0)
    places = [
        place("embed", "param.weight", "attach", whole, *padded),
        place("embed", "in[0]", "forward", ids, ids, ids),
        place("embed", "param_grad.weight", "backward", whole, *[2 * part for part in padded]),
        place("blocks.0.fused", "param_grad.weight", "backward", shared, shared[:12], shared[10:]),
    ]
    for entry in places[1].ranks:
        entry.row["dtype"] = "torch.int64"
    padded_tables = PaddedTables()
    *_, table, fused = judge_places(places, 2, (padded_tables.forget_others,))
    assert table.is_padded and table.is_wrong
    assert fused.is_padded and not fused.is_wrong
