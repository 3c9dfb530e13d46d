"""The faults: each is what a person who ports a model does wrong, planted in the loaded port and
nowhere else.

Some are wrong weights. The others are wrong lines of the library's own code, replaced while the
program runs.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tests.corpora.edited_text import compile_text
from tests.corpora.small import families

Plant = Callable[[Any, "Patches"], None]
BUGS: dict[str, Plant] = {}


class Patches:
    """Attributes that were replaced, so that a test can put them back; a program never does."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)

    def edit(self, owner: type | nn.Module, name: str, old: str, new: str) -> None:
        """Compile a method again with `old`, which its source must hold once, replaced by `new`; of
        one module only, or of a class.
        """
        kind = owner if isinstance(owner, type) else type(owner)
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(kind, name))))
        if source.count(old) != 1:
            raise ValueError(
                f"{kind.__name__}.{name} holds {source.count(old)} times {old!r}: this library is another one"
            )
        space: dict[str, Any] = {}
        edited = compile_text(source.replace(old, new), f"<{kind.__name__}.{name}>")
        exec(edited, vars(sys.modules[kind.__module__]), space)
        if kind is owner:
            self.set(owner, name, space[name])
        else:
            setattr(owner, name, types.MethodType(space[name], owner))

    def undo(self) -> None:
        while self._undo:
            owner, name, value = self._undo.pop()
            setattr(owner, name, value)


def _bug(plant: Plant) -> Plant:
    BUGS[plant.__name__] = plant
    return plant


def _swap_halves(parameter: torch.Tensor) -> None:
    parameter.copy_(torch.cat(parameter.chunk(2)[::-1]))


# ---- Llama


@_bug
def llama_rope_interleaved(model: Any, patches: Patches) -> None:
    """Neighbours are rotated, as in the original code; the weights want halves."""
    from transformers.models.llama import modeling_llama

    def rotate(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        half = cos.shape[-1] // 2
        cos, sin = (t[:, None, :, :half].repeat_interleave(2, dim=-1) for t in (cos, sin))
        turned = (torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2) for x in (q, k))
        q_turned, k_turned = turned
        return q * cos + q_turned * sin, k * cos + k_turned * sin

    patches.set(modeling_llama, "apply_rotary_pos_emb", rotate)


@_bug
def llama_q_proj_transposed(model: Any, patches: Patches) -> None:
    weight = model.model.layers[3].self_attn.q_proj.weight
    weight.copy_(weight.T.clone())


@_bug
def llama_swiglu_swapped(model: Any, patches: Patches) -> None:
    """The activation is on the other branch."""
    kind = type(model.model.layers[0].mlp)
    patches.edit(kind, "forward", "self.act_fn(self.gate_proj(x)) * self.up_proj(x)",
                 "self.act_fn(self.up_proj(x)) * self.gate_proj(x)")  # fmt: skip


@_bug
def llama_causal_mask_dropped(model: Any, patches: Patches) -> None:
    for layer in model.model.layers:
        layer.self_attn.is_causal = False


@_bug
def llama_layers_exchanged(model: Any, patches: Patches) -> None:
    """Two blocks have each other's weights."""
    first, second = model.model.layers[1:3]
    weights = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    first.load_state_dict(second.state_dict())
    second.load_state_dict(weights)


@_bug
def llama_norm_not_loaded(model: Any, patches: Patches) -> None:
    model.model.layers[4].post_attention_layernorm.weight.fill_(1)


@_bug
def llama_residual_scaled(model: Any, patches: Patches) -> None:
    patches.edit(model.model.layers[2], "forward", "hidden_states = residual + hidden_states\n\n    # Fully Connected",
                 "hidden_states = residual * 0.9 + hidden_states\n\n    # Fully Connected")  # fmt: skip


@_bug
def llama_last_layer_skipped(model: Any, patches: Patches) -> None:
    model.config.num_hidden_layers -= 1


# ---- Qwen3


@_bug
def qwen3_q_norm_missing(model: Any, patches: Patches) -> None:
    kind = type(model.model.layers[0].self_attn)
    patches.edit(kind, "forward", "self.q_norm(self.q_proj(hidden_states).view(hidden_shape))",
                 "self.q_proj(hidden_states).view(hidden_shape)")  # fmt: skip


@_bug
def qwen3_k_norm_epsilon(model: Any, patches: Patches) -> None:
    for layer in model.model.layers:
        layer.self_attn.k_norm.variance_epsilon = 1e-3


@_bug
def qwen3_attention_scale(model: Any, patches: Patches) -> None:
    """By the hidden size and not by the size of a head."""
    for layer in model.model.layers:
        layer.self_attn.scaling = model.config.hidden_size**-0.5


@_bug
def qwen3_heads_tiled(model: Any, patches: Patches) -> None:
    """Keys and values are repeated as 0 1 0 1 and not as 0 0 1 1."""
    from transformers.integrations import sdpa_attention

    patches.set(sdpa_attention, "use_gqa_in_sdpa", lambda *_: False)
    patches.set(sdpa_attention, "repeat_kv", lambda states, times: states.repeat(1, times, 1, 1))


# ---- Mistral


@_bug
def mistral_rope_theta(model: Any, patches: Patches) -> None:
    frequencies = model.model.rotary_emb.inv_freq
    size = 2 * len(frequencies)
    frequencies.copy_(1e6 ** -(torch.arange(0, size, 2) / size))


@_bug
def mistral_window_dropped(model: Any, patches: Patches) -> None:
    model.config.sliding_window = None


