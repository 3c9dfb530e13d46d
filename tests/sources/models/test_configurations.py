"""What the metadata says of how a model is set up: plain values, bounded, nothing private."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from otel_torch.sources.models.configurations import describe_configuration


def model_with(**attributes: Any) -> nn.Module:
    model = nn.Linear(2, 2)
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def test_a_model_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 16}
    config = transformers.LlamaConfig(**sizes, intermediate_size=8)
    model = transformers.LlamaForCausalLM(config).bfloat16()
    model.generation_config.temperature = 0.7
    facts = describe_configuration(model)
    said = facts["configuration"]
    assert said["hidden_size"] == 8 and said["hidden_act"] == "silu"
    assert said["rope_parameters.rope_theta"] == 10000.0
    assert "_attn_implementation" in said
    assert facts["generation"]["temperature"] == 0.7 and facts["dtypes"] == ["bfloat16"]
    json.dumps(facts, allow_nan=False)


def test_a_model_of_diffusers() -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=2)
    said = describe_configuration(model)["configuration"]
    assert said["scaling_factor"] == 0.18215 and said["block_out_channels"] == [8]


@pytest.mark.parametrize("name", ["config", "args", "params"])
def test_a_configuration_as_an_object(name: str) -> None:
    config = SimpleNamespace(
        dim=8, dtype=torch.float16, window=None, nested=SimpleNamespace(eps=1.0)
    )
    said = describe_configuration(model_with(**{name: config}))["configuration"]
    assert said == {"dim": 8, "dtype": "float16", "window": None, "nested.eps": 1.0}


def test_what_says_who_where_or_with_which_key_is_left_out() -> None:
    private = {
        "name_or_path": "someone", "cache": "/home/someone", "api_key": "hf_abc", "auth_token": "abc",
        "user": "someone", "host": "node7", "prompt": "a cat on a mat", "_private": 1, "mail": "a@b.c",
        "url": "abc", "loaders": {"password": "abc"},
    }  # fmt: skip
    config = {**private, "bos_token_id": 1, "act": "gelu"}
    said = describe_configuration(model_with(config=config))["configuration"]
    assert said == {"bos_token_id": 1, "act": "gelu"}


def test_the_size_is_bounded() -> None:
    endless: dict[str, Any] = {f"a{index}": [1.5] * 1000 for index in range(1000)}
    endless["self"] = endless
    large = {f"n{index}": [index] * 100 for index in range(10_000)}
    for config in (endless, large):
        assert len(json.dumps(describe_configuration(model_with(config=config)))) < 200_000


def test_what_is_no_plain_value_is_left_out() -> None:
    config = {
        "tensor": torch.zeros(2),
        "layer": nn.Linear(1, 1),
        "call": print,
        "nan": float("nan"),
    }
    assert "configuration" not in describe_configuration(model_with(config=config))
