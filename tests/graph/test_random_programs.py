"""Random small programs, rewritten legally: clean pairs are silent, and faults are at their place.

hypothesis draws and shrinks them; `python -m tests.graph.generate` scores thousands.
"""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from otel_torch.graph.compare import compare_graphs
from tests.graph.programs import KINDS, Block, Case, Spec, draw_case, write_program
from tests.graph.score import GOOD, run

FEW = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


@FEW
@given(st.data())
def test_clean_pairs_are_silent(data):
    case = draw_case(lambda items: data.draw(st.sampled_from(list(items))), faulty=False)
    assert run(case)[0] == "silent"


@FEW
@given(st.data())
def test_clean_pairs_in_lower_precision_are_silent(data):
    choose = lambda items: data.draw(st.sampled_from(list(items)))  # noqa: E731
    assert run(draw_case(choose, faulty=False, dtype="bfloat16"))[0] == "silent"


@FEW
@given(st.data())
def test_a_program_equals_itself_value_by_value(data):
    case = draw_case(lambda items: data.draw(st.sampled_from(list(items))), faulty=False)
    graph = write_program(case.reference)
    comparison = compare_graphs(graph, graph)
    assert comparison.is_match
    assert comparison.counts[0]["wrong"] == 0


FAULTS = [(kind, fault) for kind, table in KINDS.items() for fault in table.faults]


@pytest.mark.parametrize(("kind", "fault"), FAULTS)
def test_a_single_block_with_a_fault_is_blamed_in_its_line(kind, fault):
    """Both sides written alike, and nothing else around."""
    plain = Block(kind, 7, tuple(group[0] for group in KINDS[kind].variants))
    reference = Spec(5, 12, (plain,))
    port = replace(reference, blocks=(replace(plain, fault=fault),), file="port.py")
    lines = frozenset(f"0.{word}" for word in KINDS[kind].faults[fault])
    word, comparison = run(Case(reference, port, lines))
    assert word in GOOD, (word, comparison.faults)


# What went wrong once, as one attention: tokens, width, seed, both ways to write it, the fault.
Ways = tuple[str, ...]
ONCE_WRONG: dict[str, tuple[int, int, int, Ways, Ways, str]] = {
    "a mask compared in another form was accused before the scale": (
        *(6, 12, 120),
        ("", "batched", "", "additive", ""),
        ("fused_qkv", "listed_heads", "", "", "other_mask"),
        "scale",
    ),
    "the order of heads was hidden by a fused attention": (
        *(5, 8, 350),
        ("fused_qkv", "fused", "scale_first", "", "other_mask"),
        ("fused_qkv", "fused", "", "additive", ""),
        "head_order",
    ),
    "a mask in another form was accused before exchanged operands": (
        *(4, 8, 440),
        ("", "fused", "scale_first", "additive", "other_mask"),
        ("", "fused", "", "", ""),
        "exchanged_qk",
    ),
    "heads merged in another order were blamed on the slices before": (
        *(6, 8, 290),
        ("", "listed_heads", "scale_first", "", "other_mask"),
        ("", "batched", "", "additive", "other_mask"),
        "merge_order",
    ),
    "masked scores are almost all one number and proved too much": (
        *(4, 12, 150),
        ("fused_qkv", "batched", "scale_first", "additive", ""),
        ("", "batched", "", "additive", "other_mask"),
        "scale",
    ),
    "twins were followed back by one step only": (
        *(4, 12, 10),
        ("", "batched", "", "", ""),
        ("fused_qkv", "batched", "", "additive", "other_mask"),
        "head_order",
    ),
}


@pytest.mark.parametrize("what", ONCE_WRONG)
def test_what_went_wrong_once_goes_right(what):
    tokens, width, seed, own, other, fault = ONCE_WRONG[what]
    reference = Spec(tokens, width, (Block("attention", seed, own),))
    port = Spec(tokens, width, (Block("attention", seed, other, fault),), file="port.py")
    lines = frozenset(f"0.{word}" for word in KINDS["attention"].faults[fault])
    word, comparison = run(Case(reference, port, lines))
    assert word in GOOD, (word, comparison.faults)


def test_noise_shows_a_fault_below_the_limit_of_the_model():
    """An eps that is off by 1e-6 is within what depth alone would allow."""
    blocks = (Block("activation", 1, ("plain",)), Block("norm", 2, ("plain", "")))
    reference = Spec(6, 12, blocks)
    wrong = (blocks[0], replace(blocks[1], fault="small_eps"))
    graphs = [write_program(reference), write_program(replace(reference, blocks=wrong))]
    noise = write_program(replace(reference, noise=5))
    assert compare_graphs(*graphs).is_match
    comparison = compare_graphs(*graphs, noise)
    assert not comparison.is_match
    (fault,) = comparison.faults
    assert fault.explanation.reference == (0.1,) and fault.explanation.port == (0.100001,)


@FEW
@given(st.data())
def test_clean_pairs_are_silent_under_the_floors_of_noise(data):
    case = draw_case(lambda items: data.draw(st.sampled_from(list(items))), faulty=False)
    graphs = [write_program(spec) for spec in (case.reference, case.port)]
    noise = write_program(replace(case.reference, noise=3))
    assume(len(noise.values) == len(graphs[0].values))
    assert compare_graphs(*graphs, noise).is_match
