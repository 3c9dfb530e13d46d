"""A comparison whose rows are tokens: the same requests in other batches, with and without faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from otel_torch.parity.diff import diff
from otel_torch.parity.finding import Report
from otel_torch.parity.report.text import render_text
from otel_torch.sources.tensors import tokens
from otel_torch.sources.tensors.tokens import Tokens
from tests.programs.packed_engine import LogitsProcessor, PackedEngine, ServingEngine
from tests.support import recording_to

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.08,
}
IDS = torch.randint(3, 96, (2, 10), generator=torch.Generator().manual_seed(1))
Run = Callable[[nn.Module], None]


def make(kind: Any = Qwen3ForCausalLM, config: Any = Qwen3Config, **settings: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    model = kind(config(**SIZES | settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if parameter.dim() == 1 else 0.08 * noise)
    return model


def whole(model: nn.Module) -> None:
    model(IDS, use_cache=False)


def prefill_and_decode(model: nn.Module) -> None:
    out = model(IDS[:, :6], use_cache=True)
    for index in range(6, 10):
        token = IDS[:, index : index + 1]
        out = model(token, past_key_values=out.past_key_values, use_cache=True)


def chunked_prefill(model: nn.Module) -> None:
    out = model(IDS[:, :4], use_cache=True)
    model(IDS[:, 4:], past_key_values=out.past_key_values, use_cache=True)


def left_padded(model: nn.Module) -> None:
    ids = torch.cat((torch.zeros(2, 3, dtype=torch.long), IDS), 1)
    mask = (torch.arange(13) >= 3).long().expand(2, -1)
    positions = (mask.cumsum(1) - 1).clamp(0)
    model(ids, attention_mask=mask, position_ids=positions, use_cache=False)


def left_padded_with_static_cache(model: Any) -> None:
    ids = torch.cat((torch.zeros(2, 3, dtype=torch.long), IDS), 1)
    mask = (torch.arange(13) >= 3).long().expand(2, -1)
    cache = {"cache_implementation": "static", "disable_compile": True}
    model.generate(ids, attention_mask=mask, max_new_tokens=1, **cache)


def right_padded(model: nn.Module) -> None:
    ids = torch.cat((IDS, torch.zeros(2, 3, dtype=torch.long)), 1)
    model(ids, attention_mask=(torch.arange(13) < 10).long().expand(2, -1), use_cache=False)


def one_by_one_in_another_order(model: nn.Module) -> None:
    for row in (1, 0):
        model(IDS[row : row + 1], use_cache=False)


def last_logits_only(model: nn.Module) -> None:
    out = model(IDS[:, :7], use_cache=True, logits_to_keep=1)
    model(IDS[:, 7:], past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)


def record(path: Path, run: Run, model: nn.Module) -> Path:
    with recording_to(path, capture="tokens"):
        run(model)
    return path


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("reference") / "whole.jsonl", whole, make())


@pytest.mark.parametrize(
    "run",
    [
        prefill_and_decode,
        chunked_prefill,
        left_padded,
        left_padded_with_static_cache,
        right_padded,
        one_by_one_in_another_order,
        last_logits_only,
    ],
)
def test_other_batches_of_the_same_tokens_match(reference: Path, tmp_path: Path, run: Run) -> None:
    report = diff(reference, record(tmp_path / "port.jsonl", run, make()))
    assert (report.verdict, report.harmless) == ("match", [])
    assert "20 tokens of 2 requests" in report.warnings[0]
    outputs = {pair.module for pair in report.compared if pair.side == "output"}
    assert {"lm_head", "model.layers.1.self_attn", "model.layers.1.mlp.down_proj"} <= outputs


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_a_scale_may_be_that_of_the_queries_or_of_the_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    """OPT scales its queries, and engines the scores: the attention's output says who is right."""
    sizes = {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}
    reference, port = (make(OPTForCausalLM, OPTConfig, **sizes) for _ in range(2))
    scale = factor * port.model.decoder.layers[0].self_attn.scaling

    def scale_scores(*args: Any, scaling: float, **kwargs: Any) -> Any:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](*args, scaling=scale, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "scores", scale_scores)
    for layer in port.model.decoder.layers:
        layer.self_attn.scaling = 1.0
    port.config._attn_implementation = "scores"
    report = diff(
        record(tmp_path / "reference.jsonl", whole, reference),
        record(tmp_path / "port.jsonl", prefill_and_decode, port),
    )
    if factor == 1.0:
        assert report.verdict == "match", report
    else:
        assert report.first is not None
        assert "layers.0.self_attn" in str(report.first.module)


