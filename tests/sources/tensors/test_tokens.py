"""Which tokens a forward computes, and the sketch of each row: OTEL_TORCH_CAPTURE=tokens."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from otel_torch.sources.tensors import tokens
from otel_torch.sources.tensors.tokens import Tokens
from otel_torch.statistics.row_layout import ROW_NUMBERS, ROWS_MAX
from otel_torch.statistics.token_sketch import row_sketches
from otel_torch.telemetry.sinks.training import split_batch
from tests.support import ListSink, recording


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        cache_position: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        hidden = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        return self.head(hidden)


def recorded_tokens(*args: Any, capture: str = "tokens", **kwargs: Any) -> list[dict[str, Any]]:
    with recording(capture=capture, **kwargs.pop("settings", {})) as sink:
        LanguageModel()(*args, **kwargs)
    return [record.stats for record in sink.records if record.phase == "tokens"]


IDS = torch.tensor([[0, 7, 8], [4, 5, 6]])
MASK = torch.tensor([[0, 1, 1], [1, 1, 1]])


@pytest.mark.parametrize(
    ("arguments", "positions", "requests"),
    [
        ({"input_ids": IDS}, [0, 1, 2] * 2, [0, 0, 0, 1, 1, 1]),
        (
            {"input_ids": IDS, "attention_mask": MASK, "position_ids": IDS},
            [-1, 0, 1, 0, 1, 2],
            [-1, 0, 0, 1, 1, 1],
        ),
        ({"input_ids": IDS[:, :1], "attention_mask": MASK}, [1, 2], [0, 1]),
        ({"input_ids": IDS, "position_ids": torch.arange(4, 7)[None]}, [4, 5, 6] * 2, None),
        ({"input_ids": IDS, "cache_position": torch.arange(2, 5)}, [2, 3, 4] * 2, None),
        ({"inputs_embeds": torch.zeros(1, 2, 8)}, [0, 1], [0, 0]),
    ],
)
def test_positions_and_requests_follow_from_the_arguments(
    arguments: dict[str, Any], positions: list[int], requests: list[int] | None
) -> None:
    (stats,) = recorded_tokens(**arguments)
    assert stats["positions"] == positions
    assert requests is None or stats["requests"] == requests


def test_the_arguments_of_a_compiled_model_have_the_names_of_its_own() -> None:
    model = torch.compile(LanguageModel(), backend="eager")
    with recording(capture="tokens") as sink:
        model(IDS, MASK)
    (stats,) = [record.stats for record in sink.records if record.phase == "tokens"]
    assert stats["positions"] == [-1, 0, 1, 0, 1, 2]


def test_the_tokens_of_a_packed_batch() -> None:
    ids = torch.tensor([7, 8, 9])
    (stats,) = recorded_tokens(ids, positions=torch.tensor([0, 1, 0]))
    assert (stats["shape"], stats["positions"]) == ([3], [0, 1, 0])
    assert "requests" not in stats


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_the_past_of_a_cache_counts(name: str) -> None:
    class Cache:
        def get_seq_length(self) -> int:
            return 5

    (stats,) = recorded_tokens(IDS, **{name: Cache()})
    assert stats["positions"] == [5, 6, 7] * 2


@pytest.mark.parametrize("kind", ["bool", "float", "by layer"])
def test_a_static_cache_has_a_mask_for_each_query(kind: str) -> None:
    sees = torch.tensor(
        [
            [[0, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 1, 1, 0, 0]],
            [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0]],  # a window of 2
        ]
    )[:, None].bool()
    mask: Any = sees if kind != "float" else torch.where(sees, 0.0, torch.finfo().min)
    if kind == "by layer":
        mask = {"sliding_attention": sees[..., :3], "full_attention": sees}
    positions = torch.tensor([[1, 0, 1], [0, 1, 2]])
    (stats,) = recorded_tokens(IDS, attention_mask=mask, position_ids=positions)
    assert stats["positions"] == [-1, 0, 1, 0, 1, 2]
    assert stats["requests"] == [-1, 0, 0, 1, 1, 1]


def test_ids_are_hashed_unless_asked_for() -> None:
    (hashed,) = recorded_tokens(IDS)
    (plain,) = recorded_tokens(IDS, settings={"token_ids": "1"})
    assert plain["ids"] == IDS.flatten().tolist()
    assert "ids" not in hashed
    hashes = np.frombuffer(base64.b64decode(hashed["hashes"]), "<u8")
    assert hashes[0] == 16294208416658607535  # splitmix64 of 0
    assert len(set(hashes.tolist())) == 6
    again = base64.b64decode(recorded_tokens(IDS[:, 1:])[0]["hashes"])
    assert np.array_equal(np.frombuffer(again, "<u8"), hashes[[1, 2, 4, 5]])


@pytest.fixture
def engine() -> Iterator[None]:
    def packed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tokens:
        return Tokens([3, 4], [9, 0], requests=torch.tensor([5, 6], dtype=torch.int32))

    tokens.token_sources.append(packed)
    yield
    tokens.token_sources.remove(packed)


def test_a_framework_that_knows_its_batch_is_asked_first(engine: None) -> None:
    (stats,) = recorded_tokens(IDS)
    assert (stats["positions"], stats["requests"]) == ([9, 0], [5, 6])


def test_only_the_capture_of_tokens_has_them() -> None:
    assert not recorded_tokens(IDS, capture="parity")


def test_tokens_stand_before_their_forward_and_are_not_exported() -> None:
    with recording(capture="tokens") as sink:
        model = LanguageModel()
        model(IDS)
        model(IDS)
    phases = [record.phase for record in sink.records if record.phase != "attach"]
    assert phases == (["tokens"] + ["forward"] * (len(phases) // 2 - 1)) * 2
    for batch in sink.batches:
        activations, _ = split_batch(batch)
        assert all(record.phase != "tokens" for record in activations.records)


@pytest.mark.parametrize("length", [1, 2, 3, 6, 20])
def test_token_numbers_are_not_taken_for_statistics(
    length: int, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded_tokens(torch.arange(1, length + 1)[None])
    assert "NaN" not in capsys.readouterr().err


def decoded(sink: ListSink, module: str, tensor: str) -> np.ndarray:
    (stats,) = sink.rows("stats", module=module, tensor=tensor, phase="forward")
    return np.frombuffer(base64.b64decode(stats["rows"]), "<f4").reshape(-1, ROW_NUMBERS)


def test_every_row_has_its_sketch_whatever_its_batch() -> None:
    model = LanguageModel()
    with recording(capture="tokens") as whole:
        model(IDS)
    with recording(capture="tokens") as part:
        model(IDS[1, 1:])
    rows, part_rows = (decoded(sink, "head", "out") for sink in (whole, part))
    assert rows.shape == (6, ROW_NUMBERS)
    np.testing.assert_allclose(rows[4:], part_rows, rtol=1e-5, atol=1e-6)


def test_parameters_have_no_rows() -> None:
    with recording(capture="tokens") as sink:
        LanguageModel()(IDS)
    assert not any("rows" in r.stats for r in sink.records if r.phase == "attach")


def test_rows_are_a_statistic_of_any_capture() -> None:
    with recording(stats="rows") as sink:
        LanguageModel()(IDS)
    assert decoded(sink, "embed", "out").shape == (6, ROW_NUMBERS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int64])
def test_row_sketches_estimate_distances_and_are_linear(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (5 * torch.randn(2, 200, 300, generator=generator)).to(dtype)
    sketches, other = row_sketches(x), row_sketches(y)
    wide = x.to(torch.complex128), y.to(torch.complex128)
    distance = (wide[0] - wide[1]).abs().square().sum(1)
    ratios = (sketches - other)[:, :-1].square().sum(1) / distance
    assert 0.8 < float(ratios.mean()) < 1.2
    if not x.is_complex():
        total = row_sketches(wide[0].real + wide[1].real)
        added = sketches + other
        torch.testing.assert_close(added[:, :-1], total[:, :-1], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(sketches[:, -1], wide[0].abs().square().sum(1))


def test_zeros_behind_a_row_change_nothing() -> None:
    x = torch.randn(3, 100)
    padded = torch.cat((x, torch.zeros(3, 50)), 1)
    assert torch.equal(row_sketches(x), row_sketches(padded))


def test_more_rows_than_the_limit_are_left_out_and_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert len(row_sketches(torch.ones(ROWS_MAX + 1, 2))) == ROWS_MAX
    assert f"only the first {ROWS_MAX}" in capsys.readouterr().err


def test_row_sketches_survive_autocast_and_deterministic_mode() -> None:
    x = torch.randn(4, 100)
    expected = row_sketches(x)
    with torch.autocast("cpu", torch.bfloat16):
        model = LanguageModel()
        with recording(stats="rows") as sink:
            model(IDS)
        assert torch.equal(row_sketches(x), expected)
    assert decoded(sink, "head", "out").shape == (6, ROW_NUMBERS)


# -- log-probabilities of the likeliest next ids


class Output(NamedTuple):
    logits: Tensor


class LogitsModel(LanguageModel):
    def forward(self, input_ids: Tensor) -> Output:
        return Output(super().forward(input_ids))


def recorded_log_probabilities(module: nn.Module, *args: Any, **settings: str) -> list[Any]:
    with recording(capture="tokens", **settings) as sink:
        module(*args)
    return sink.rows("module", "stats", tensor="logprobs", phase="tokens")


def test_the_likeliest_ids_of_each_row_are_recorded_with_their_log_probabilities() -> None:
    model = LogitsModel()
    expected = model(IDS).logits.log_softmax(-1).reshape(6, 32).sort(descending=True)
    ((module, stats),) = recorded_log_probabilities(model, IDS, token_ids="1")
    assert (module, stats["shape"]) == ("", [2, 3, 32])
    assert stats["ids"] == expected.indices.reshape(-1).tolist()
    values = np.frombuffer(base64.b64decode(stats["logprobs"]), "<f4")
    assert values == pytest.approx(expected.values.detach().reshape(-1).numpy(), abs=1e-6)


def test_ids_of_logits_are_hashed_unless_asked_for() -> None:
    ((_, stats),) = recorded_log_probabilities(LogitsModel(), IDS)
    assert set(stats) == {"shape", "hashes", "logprobs"}
    assert len(base64.b64decode(stats["hashes"])) == 8 * 6 * 32


def test_a_logits_processor_returns_logits_and_other_outputs_are_none() -> None:
    class LogitsProcessor(nn.Linear):
        pass

    rows = recorded_log_probabilities(LogitsProcessor(8, 40), torch.randn(5, 8))
    assert [stats["shape"] for _, stats in rows] == [[5, 32]]
    assert recorded_log_probabilities(LanguageModel(), IDS) == []
