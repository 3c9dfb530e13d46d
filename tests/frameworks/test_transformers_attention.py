"""The attention function of transformers, recorded as a module where tokens are captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from tests.support import ListSink, recording

IDS = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 10, 11, 12]])
ATTENTION = "model.layers.1.self_attn.attn"


def make(implementation: str = "sdpa") -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=implementation,
    )
    return LlamaForCausalLM(config).eval()


def shapes(sink: ListSink, module: str = ATTENTION) -> list[tuple[str, tuple[int, ...]]]:
    rows = sink.rows("tensor", "stats", module=module, phase="forward")
    return [(tensor, tuple(stats["shape"])) for tensor, stats in rows]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_queries_keys_values_and_the_output_are_recorded_by_token(implementation: str) -> None:
    model = make(implementation)
    bare = model(IDS).logits
    with recording(capture="tokens") as sink:
        assert torch.equal(model(IDS).logits, bare)
    heads = [("in[0]", (2, 5, 16)), ("in[1]", (2, 5, 8)), ("in[2]", (2, 5, 8)), ("out", (2, 5, 16))]
    assert shapes(sink) == heads
    projection = ATTENTION.replace("attn.attn", "attn.o_proj")
    values = [
        sink.rows("position.value", module=module, tensor=tensor)
        for module, tensor in ((ATTENTION, "out"), (projection, "in[0]"))
    ]
    assert values[0] == values[1]


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_of_a_cache_only_the_new_keys_are_recorded(kind: str) -> None:
    model = make()
    cache = StaticCache(config=model.config, max_cache_len=16) if kind == "static" else None
    with torch.no_grad(), recording(capture="tokens") as sink:
        out = model(IDS[:, :4], past_key_values=cache, use_cache=True)
        model(IDS[:, 4:], past_key_values=out.past_key_values, use_cache=True)
    assert [shape for name, shape in shapes(sink) if name == "in[1]"] == [(2, 4, 8), (2, 1, 8)]


def test_gradients_are_those_of_the_program() -> None:
    def gradients(model: Any) -> list[torch.Tensor]:
        model(IDS, labels=IDS).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    bare = gradients(make())
    with recording(capture="tokens,gradients"):
        recorded = gradients(make())
    assert all(map(torch.equal, bare, recorded))


def test_the_program_sees_no_other_module() -> None:
    model = make()
    names = [name for name, _ in model.named_modules()]
    with recording(capture="tokens"):
        model(IDS)
        assert [name for name, _ in model.named_modules()] == names


def test_nothing_is_recorded_of_it_without_tokens_and_nothing_stays() -> None:
    own = vars(AttentionInterface)["get_interface"], vars(Cache)["update"]
    with recording(capture="parity") as sink:
        make()(IDS)
    assert shapes(sink) == []
    with recording(capture="tokens"):
        assert vars(AttentionInterface)["get_interface"] is not own[0]
    assert (vars(AttentionInterface)["get_interface"], vars(Cache)["update"]) == own


def test_a_function_that_raises_raises() -> None:
    model = make()

    def fail(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError

    ALL_ATTENTION_FUNCTIONS.register("failing", fail)
    model.config._attn_implementation = "failing"
    with recording(capture="tokens"), pytest.raises(ZeroDivisionError):
        model(IDS)


def test_a_module_that_is_called_attn_contains_the_function() -> None:
    config = GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config).eval()
    with recording(capture="tokens") as sink:
        model(IDS)
    assert ("out", (2, 5, 16)) in shapes(sink, "transformer.h.0.attn.attn")