def test_isolation_is_refused_where_batches_differ(reference: Path, tmp_path: Path) -> None:
    port = record(tmp_path / "port.jsonl", prefill_and_decode, make())
    with pytest.raises(ValueError, match="batch their tokens differently: leave out"):
        diff(reference, port, save_isolation=tmp_path)


def make_with_masks_of_numbers() -> Any:
    """Make a model whose attention takes such masks and has weights of its own."""
    return make(GptOssForCausalLM, GptOssConfig, num_local_experts=4, attn_implementation="eager")


@pytest.mark.parametrize("run", [prefill_and_decode, left_padded])
def test_masks_for_other_keys_are_not_compared(tmp_path: Path, run: Run) -> None:
    reference = record(tmp_path / "whole.jsonl", whole, make_with_masks_of_numbers())
    model = make_with_masks_of_numbers()
    right = diff(reference, record(tmp_path / "right.jsonl", run, model))
    assert (right.verdict, right.harmless) == ("match", [])
    model.model.layers[0].self_attn.scaling *= 0.5
    wrong = diff(reference, record(tmp_path / "wrong.jsonl", run, model))
    assert [finding.module for finding in wrong.introduced] == ["model.layers.0.self_attn.attn"]


def make_with_windows() -> Any:
    """Make a model whose attention compresses windows of four tokens."""
    return make(
        DeepseekV4ForCausalLM,
        DeepseekV4Config,
        layer_types=["compressed_sparse_attention"] * 2,
        mlp_layer_types=["moe"] * 2,
        num_key_value_heads=1,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        q_lora_rank=16,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=2,
        index_head_dim=16,
    )


def test_windows_of_tokens_are_not_taken_for_the_last_tokens(tmp_path: Path) -> None:
    reference = record(tmp_path / "whole.jsonl", whole, make_with_windows())
    model = make_with_windows()
    right = diff(reference, record(tmp_path / "right.jsonl", prefill_and_decode, model))
    assert (right.verdict, right.harmless) == ("match", [])
    projection = model.model.layers[0].self_attn.o_b_proj
    projection.register_forward_hook(lambda module, args, output: output * 1.05)
    wrong = diff(reference, record(tmp_path / "wrong.jsonl", prefill_and_decode, model))
    assert [finding.module for finding in wrong.introduced] == ["model.layers.0.self_attn.o_b_proj"]


@pytest.mark.parametrize("fault", [False, True])
def test_as_many_heads_as_tokens_are_not_taken_for_tokens(tmp_path: Path, fault: bool) -> None:
    """The norms of heads see [requests, heads, tokens, channels]: four heads, and four tokens."""

    def four_tokens(model: nn.Module) -> None:
        model(IDS[:, :4], use_cache=False)

    def in_two_chunks(model: nn.Module) -> None:
        out = model(IDS[:, :1], use_cache=True)
        model(IDS[:, 1:4], past_key_values=out.past_key_values, use_cache=True)

    model = make(HunYuanDenseV1ForCausalLM, HunYuanDenseV1Config)
    reference = record(tmp_path / "reference.jsonl", four_tokens, model)
    if fault:
        model.model.layers[1].self_attn.query_layernorm.variance_epsilon = 1e-2
    report = diff(reference, record(tmp_path / "port.jsonl", in_two_chunks, model))
    norm = "model.layers.1.self_attn.query_layernorm"
    assert norm in {pair.module for pair in report.compared}
    assert report.verdict == ("diverged" if fault else "match")
    if fault:
        assert report.first is not None
        assert (report.first.module, report.first.side) == (norm, "output")


def test_a_prefix_that_the_engine_has_cached_is_not_compared(tmp_path: Path) -> None:
    model = make()
    with torch.no_grad():
        cache = model(IDS[:, :4], use_cache=True).past_key_values

    def suffix(model: nn.Module) -> None:
        model(IDS[:, 4:], past_key_values=cache, use_cache=True)

    report = diff(
        record(tmp_path / "reference.jsonl", whole, make()),
        record(tmp_path / "port.jsonl", suffix, model),
    )
    assert report.verdict == "match"
    assert "12 tokens of 2 requests" in report.warnings[0]