@_bug
def mistral_positions_in_bf16(model: Any, patches: Patches) -> None:
    """Exact up to 256, even numbers only from there on."""
    kind = type(model.model.rotary_emb)
    patches.edit(
        kind,
        "forward",
        "position_ids[..., None].float()",
        "position_ids[..., None].to(torch.bfloat16).float()",
    )


# ---- GPT-2


@_bug
def gpt2_gelu_exact(model: Any, patches: Patches) -> None:
    from transformers.activations import ACT2FN

    for block in model.transformer.h:
        block.mlp.act = ACT2FN["gelu"]


@_bug
def gpt2_bias_missing(model: Any, patches: Patches) -> None:
    model.transformer.h[2].mlp.c_fc.bias.zero_()


@_bug
def gpt2_dropout_left_on(model: Any, patches: Patches) -> None:
    model.train()


@_bug
def gpt2_positions_shifted(model: Any, patches: Patches) -> None:
    """The table has two rows in front, as some checkpoints' tables have."""
    table = model.transformer.wpe.weight
    table.copy_(table.roll(2, dims=0))


@_bug
def gpt2_query_and_key_exchanged(model: Any, patches: Patches) -> None:
    kind = type(model.transformer.h[0].attn)
    patches.edit(kind, "forward", "query_states, key_states, value_states = self.c_attn(hidden_states)",
                 "key_states, query_states, value_states = self.c_attn(hidden_states)")  # fmt: skip


# ---- Wan


@_bug
def wan_timestep_halves_swapped(model: Any, patches: Patches) -> None:
    model.condition_embedder.timesteps_proj.flip_sin_to_cos = False


@_bug
def wan_token_order(model: Any, patches: Patches) -> None:
    """Columns before rows."""
    patches.edit(type(model), "forward", "hidden_states.flatten(2).transpose(1, 2)",
                 "hidden_states.transpose(-1, -2).flatten(2).transpose(1, 2)")  # fmt: skip


@_bug
def wan_unpatchify_order(model: Any, patches: Patches) -> None:
    """The two axes of a patch exchanged, behind the last module."""
    patches.edit(type(model), "forward", "hidden_states.permute(0, 7, 1, 4, 2, 5, 3, 6)",
                 "hidden_states.permute(0, 7, 1, 4, 2, 6, 3, 5)")  # fmt: skip


@_bug
def wan_rope_axes(model: Any, patches: Patches) -> None:
    patches.edit(type(model.rope), "forward", "[freqs_cos_f, freqs_cos_h, freqs_cos_w]",
                 "[freqs_cos_f, freqs_cos_w, freqs_cos_h]")  # fmt: skip


@_bug
def wan_gate_missing(model: Any, patches: Patches) -> None:
    patches.edit(model.blocks[1], "forward", "hidden_states.float() + attn_output * gate_msa",
                 "hidden_states.float() + attn_output")  # fmt: skip


# ---- Flux


@_bug
def flux_norm_out_swapped(model: Any, patches: Patches) -> None:
    """Shift before scale, as the original checkpoint has it."""
    _swap_halves(model.norm_out.linear.weight)
    _swap_halves(model.norm_out.linear.bias)


@_bug
def flux_guidance_unscaled(model: Any, patches: Patches) -> None:
    patches.edit(
        type(model),
        "forward",
        "guidance.to(hidden_states.dtype) * 1000",
        "guidance.to(hidden_states.dtype)",
    )


@_bug
def flux_parts_exchanged(model: Any, patches: Patches) -> None:
    patches.edit(model.single_transformer_blocks[2], "forward", "torch.cat([attn_output, mlp_hidden_states], dim=2)",
                 "torch.cat([mlp_hidden_states, attn_output], dim=2)")  # fmt: skip


# ---- U-Net


@_bug
def unet_timestep_halves_swapped(model: Any, patches: Patches) -> None:
    model.time_proj.flip_sin_to_cos = False


@_bug
def unet_skip_order(model: Any, patches: Patches) -> None:
    patches.edit(model.up_blocks[0], "forward", "torch.cat([hidden_states, res_hidden_states], dim=1)",
                 "torch.cat([res_hidden_states, hidden_states], dim=1)")  # fmt: skip


@_bug
def unet_norm_epsilon(model: Any, patches: Patches) -> None:
    for module in model.modules():
        if isinstance(module, nn.GroupNorm):
            module.eps = 1e-3


# ---- VAE


@_bug
def vae_scaling_factor(model: Any, patches: Patches) -> None:
    """That of the next generation of the model."""
    model.register_to_config(scaling_factor=0.13025)


@_bug
def vae_padding_side(model: Any, patches: Patches) -> None:
    patches.edit(
        type(model.encoder.down_blocks[0].downsamplers[0]),
        "forward",
        "(0, 1, 0, 1)",
        "(1, 0, 1, 0)",
    )


@_bug
def vae_upsample_bilinear(model: Any, patches: Patches) -> None:
    patches.edit(type(model.decoder.up_blocks[0].upsamplers[0]), "forward", 'scale_factor=2.0, mode="nearest"',
                 'scale_factor=2.0, mode="bilinear"')  # fmt: skip


@contextmanager
def side(name: str, side: str, variant: str, seed: int) -> Iterator[Callable[[], object]]:
    """Build one side of a case; `name` is a family, or faults joined by `+`, which only the port has."""
    family, patches = name.partition("_")[0], Patches()
    model = families.load(family, side, variant, seed)
    planted = [BUGS[own] for own in name.split("+") if own in BUGS and side == "port"]
    try:
        for plant in planted:
            plant(model, patches)
        yield lambda: families.run(family, model, variant, seed)
    finally:
        patches.undo()
