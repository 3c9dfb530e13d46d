"""One process against the ranks of the same model: clean splits are silent, faults are named with
their module, their rank, and what the ranks hold.
"""

from __future__ import annotations

import pytest

from otel_torch.parity.finding import Report
from tests.corpora import corpus_of
from tests.corpora.bisected import Bisected
from tests.corpora.checks import cases_of, check, fixture_of
from tests.corpora.layouts.cases import FEWEST, case_of
from tests.corpora.scores import Board, score
from tests.sampling import sample

pytestmark = pytest.mark.scoreboard

DOWN, UP = "blocks.0.mlp.down", "blocks.1.mlp.up"
LAYOUTS = corpus_of("layouts")
# of those that were written without sight of the comparison
QUICK_OF_LATER = (
    "flat_shards stage=2", "flat_shards stage=2 piece_of_next_rank", "t5_heads tied", "gshard same_experts",
    "t5_heads decoder.0.ff.averaged", "vae_strips uneven", "video_frames own_frames",
)  # fmt: skip

# what `bisect` says of some: a piece of the line of its first finding in either program
LINES_OF_LATER = {
    "vae_strips own_pixels": "y = F.scaled_dot_product_attention(q, k, v)",
    "t5_heads decoder.0.ff.averaged": "return y / SIZE",
    "vae_strips uneven averaged_moments": "means = torch.stack([groups.mean(-1), groups.square().mean(-1)])",
    "vae_strips no_halo": "x = torch.cat([above, x, below], ALONG)",
    "ulysses_dit ragged padding_attended": "y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask",
}

board = fixture_of(LAYOUTS)
LATER = corpus_of("later_layouts")
later_board = fixture_of(LATER)
bisected_board = fixture_of(Bisected(LATER))


def compare(board: Board, *words: str) -> Report:
    return LAYOUTS.compare(case_of(*words), "", board.recorder)[0]


@pytest.mark.parametrize(("name", "variant"), cases_of("layouts"))
def test_a_layout_is_judged_as_known(board, name, variant):
    check(board, name, variant)


@pytest.mark.parametrize(
    "name", sample([name for name, case in LAYOUTS.cases.items() if case.clean])
)
def test_a_clean_layout_is_compared_in_whole(board, name):
    case = LAYOUTS.cases[name]
    report, _ = LAYOUTS.compare(case, "", board.recorder)
    if case.family in ("hand", "library"):  # those of a mesh may be cut in another order
        assert not report.weaker
    if case.family == "hand":
        assert {"norm", "head", "embed"} <= {pair.module for pair in report.compared}
    if name == "library stages":
        assert report.unpaired == {"reference": [], "port": []}
        right = {pair.port_module for pair in report.compared if pair.state == "right"}
        assert {f"blocks.{index}.down" for index in range(4)} <= right
    else:
        assert report.pairs > FEWEST.get(case.family, 300)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("torch", "gpipe", "local_norm"),
            "Each rank has multiplied its gradients by a number of its own (1.863 on rank 0, 1.171 on "
            "rank 1), as clipping by the norm of its own part does.",
        ),
        (
            ("hand", "", "embed:missing"),
            "Each rank has a partial sum: the reference has the sum of those of the 2 ranks, so a "
            "reduction over the ranks (all-reduce, reduce-scatter) is missing.",
        ),
        (("hand", "", f"{UP}:shard"), "Only rank 1 is wrong."),
    ],
)
def test_what_the_ranks_hold_is_said_in_words(board, words, sentence):
    first = compare(board, *words).first
    assert first is not None
    is_last = sentence.startswith("Only")
    assert (first.explanation.endswith if is_last else first.explanation.startswith)(sentence)


@pytest.mark.parametrize("name", QUICK_OF_LATER)
def test_later_layouts_are_judged_as_known(later_board, name):
    check(later_board, name, "")


def test_outputs_that_padding_hides_are_not_called_equal(later_board):
    case = later_board.corpus.cases["ulysses_dit ragged"]
    report, _ = later_board.corpus.compare(case, "", later_board.recorder)
    assert report.verdict == "partial" and "padding is not known" in report.uncompared[0]


def test_a_loss_averaged_over_local_tokens_is_named(board):
    first = compare(board, "library", "data_wrong_mean").first
    assert first is not None and (first.phase, first.tensor) == ("loss", "loss")
    assert first.cause is not None and first.cause.kind == "mean_of_means"


def test_gradients_that_an_optimizer_of_flat_parts_reduces_itself_are_not_accused(board):
    report = compare(board, "fused", "data=2 flat")
    assert (report.verdict, report.introduced) == ("match", [])
    assert report.warnings == []  # what it copies back is compared


def test_the_scoreboard_tells_what_is_right_from_what_is_not(board):
    said = f"{DOWN} out forward 0 partial_sum"
    fault, clean = ("hand", "", f"{DOWN}:missing"), ("hand", "")

    def graded(words: tuple[str, ...], said: str) -> str:
        case = case_of(*words, said=said)
        ((answer,),) = score(LAYOUTS, board.recorder, [case])
        return answer.grade

    assert graded(fault, said) == "exact"
    assert graded(fault, f"{said} near") == "near"
    assert graded(fault, said.replace(" 0 ", " 1 ")) == "wrong"
    assert graded(fault, "") == "false"
    assert graded(clean, said) == "missed"
    assert graded(clean, "") == "silent"


@pytest.mark.parametrize("name", sample([name for name, case in LATER.cases.items() if case.clean]))
def test_bisect_accuses_no_clean_layout(bisected_board, name):
    assert bisected_board.ours(name).grade == "silent"


@pytest.mark.parametrize("name", sample(LINES_OF_LATER, len(LINES_OF_LATER)))
def test_bisect_names_the_line_of_a_layout(bisected_board, name):
    assert LINES_OF_LATER[name] in bisected_board.ours(name).said