def test_tokens_without_a_partner_are_no_match(reference: Path, tmp_path: Path) -> None:
    def chunks_whose_positions_restart(model: nn.Module) -> None:
        model(IDS[:, :6], use_cache=False)
        model(IDS[:, 6:], use_cache=False)

    port = record(tmp_path / "port.jsonl", chunks_whose_positions_restart, make())
    for sides in ((reference, port), (port, reference)):
        report = diff(*sides)
        assert (report.verdict, report.first) == ("partial", None)
        for line in report.uncompared:
            assert line.startswith("8 of 20 tokens of Qwen3ForCausalLM in the ")
        assert len(report.uncompared) == 2


def test_requests_that_only_one_side_serves_are_no_match(reference: Path, tmp_path: Path) -> None:
    def first_request(model: nn.Module) -> None:
        model(IDS[:1], use_cache=False)

    report = diff(reference, record(tmp_path / "port.jsonl", first_request, make()))
    assert (report.verdict, report.first) == ("partial", None)
    assert "10 of 20 tokens of Qwen3ForCausalLM in the reference" in report.reason


@pytest.mark.parametrize(("missing", "verdict"), [(1, "match"), (2, "partial")])
def test_the_last_token_of_an_answer_may_be_generated_only(
    reference: Path, tmp_path: Path, missing: int, verdict: str
) -> None:
    def shorter(model: nn.Module) -> None:
        chunk = IDS[:, : 10 - missing]
        out = model(chunk[:, :4], use_cache=True)
        model(chunk[:, 4:], past_key_values=out.past_key_values, use_cache=True)

    assert diff(reference, record(tmp_path / "port.jsonl", shorter, make())).verdict == verdict


# -- faults


