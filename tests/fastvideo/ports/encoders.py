"""Text and image encoders: FastVideo's against transformers', tiny and with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.fastvideo.ports.pair import (
    Draw,
    Inputs,
    Pair,
    Settings,
    configured,
    load_by_method,
    renamed,
)
from tests.fastvideo.ports.weights import generator

_VOCABULARY = 96


def _text_encoder(
    reference: Callable[[], nn.Module],
    port: Callable[[], nn.Module],
    *,
    padded: bool = True,
    prefix: str = "",
    batch: int = 2,
    tokens: int = 11,
    **more: Any,
) -> Pair:
    """Prompts, the last of them three tokens shorter than the others when `padded`."""

    def inputs(draw: Draw) -> Inputs:
        mask = torch.ones(batch, tokens, dtype=torch.long)
        if padded:
            mask[-1, -3:] = 0
        drawn = torch.randint(
            3,
            _VOCABULARY - 1,
            (batch, tokens),
            generator=generator(draw.seed, f"{draw.pair}: tokens"),
        )
        return Inputs(tokens=drawn, mask=mask)

    def call(model: nn.Module, i: Inputs) -> Tensor:
        output = model(input_ids=i["tokens"], attention_mask=i["mask"] if padded else None)
        # what a padded position says is nobody's business
        return output.last_hidden_state * i["mask"][..., None].to(output.last_hidden_state.dtype)

    return Pair(reference, port, inputs, call, call, partial(load_by_method, prefix=prefix), **more)


def _llama() -> Pair:
    settings = Settings(
        vocab_size=_VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-6, rope_theta=10000.0, head_dim=16,
    )  # fmt: skip

    def reference() -> nn.Module:
        from transformers import LlamaConfig, LlamaModel

        return LlamaModel(LlamaConfig(**settings))

    def port() -> nn.Module:
        from fastvideo.configs.models.encoders import LlamaConfig
        from fastvideo.models.encoders.llama import LlamaModel

        return LlamaModel(configured(LlamaConfig(), settings))

    return _text_encoder(
        reference, port, padded=False, batch=1
    )  # the port takes one prompt at a time


def _clip_text() -> Pair:
    settings = Settings(
        vocab_size=_VOCABULARY, hidden_size=64, intermediate_size=128, projection_dim=32, num_hidden_layers=3,
        num_attention_heads=4, max_position_embeddings=77, hidden_act="quick_gelu", layer_norm_eps=1e-5, eos_token_id=95,
        bos_token_id=1, pad_token_id=0,
    )  # fmt: skip

    def reference() -> nn.Module:
        from transformers import CLIPTextConfig, CLIPTextModel

        return CLIPTextModel(CLIPTextConfig(**settings))

    def port() -> nn.Module:
        from fastvideo.configs.models.encoders import CLIPTextConfig
        from fastvideo.models.encoders.clip import CLIPTextModel

        return CLIPTextModel(configured(CLIPTextConfig(), settings))

    return _text_encoder(reference, port, padded=False, prefix="text_model.")


def _t5(umt5: bool = False) -> Pair:
    settings = Settings(
        vocab_size=_VOCABULARY, d_model=64, d_kv=16, d_ff=128, num_layers=3, num_heads=4, relative_attention_num_buckets=32,
        relative_attention_max_distance=128, feed_forward_proj="gated-gelu", layer_norm_epsilon=1e-6,
    )  # fmt: skip

    def reference() -> nn.Module:
        from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

        return (
            UMT5EncoderModel(UMT5Config(**settings))
            if umt5
            else T5EncoderModel(T5Config(**settings))
        )

    def port() -> nn.Module:
        from fastvideo.configs.models.encoders import T5Config
        from fastvideo.models.encoders.t5 import T5EncoderModel, UMT5EncoderModel

        return (UMT5EncoderModel if umt5 else T5EncoderModel)(configured(T5Config(), settings))

    return _text_encoder(reference, port)


_LINGBOT_NAMES = {
    r"^shared\.": "token_embedding.",
    r"^encoder\.final_layer_norm\.": "norm.",
    r"^encoder\.block\.(\d+)\.": r"blocks.\1.",
    r"\.layer\.0\.SelfAttention\.relative_attention_bias\.": ".pos_embedding.embedding.",
    r"\.layer\.0\.SelfAttention\.": ".attn.",
    r"\.layer\.0\.layer_norm\.": ".norm1.",
    r"\.layer\.1\.layer_norm\.": ".norm2.",
    r"\.layer\.1\.DenseReluDense\.wi_0\.": ".ffn.gate.0.",
    r"\.layer\.1\.DenseReluDense\.wi_1\.": ".ffn.fc1.",
    r"\.layer\.1\.DenseReluDense\.wo\.": ".ffn.fc2.",
}


def _lingbot_t5() -> Pair:
    def port() -> nn.Module:
        from fastvideo.configs.models.encoders.lingbotworld2_t5 import LingBotWorld2UMT5Config
        from fastvideo.models.encoders.lingbotworld2_t5 import LingBotWorld2T5EncoderModel

        settings = Settings(
            vocab_size=_VOCABULARY,
            dim=64,
            dim_attn=64,
            dim_ffn=128,
            num_heads=4,
            num_layers=3,
            num_buckets=32,
        )
        return LingBotWorld2T5EncoderModel(configured(LingBotWorld2UMT5Config(), settings))

    return replace(
        _t5(umt5=True),
        port=port,
        load=lambda model, state: load_by_method(model, renamed(state, _LINGBOT_NAMES)),
    )


def _qwen3() -> Pair:
    settings = Settings(
        vocab_size=_VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, rms_norm_eps=1e-6, rope_theta=1000000.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip

    def reference() -> nn.Module:
        from transformers import Qwen3Config, Qwen3Model

        return Qwen3Model(Qwen3Config(**settings))

    def port() -> nn.Module:
        from fastvideo.configs.models.encoders.qwen3 import Qwen3TextConfig
        from fastvideo.models.encoders.qwen3 import Qwen3ForCausalLM

        return Qwen3ForCausalLM(configured(Qwen3TextConfig(), settings))

    return _text_encoder(reference, port)


def _qwen2_5_vl() -> Pair:
    settings = Settings(
        vocab_size=_VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-6, rope_theta=1000000.0, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    sections = [2, 3, 3]

    def reference() -> nn.Module:
        from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

        rope = Settings(rope_type="default", mrope_section=sections, rope_theta=1000000.0)
        return Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(**settings, rope_parameters=rope))

    def port() -> nn.Module:
        from fastvideo.configs.models.encoders.qwen2_5 import Qwen2_5_VLConfig
        from fastvideo.models.encoders.qwen2_5 import Qwen2_5_VLTextModel

        rope = Settings(type="mrope", mrope_section=sections)
        return Qwen2_5_VLTextModel(
            configured(Qwen2_5_VLConfig(), settings | Settings(rope_scaling=rope))
        )

    return _text_encoder(reference, port)


def _image_encoder(
    reference: Callable[[], nn.Module],
    port: Callable[[], nn.Module],
    output: Callable[[Any], Tensor],
    prefix: str = "",
) -> Pair:
    return Pair(
        reference,
        port,
        lambda draw: Inputs(pixel_values=draw("image", 2, 3, 32, 32)),
        lambda model, i: output(model(**i)),
        lambda model, i: model(**i).last_hidden_state,
        partial(load_by_method, prefix=prefix),
    )


def _clip_vision() -> Pair:
    settings = Settings(
        hidden_size=64, intermediate_size=128, projection_dim=32, num_hidden_layers=3, num_attention_heads=4, image_size=32,
        patch_size=8, hidden_act="quick_gelu",
    )  # fmt: skip

    def reference() -> nn.Module:
        from transformers import CLIPVisionConfig, CLIPVisionModel

        return CLIPVisionModel(CLIPVisionConfig(**settings))

    def port() -> nn.Module:
        from fastvideo.configs.models.encoders import CLIPVisionConfig
        from fastvideo.models.encoders.clip import CLIPVisionModel

        config = configured(CLIPVisionConfig(), settings)
        config.num_hidden_layers_override = None
        config.require_post_norm = False  # transformers, too, normalises only the pooled token
        return CLIPVisionModel(config)

    return _image_encoder(
        reference, port, lambda output: output.last_hidden_state, prefix="vision_model."
    )


def _siglip() -> Pair:
    settings = Settings(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
    )

    def reference() -> nn.Module:
        from transformers import SiglipVisionConfig, SiglipVisionModel

        return SiglipVisionModel(SiglipVisionConfig(**settings, vision_use_head=False))

    def port() -> nn.Module:
        from fastvideo.configs.models.encoders.siglip import SiglipVisionConfig
        from fastvideo.models.encoders.siglip import SiglipVisionModel

        return SiglipVisionModel(configured(SiglipVisionConfig(), settings))

    return _image_encoder(
        reference, port, lambda output: output.last_hidden_state, prefix="vision_model."
    )


PAIRS: dict[str, Callable[[], Pair]] = {
    "llama": _llama,
    "clip_text": _clip_text,
    "clip_vision": _clip_vision,
    "siglip": _siglip,
    "t5": _t5,
    "umt5": partial(_t5, umt5=True),
    "lingbot_t5": _lingbot_t5,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3": _qwen3,
}