def other_eps(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 1e-3


def no_query_norm(model: Any) -> None:
    model.model.layers[1].self_attn.q_norm.forward = lambda x: x


def other_theta(model: Any) -> None:
    rotary = model.model.rotary_emb
    forward = rotary.forward

    def rotate(x: Tensor, position_ids: Tensor, **kwargs: Any) -> Any:
        return forward(x, position_ids * 0.97, **kwargs)

    rotary.forward = rotate


def positions_off_by_one_in_decode(model: Any) -> None:
    rotary = model.model.rotary_emb
    forward = rotary.forward

    def rotate(x: Tensor, position_ids: Tensor, **kwargs: Any) -> Any:
        return forward(x, position_ids + (x.shape[1] == 1), **kwargs)

    rotary.forward = rotate


def cache_block_overwritten(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def attend(*args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if cache is not None and cache.get_seq_length(1) == 8:
            cache.layers[1].keys[1, :, 3] = 0
        return forward(*args, **kwargs)

    attention.forward = attend


def window_off_by_one(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def attend(
        hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, **kwargs: Any
    ) -> Any:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        past, length = 0 if cache is None else cache.get_seq_length(1), hidden_states.shape[1]
        query, key = torch.arange(past, past + length)[:, None], torch.arange(past + length)
        mask = torch.where((key <= query) & (key > query - 7), 0.0, -torch.inf)[None, None]
        return forward(hidden_states, position_embeddings, mask, **kwargs)

    attention.forward = attend


def boundary_token_lost(model: Any) -> None:
    """The second chunk does not see the last token of the first one."""
    attention = model.model.layers[0].self_attn
    forward = attention.forward

    def attend(
        hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, **kwargs: Any
    ) -> Any:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if cache is not None and cache.get_seq_length(0) == 4:
            query, key = torch.arange(4, 10)[:, None], torch.arange(10)
            attention_mask = torch.where((key <= query) & (key != 3), 0.0, -torch.inf)[None, None]
        return forward(hidden_states, position_embeddings, attention_mask, **kwargs)

    attention.forward = attend


@pytest.mark.parametrize(
    ("fault", "run", "module", "words"),
    [
        (other_eps, prefill_and_decode, "layers.1.input_layernorm", "Every token"),
        (no_query_norm, left_padded, "layers.1.self_attn.q_norm", "Every token"),
        (other_theta, prefill_and_decode, "rotary_emb", "token 1 of request 0"),
        (positions_off_by_one_in_decode, prefill_and_decode, "rotary_emb", "token 6 of request 0"),
        (cache_block_overwritten, prefill_and_decode, "layers.1.self_attn.attn", "token 8 of request 1"),
        (window_off_by_one, prefill_and_decode, "layers.1.self_attn.attn", "token 7 of request 0"),
        (boundary_token_lost, chunked_prefill, "layers.0.self_attn.attn", "token 4 of request 0"),
    ],
)  # fmt: skip
def test_a_fault_is_named_with_its_first_token(
    reference: Path, tmp_path: Path, fault: Callable[[Any], None], run: Run, module: str, words: str
) -> None:
    model = make()
    fault(model)
    first = diff(reference, record(tmp_path / "port.jsonl", run, model)).first
    assert first is not None
    assert (first.side, first.module, first.port_module) == ("output", *[f"model.{module}"] * 2)
    assert words in first.explanation


# -- sums: a value that one program keeps as two


@pytest.fixture
def engine_tokens() -> Iterator[None]:
    last = Tokens()

    def packed(module: nn.Module, args: Any, kwargs: Any) -> Tokens | None:
        nonlocal last
        if isinstance(module, PackedEngine):
            ends = find_ends(args[2])
            last = Tokens(*(part[ends] for part in args))
            return Tokens(*args)
        return last if isinstance(module, LogitsProcessor) else None

    tokens.token_sources.insert(0, packed)
    yield
    tokens.token_sources.remove(packed)


def find_ends(requests: Tensor) -> Tensor:
    """Return the index of each request's last row in a packed batch."""
    return torch.cat((requests[1:] != requests[:-1], torch.tensor([True]))).nonzero()[:, 0]


def serve(engine: Any) -> None:
    """Prefill both requests in one packed batch, then go on with one after the other."""
    parts = [[(1, 0, 5), (0, 0, 7)], [(0, 7, 8), (1, 5, 9)], [(1, 9, 10)], [(0, 8, 10)]]
    for batch in parts:
        entries = [(row, place) for row, start, stop in batch for place in range(start, stop)]
        rows, places = (torch.tensor(column) for column in zip(*entries, strict=True))
        out = engine(IDS[rows, places], places, rows + 20)
        if isinstance(engine, ServingEngine):
            engine.logits_processor(engine.lm_head, out[find_ends(rows)])


def compare_engine(
    tmp_path: Path,
    fault: Callable[[Any], None],
    kind: type[PackedEngine] = PackedEngine,
    model: tuple[Any, Any] = (LlamaForCausalLM, LlamaConfig),
) -> Report:
    reference = make(*model)
    engine = kind(reference)
    fault(engine)
    return diff(
        record(tmp_path / "reference.jsonl", whole, reference),
        record(tmp_path / "engine.jsonl", serve, engine),
    )


def test_an_engine_that_keeps_the_residual_apart_matches(
    tmp_path: Path, engine_tokens: None
) -> None:
    report = compare_engine(tmp_path, lambda engine: None)
    assert report.verdict == "match", report
    assert any(
        (pair.module, pair.port_tensor) == ("model.layers.1.mlp", "out") for pair in report.compared
    )
    sums = [pair for pair in report.compared if "+" in pair.tensor + pair.port_tensor]
    assert sums
    assert all(pair.state == "right" for pair in sums)


def engine_theta(engine: PackedEngine) -> None:
    engine.layers[1].self_attn.rotary_emb.theta = 9000.0


def engine_eps(engine: PackedEngine) -> None:
    engine.layers[1].post_attention_layernorm.eps = 1e-3


def engine_loses_the_cache(engine: PackedEngine) -> None:
    attention = engine.layers[1].self_attn
    forward = attention.forward

    def attend(hidden: Tensor, positions: Tensor, requests: Tensor) -> Tensor:
        if len(hidden) == 1:  # the last step of request 1
            attention.attn.cache[21][1][2] = 0
        return forward(hidden, positions, requests)

    attention.forward = attend  # type: ignore[method-assign]


def normed_residual(engine: PackedEngine) -> None:
    norm = engine.layers[1].post_attention_layernorm
    forward = norm.forward
    norm.forward = lambda *inputs: (forward(*inputs)[0],) * 2  # type: ignore[method-assign]


def layers_exchanged(engine: PackedEngine) -> None:
    """Run the last layer before the first one, each under its own name."""
    first, last = (layer.forward for layer in engine.layers)
    engine.layers[0].forward, engine.layers[1].forward = last, first


# -- an engine that packs its weights, and computes its logits elsewhere


def test_modules_without_weights_are_paired_by_their_rows(
    tmp_path: Path, engine_tokens: None
) -> None:
    report = compare_engine(tmp_path, lambda engine: None, ServingEngine)
    assert report.verdict == "match", report
    assert "20 tokens of 2 requests" in report.warnings[0]
    compared = {(pair.module, pair.port_module) for pair in report.compared}
    for layer in ("layers.0", "layers.1"):
        assert (f"model.{layer}.self_attn.q_proj", f"{layer}.self_attn.qkv_proj") in compared
        assert (f"model.{layer}.mlp.gate_proj", f"{layer}.mlp.gate_up_proj") in compared
    assert ("lm_head", "logits_processor") in compared


def scaled_logits(engine: Any) -> None:
    engine.logits_processor.scale = 1.01


def decode_only(engine: Any) -> None:
    """Double what the last layer's MLP returns where a forward has one token."""
    mlp = engine.layers[1].mlp
    forward = mlp.down_proj.forward
    mlp.down_proj.forward = lambda hidden: forward(hidden) * (1 + (len(hidden) == 1))


def heads_in_another_order(engine: Any) -> None:
    projection = engine.layers[1].self_attn.qkv_proj
    width = engine.layers[1].self_attn.attn.width
    order = [*range(width, 2 * width), *range(width)]
    projection.packed[0][:, : 2 * width] = projection.packed[0][:, order]


def keys_and_values_exchanged(engine: Any) -> None:
    attention = engine.layers[1].self_attn
    queries, keys, values = attention.qkv_proj.packed[0].split(attention.sizes, 1)
    attention.qkv_proj.packed[0] = torch.cat((queries, values, keys), 1)


def exchange_gate_and_up(engine: Any, layer: int) -> None:
    projection = engine.layers[layer].mlp.gate_up_proj
    projection.packed[0] = torch.cat(projection.packed[0].chunk(2, 1)[::-1], 1)


def gate_and_up_exchanged(engine: Any) -> None:
    exchange_gate_and_up(engine, 1)


def gates_and_ups_exchanged(engine: Any) -> None:
    for layer in range(2):
        exchange_gate_and_up(engine, layer)


def takes_up_first(engine: Any) -> None:
    gates_and_ups_exchanged(engine)
    for layer in engine.layers:
        layer.mlp.act_fn.takes_up_first = True


def takes_up_first_and_scales(engine: Any) -> None:
    takes_up_first(engine)
    engine.layers[1].mlp.act_fn.scale = 1.1


def gate_up_of_one_token(engine: Any) -> None:
    """Scale what a fused projection returns where a forward has one token."""
    projection = engine.layers[1].mlp.gate_up_proj
    forward = projection.forward
    projection.forward = lambda hidden: forward(hidden) * (1 + (len(hidden) == 1))


def padded_vocabulary(engine: Any) -> None:
    engine.logits_processor.paddings = 6


FAULTS = {
    PackedEngine: [
        (layers_exchanged, "layers.1.input_layernorm", "these modules run in another order"),
        (engine_theta, "layers.1.self_attn.rotary_emb", "token 1 of request 0"),
        (engine_eps, "layers.1.post_attention_layernorm", "Every token"),
        (engine_loses_the_cache, "layers.1.self_attn.attn", "Only token 9 of request 1"),
        (normed_residual, "layers.1.post_attention_layernorm", "Every token"),
    ],
    # whose modules have no weights
    ServingEngine: [
        (engine_theta, "layers.1.self_attn.rotary_emb", "token 1 of request 0"),
        (heads_in_another_order, "layers.1.self_attn.qkv_proj", "another order"),
        (keys_and_values_exchanged, "layers.1.self_attn.qkv_proj", "another order"),
        (scaled_logits, "logits_processor", "Every token"),
        (padded_vocabulary, "logits_processor", "6 channels more"),
        (decode_only, "layers.1.mlp.down_proj", "Only token 9 of request 1"),
        (gate_up_of_one_token, "layers.1.mlp.gate_up_proj", "Only token 9 of request 1"),
        (gate_and_up_exchanged, "layers.1.mlp.gate_up_proj", "another order"),
        (gates_and_ups_exchanged, "layers.0.mlp.gate_up_proj", "another order"),
        (takes_up_first_and_scales, "layers.1.mlp.act_fn", "Every token"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "fault", "module", "words"),
    [(kind, *fault) for kind, faults in FAULTS.items() for fault in faults],
)
def test_a_fault_of_the_engine_is_named(
    tmp_path: Path,
    engine_tokens: None,
    kind: type[PackedEngine],
    fault: Callable[[Any], None],
    module: str,
    words: str,
) -> None:
    first = compare_engine(tmp_path, fault, kind).first
    assert first is not None
    assert first.port_module == module
    assert words in first.explanation


def test_parts_in_an_order_of_the_engine_match(tmp_path: Path, engine_tokens: None) -> None:
    assert compare_engine(tmp_path, takes_up_first, ServingEngine).verdict == "match"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_logits_are_compared_after_what_the_model_does_to_them(
    tmp_path: Path, engine_tokens: None, scale: float, tied: bool
) -> None:
    """The model halves them; its head alone agrees with an engine that does not."""

    class TiedEngine(ServingEngine):
        def __init__(self, model: Any) -> None:
            super().__init__(model)
            if tied:
                self.lm_head = self.embed_tokens

    def set_scale(engine: Any) -> None:
        engine.logits_processor.scale = scale

    settings = {"logits_scaling": 2.0, "attention_multiplier": 8**-0.5}
    kinds = GraniteForCausalLM, partial(GraniteConfig, tie_word_embeddings=tied, **settings)
    report = compare_engine(tmp_path, set_scale, TiedEngine, kinds)
    if scale == 0.5:
        assert (report.verdict, report.harmless) == ("match", [])
    else:
        assert report.first is not None
        assert report.first.port_module == "logits_processor"
        assert "times 2" in report.first.explanation


def test_logits_as_wide_as_the_hidden_states_are_not_compared_with_them(
    tmp_path: Path, engine_tokens: None
) -> None:
    def wide_config(**sizes: Any) -> LlamaConfig:
        return LlamaConfig(**sizes | {"hidden_size": sizes["vocab_size"]})

    model = LlamaForCausalLM, wide_config
    report = compare_engine(tmp_path, lambda engine: None, ServingEngine, model)
    assert (report.verdict, report.harmless) == ("match", [])


# -- what an engine does in code between modules


def replace_mlp(engine: Any, mlp: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
    """Have the last layer compute `mlp(layer, normed, residual)` in place of its MLP."""
    layer = engine.layers[1]

    def forward(hidden: Tensor, residual: Any, positions: Tensor, requests: Tensor) -> Any:
        hidden, residual = layer.input_layernorm(hidden, residual)
        hidden = layer.self_attn(hidden, positions, requests)
        hidden, residual = layer.post_attention_layernorm(hidden, residual)
        return mlp(layer, hidden, residual), residual

    layer.forward = forward


def mlp_of_another_layer(engine: Any) -> None:
    replace_mlp(engine, lambda layer, normed, residual: engine.layers[0].mlp(normed))


def mlp_of_the_residual(engine: Any) -> None:
    replace_mlp(engine, lambda layer, normed, residual: layer.mlp(residual))


class Runner(nn.Module):
    """Calls a module of its layer, which has two names then."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.called = mlp

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.called(hidden)
        return out


def mlp_under_another_name(engine: Any) -> None:
    engine.layers[1].runner = Runner(engine.layers[1].mlp)
    replace_mlp(engine, lambda layer, normed, residual: layer.runner(normed))


def scaled_mlp_under_another_name(engine: Any) -> None:
    mlp_under_another_name(engine)
    forward = engine.layers[1].mlp.forward
    engine.layers[1].mlp.forward = lambda hidden: forward(hidden) * 1.05


@pytest.mark.parametrize(
    ("fault", "module", "side", "words"),
    [
        (mlp_of_another_layer, "layers.1.mlp", "output", "in whose place layers.0.mlp is called"),
        (mlp_of_the_residual, "layers.1.mlp", "input", "Every token"),
        (scaled_mlp_under_another_name, "layers.1.mlp", "output", "times 1.05"),
    ],
)
def test_code_that_hands_on_or_calls_something_else_is_named(
    tmp_path: Path,
    engine_tokens: None,
    fault: Callable[[Any], None],
    module: str,
    side: str,
    words: str,
) -> None:
    first = compare_engine(tmp_path, fault, ServingEngine).first
    assert first is not None
    assert (first.port_module, first.port_side) == (module, side)
    assert words in first.explanation


def test_a_module_that_is_called_by_another_name_matches(
    tmp_path: Path, engine_tokens: None
) -> None:
    report = compare_engine(tmp_path, mlp_under_another_name, ServingEngine)
    assert report.verdict == "match"
    assert ("model.layers.1.mlp", "layers.1.mlp") in {
        (pair.module, pair.port_module) for pair in report.compared
    }


@pytest.mark.parametrize("factor", [3.0, 3.0003])
def test_a_factor_of_the_embedding_may_be_in_code(
    tmp_path: Path, engine_tokens: None, factor: float
) -> None:
    class ScaledEmbedding(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 3.0

    class ScalingEngine(ServingEngine):
        def hidden_states(self, ids: Tensor, positions: Tensor, requests: Tensor) -> Tensor:
            hidden, residual = self.embed_tokens(ids) * factor, None
            for layer in self.layers:
                hidden, residual = layer(hidden, residual, positions, requests)
            normed: Tensor = self.norm(hidden, residual)[0]
            return normed

    model = make(LlamaForCausalLM, LlamaConfig)
    engine = ScalingEngine(model)
    model.model.embed_tokens.__class__ = ScaledEmbedding
    report = diff(
        record(tmp_path / "reference.jsonl", whole, model),
        record(tmp_path / "engine.jsonl", serve, engine),
    )
    if factor == 3.0:
        assert report.verdict == "match"
    else:
        assert report.first is not None
        # the first tensor that differs: which of the two factors is wrong, it does not tell
        assert (report.first.port_module, report.first.port_side) == ("embed_tokens", "output")


# -- a module that the engine does not have


QWEN = (Qwen3ForCausalLM, Qwen3Config)


def test_an_engine_with_norms_of_heads_matches(tmp_path: Path, engine_tokens: None) -> None:
    assert compare_engine(tmp_path, lambda engine: None, ServingEngine, QWEN).verdict == "match"


@pytest.mark.parametrize("layers", [[1], [0, 1]])
def test_a_norm_that_the_engine_leaves_out_is_named(
    tmp_path: Path, engine_tokens: None, layers: list[int]
) -> None:
    def no_query_norm(engine: Any) -> None:
        for layer in layers:
            engine.layers[layer].self_attn.q_norm = None

    first = compare_engine(tmp_path, no_query_norm, ServingEngine, QWEN).first
    assert first is not None
    name = f"layers.{layers[0]}.self_attn.q_norm"
    assert (first.kind, first.module, first.port_module) == ("missing", f"model.{name}", name)


def test_another_rotation_behind_a_norm_of_heads_is_no_missing_norm(
    tmp_path: Path, engine_tokens: None
) -> None:
    first = compare_engine(tmp_path, engine_theta, ServingEngine, QWEN).first
    assert first is not None
    assert first.port_module == "layers.1.self_attn.rotary_emb"


# -- ranks that each hold a part of some tensors


def in_own_channels(engine: Any) -> None:
    """Compute the MLPs in another order of channels, as if they were the part of a rank."""
    for layer in engine.layers:
        order = torch.randperm(len(layer.mlp.down_proj.packed[0]))
        up, down = layer.mlp.gate_up_proj.packed, layer.mlp.down_proj.packed
        up[0], down[0] = up[0][:, torch.cat((order, order + len(order)))], down[0][order]


@pytest.mark.parametrize("fault", [None, scaled_logits])
def test_of_ranks_only_what_all_hold_is_compared(
    tmp_path: Path,
    engine_tokens: None,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Any], None] | None,
) -> None:
    llama = make(LlamaForCausalLM, LlamaConfig)
    reference = record(tmp_path / "reference.jsonl", whole, llama)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        engine = ServingEngine(llama)
        if rank:
            in_own_channels(engine)
        if fault is not None:
            fault(engine)
        record(tmp_path / "ranks" / "run.jsonl", serve, engine)
    report = diff(reference, tmp_path / "ranks")
    assert "compare the port on one device" in " ".join(report.warnings)
    compared = {pair.port_module for pair in report.compared}
    assert "layers.1.mlp" in compared and "layers.1.mlp.gate_up_proj" not in compared
    first = report.first and report.first.port_module
    assert first == (None if fault is None else "logits_processor")


# -- log-probabilities of the tokens that follow


def test_log_probabilities_of_a_match_are_equal(reference: Path, tmp_path: Path) -> None:
    report = diff(reference, record(tmp_path / "port.jsonl", prefill_and_decode, make()))
    compared = report.log_probabilities
    assert compared is not None and compared.largest < 1e-5
    assert compared.tokens + compared.unknown == 18  # of the last ones, none follows


def log_probability(model: Any, request: int, position: int) -> float:
    with torch.no_grad():
        logits = model(IDS).logits[request, position - 1]
    return float(logits.log_softmax(-1)[IDS[request, position]])


def test_the_largest_difference_of_a_log_probability_is_told_with_its_module(
    reference: Path, tmp_path: Path
) -> None:
    port = make()
    other_eps(port)
    report = diff(reference, record(tmp_path / "port.jsonl", left_padded, port))
    compared = report.log_probabilities
    assert compared is not None and compared.tokens >= 5
    place = compared.request, compared.position
    assert compared.reference == pytest.approx(log_probability(make(), *place), abs=1e-5)
    assert compared.port == pytest.approx(log_probability(port, *place), abs=1e-5)
    assert compared.largest == pytest.approx(abs(compared.reference - compared.port))
    assert compared.module == "model.layers.1.input_layernorm"
    text = render_text(report, color=False)
    assert "Log-probabilities of" in text
    assert "The tokens that enter the module match." in text


def test_log_probabilities_of_an_engine_are_those_of_its_logits(
    tmp_path: Path, engine_tokens: None
) -> None:
    clean = compare_engine(tmp_path, lambda engine: None, ServingEngine).log_probabilities
    assert clean is not None and clean.largest < 1e-5
    scaled = compare_engine(tmp_path / "scaled", scaled_logits, ServingEngine).log_probabilities
    assert scaled is not None and scaled.largest > 1e-3
    assert scaled.port_module == "logits_processor"
    # the engine computes the logits of each forward's last tokens only
    assert scaled.tokens + scaled.unknown < 18


# -- a trainer and its rollout engine in one process


def rollout(engine: nn.Module, ids: Tensor) -> None:
    with torch.no_grad():
        out = engine(ids[:, :6], use_cache=True)
        engine(ids[:, 6:], past_key_values=out.past_key_values, use_cache=True)


def train(trainer: Any, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    trainer(ids, use_cache=False, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("synchronised", [True, False])
def test_equal_requests_before_and_after_an_update_are_told_apart(
    tmp_path: Path, synchronised: bool
) -> None:
    """The engine serves IDS before and after an update, the trainer computes them after it only."""
    trainer, engine = make(), make()
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.5)
    with recording_to(tmp_path / "run.jsonl", capture="tokens", grad=True):
        others = IDS.flip(1)
        for rollouts, batch in (((IDS, others), others), ((IDS,), IDS)):
            if synchronised:
                engine.load_state_dict(trainer.state_dict())
            for ids in rollouts:
                rollout(engine, ids)
            train(trainer, optimizer, batch)
    models = "Qwen3ForCausalLM#2", "Qwen3ForCausalLM"
    report = diff(tmp_path / "run.jsonl", tmp_path / "run.jsonl", models=models)
    assert "40 tokens of 4 requests" in report.warnings[0]
    assert not any("record one step" in warning for warning in report.warnings)
    # what the engine served before the update, and the trainer did not learn from
    assert report.uncompared == [
        "20 of 60 tokens of Qwen3ForCausalLM in the port have no counterpart and were not compared"
    ]
    assert report.verdict == ("partial" if synchronised else "diverged"), report
