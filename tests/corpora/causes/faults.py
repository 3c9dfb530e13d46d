"""Faults that people make when they port a model, and what an explanation of each has to say.

Each is planted in the port only. Those kept back were written after the rules and not used to
tune them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.corpora.case import KEPT_BACK, REST, Case, Right, sides_of
from tests.corpora.causes import models
from tests.corpora.causes.lines import lines_of
from tests.corpora.causes.models import HEAD, HEADS, TOKENS, WIDTH, build

Plant = Callable[[Any], object]
NAMED, OUTSIDE = "that `diff` can name", "outside of its table"
# what is right, but less than what is known with whole tensors
COARSER = {
    "transposed": "reordered",
    "rows_permuted": "reordered",
    "columns_permuted": "reordered",
}

FAULTS: dict[str, Case] = {}


def fault(
    *causes: str, words: str = "", tensors: bool = False, round: str = REST
) -> Callable[[Plant], Plant]:
    """Add a fault to the table; its family is the first word of its name.

    Args:
        causes: the right kinds of cause; none if nothing can name it.
        words: what the explanation has to contain.
        tensors: whether only whole tensors show it.
    """

    def add(plant: Plant) -> Plant:
        name = plant.__name__
        family = name.partition("_")[0]
        coarser = tuple(COARSER[kind] for kind in causes if kind in COARSER)
        FAULTS[name] = Case(
            name=name, family=family, plant=plant, round=round, kind=NAMED if causes else OUTSIDE,
            right=Right(
                causes=causes, coarser=coarser, words=tuple(words.split()), lines=lines_of(name)
            ),
            invisible=("statistics",) if tensors else (), **sides_of("causes", family, name),
        )  # fmt: skip
        return plant

    return add


@contextmanager
def side(name: str, side: str, variant: str, seed: int) -> Iterator[Callable[[], object]]:
    """Build one side of a case; `name` is a family, or faults joined by `+`, which only the port has."""
    reference, port, inputs = build(name.partition("_")[0], seed)
    planted = [FAULTS[own] for own in name.split("+") if own in FAULTS and side == "port"]
    with torch.no_grad():
        for case in planted:
            case.plant(port)

    def run() -> object:
        torch.manual_seed(seed + 7)
        with torch.no_grad():
            return (reference if side == "reference" else port)(*inputs)

    yield run


# ---- Llama: weights


@fault("bias_absent", words="qkv")
def llama_bias_not_loaded(port: models.PortLlama) -> None:
    port.h[1].attn.qkv.bias.zero_()


@fault("bias_absent", words="bias")
def llama_bias_left_out(port: models.PortLlama) -> None:
    port.h[1].attn.qkv.bias = None


@fault("not_loaded", words="ln2 ones")
def llama_norm_not_loaded(port: models.PortLlama) -> None:
    port.h[1].ln2.weight.fill_(1)


@fault("shifted", words="ln1 -1")
def llama_norm_minus_one(port: models.PortLlama) -> None:
    port.h[0].ln1.weight.sub_(1)


@fault("transposed", tensors=True)
def llama_output_transposed(port: models.PortLlama) -> None:
    weight = port.h[1].attn.out.weight
    weight.copy_(weight.T.clone())


@fault("other_weight", words="layers.2")
def llama_output_of_another_layer(port: models.PortLlama) -> None:
    port.h[1].attn.out.weight.copy_(port.h[2].attn.out.weight)


@fault("exchanged", words="input_layernorm post_attention_layernorm")
def llama_norms_exchanged(port: models.PortLlama) -> None:
    layer = port.h[1]
    layer.ln1.weight, layer.ln2.weight = layer.ln2.weight, layer.ln1.weight


@fault("scaled", words="0.5")
def llama_down_scaled(port: models.PortLlama) -> None:
    port.h[2].ff.down.weight.mul_(0.5)


@fault("negated", words="sign")
def llama_norm_negated(port: models.PortLlama) -> None:
    port.ln_f.weight.neg_()


@fault("rounded", words="bfloat16")
def llama_head_rounded(port: models.PortLlama) -> None:
    port.head.weight.copy_(port.head.weight.bfloat16())


@fault("rounded", words="float16")
def llama_embedding_rounded(port: models.PortLlama) -> None:
    port.wte.weight.copy_(port.wte.weight.half())


@fault("rotary_base", words="1,000,000")
def llama_rotary_base(port: models.PortLlama) -> None:
    port.rope.inv_freq.copy_(models.Rotary(1e6).inv_freq)


@fault("rows_permuted", words="parts of 16", tensors=True)
def llama_output_rows_permuted(port: models.PortLlama) -> None:
    weight = port.h[1].attn.out.weight
    weight.copy_(weight.unflatten(0, (HEADS, HEAD))[[2, 0, 3, 1]].flatten(0, 1))


@fault("columns_permuted", words="halves exchanged", tensors=True)
def llama_head_columns_permuted(port: models.PortLlama) -> None:
    port.head.weight.copy_(port.head.weight.roll(WIDTH // 2, 1))


# ---- Llama: attention


@fault("rope", words="pairs", tensors=True)
def llama_rotary_pairs(port: models.PortLlama) -> None:
    for layer in port.h:
        layer.attn.rotate = models.rotate_pairs


@fault("rope", words="no rotary", tensors=True)
def llama_rotary_missing(port: models.PortLlama) -> None:
    for layer in port.h:
        layer.attn.rotate = lambda x, cos, sin: x


@fault("rope", words="other direction", tensors=True)
def llama_rotary_backwards(port: models.PortLlama) -> None:
    for layer in port.h:
        layer.attn.rotate = lambda x, cos, sin: models.rotate_halves(x, cos, -sin)


@fault("attention_scale", words="√64", tensors=True)
def llama_scale_of_the_width(port: models.PortLlama) -> None:
    for layer in port.h:
        layer.attn.scale = WIDTH**-0.5


@fault("attention_scale", words="no scale", tensors=True)
def llama_scale_missing(port: models.PortLlama) -> None:
    for layer in port.h:
        layer.attn.scale = 1.0


@fault("mask", words="causal", tensors=True)
def llama_mask_missing(port: models.PortLlama) -> None:
    for layer in port.h:
        layer.attn.causal = False


@fault("mask", words="last 8 tokens", tensors=True)
def llama_window(port: models.PortLlama) -> None:
    for layer in port.h:
        layer.attn.window = 8


@fault("heads", words="0 1 0 1", tensors=True)
def llama_heads_tiled(port: models.PortLlama) -> None:
    for layer in port.h:
        layer.attn.tiled = True


@fault("part", words="part 3 of 4 0.8", tensors=True)
def llama_one_head_scaled(port: models.PortLlama) -> None:
    def scale(mixed: Tensor) -> Tensor:
        mixed[..., 2 * HEAD : 3 * HEAD] *= 0.8
        return mixed

    port.h[0].attn.after = scale


# ---- Llama: the rest


@fault("term_scaled", words="-0.1")
def llama_residual_scaled(port: models.PortLlama) -> None:
    port.h[1].residual = 0.9


@fault("term_missing", words="without")
def llama_residual_missing(port: models.PortLlama) -> None:
    port.h[1].residual = 0.0


@fault("term_added", words="plus")
def llama_branch_twice(port: models.PortLlama) -> None:
    port.h[1].branch = 2.0


@fault("scaled", words="times 8")
def llama_embedding_scaled(port: models.PortLlama) -> None:
    port.embedded = lambda x: x * WIDTH**0.5


@fault("activation", words="gate_proj up_proj", tensors=True)
def llama_gate_and_up_exchanged(port: models.PortLlama) -> None:
    for layer in port.h:
        layer.ff.swapped = True


@fault("activation", words="GELU SiLU", tensors=True)
def llama_gelu_for_silu(port: models.PortLlama) -> None:
    for layer in port.h:
        layer.ff.act = F.gelu


@fault("norm", words="0.001 1e-06", tensors=True)
def llama_norm_epsilon(port: models.PortLlama) -> None:
    for layer in port.h:
        layer.ln1.eps = 1e-3


@fault("part", words="token 0", tensors=True)
def llama_one_token(port: models.PortLlama) -> None:
    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 0] += torch.randn(WIDTH, generator=torch.Generator().manual_seed(5))
        return x

    port.embedded = change


@fault("rounded", words="bfloat16")
def llama_embedding_through_bf16(port: models.PortLlama) -> None:
    port.embedded = lambda x: x.bfloat16().float()


@fault("permuted", words="tokens shifted 1", tensors=True)
def llama_tokens_shifted(port: models.PortLlama) -> None:
    port.embedded = lambda x: x.roll(1, 1)


@fault("other_tensor", words="embed_tokens")
def llama_positions_of_the_input_lost(port: models.PortLlama) -> None:
    port.h[0].forward = lambda x, rotary: x


# ---- U-Net


@fault("bias_absent", words="down.conv1.bias")
def unet_bias_left_out(port: models.UNet) -> None:
    port.down.conv1.bias = None


@fault("exchanged", words="norm1 norm2")
def unet_norms_exchanged(port: models.UNet) -> None:
    norms = port.mid.norm1, port.mid.norm2
    norms[0].weight, norms[1].weight = norms[1].weight, norms[0].weight


@fault("norm", words="0.001", tensors=True)
def unet_norm_epsilon(port: models.UNet) -> None:
    for module in port.modules():
        if isinstance(module, nn.GroupNorm):
            module.eps = 1e-3


@fault("norm", words="groups", tensors=True)
def unet_norm_groups(port: models.UNet) -> None:
    port.down.norm1.num_groups = 2


@fault("activation", words="ReLU SiLU")
def unet_relu(port: models.UNet) -> None:
    port.mid.act = nn.ReLU()


@fault("dropout", words="down.dropout")
def unet_training_mode(port: models.UNet) -> None:
    port.train()


@fault("permuted", words="halves exchanged", tensors=True)
def unet_sine_before_cosine(port: models.UNet) -> None:
    port.time_proj.sin_first = True


@fault("permuted", words="halves exchanged", tensors=True)
def unet_skip_first(port: models.UNet) -> None:
    port.skip_first = True


@fault("transposed", tensors=True)
def unet_kernel_transposed(port: models.UNet) -> None:
    weight = port.conv_in.weight
    weight.copy_(weight.transpose(2, 3).clone())


@fault("clamped", words="limited", tensors=True)
def unet_clamped(port: models.UNet) -> None:
    port.before_out = lambda x: x.clamp(-1, 1)


@fault("dropout", words="dropout", tensors=True)
def unet_functional_dropout(port: models.UNet) -> None:
    port.before_out = lambda x: F.dropout(x, 0.1)


@fault("shifted", words="0.5")
def unet_shifted(port: models.UNet) -> None:
    port.before_out = lambda x: x + 0.5


# ---- Wan


@fault("sum", words="attn")
def wan_gate_missing(port: models.Wan) -> None:
    port.blocks[1].gated = False


@fault("term_missing", words="norm1")
def wan_scale_without_one(port: models.Wan) -> None:
    port.blocks[0].plus_one = 0.0


@fault("activation", words="erf tanh")
def wan_gelu_exact(port: models.Wan) -> None:
    for block in port.blocks:
        block.act = nn.GELU()


@fault("rope", words="halves", tensors=True)
def wan_rotary_halves(port: models.Wan) -> None:
    for block in port.blocks:
        block.attn.rotate = models.rotate_halves


@fault("parts_exchanged", words="queries keys", tensors=True)
def wan_query_and_key_exchanged(port: models.Wan) -> None:
    for block in port.blocks:
        block.attn.order = (1, 0, 2)


@fault("exchanged", words="to_k")
def wan_query_and_key_weights_exchanged(port: models.Wan) -> None:
    attention = port.blocks[1].attn
    attention.to_q, attention.to_k = attention.to_k, attention.to_q
    attention.norm_q, attention.norm_k = attention.norm_k, attention.norm_q


@fault("permuted", words="regrouped", tensors=True)
def wan_tokens_by_columns(port: models.Wan) -> None:
    port.by_columns = True


@fault("negated", words="sign")
def wan_attention_negated(port: models.Wan) -> None:
    port.blocks[0].attn.after = lambda x: -x


@fault("rounded", words="float8_e4m3fn")
def wan_weight_through_fp8(port: models.Wan) -> None:
    weight = port.blocks[1].ffn_in.weight
    weight.copy_(weight.to(torch.float8_e4m3fn))


@fault("zero", words="zeros")
def wan_attention_lost(port: models.Wan) -> None:
    port.blocks[1].attn.after = torch.zeros_like


@fault("not_loaded", words="never loaded")
def wan_weight_not_loaded(port: models.Wan) -> None:
    port.blocks[1].attn.to_v.reset_parameters()


@fault("not_called", words="norm_q")
def wan_norm_left_out(port: models.Wan) -> None:
    for block in port.blocks:
        block.attn.normed = False


@fault("length", words="lacks 1 24")
def wan_last_token_lost(port: models.Wan) -> None:
    port.embedded = lambda x: x[:, :-1]


@fault("part", words="NaN token 5", tensors=True)
def wan_one_token_nan(port: models.Wan) -> None:
    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 5] = torch.nan
        return x

    port.blocks[1].attn.after = change


# ---- outside of the table: nothing names them


@fault()
def wan_noise(port: models.Wan) -> None:
    noise = torch.Generator().manual_seed(3)
    port.embedded = lambda x: x + 0.05 * torch.randn(x.shape, generator=noise)


@fault("part", words="first half", tensors=True)
def unet_bilinear(port: models.UNet) -> None:
    port.resize = "bilinear"


@fault()
def llama_odd_activation(port: models.PortLlama) -> None:
    for layer in port.h:
        layer.ff.act = lambda x: x * torch.sigmoid(1.1 * x)


@fault()
def wan_cubed(port: models.Wan) -> None:
    port.blocks[0].attn.after = lambda x: x + 0.1 * x**3


@fault()
def llama_odd_mask(port: models.PortLlama) -> None:
    port.h[0].attn.rotate = lambda x, cos, sin: models.rotate_halves(x, cos.roll(3, 0), sin)


@fault()
def unet_weight_noise(port: models.UNet) -> None:
    weight = port.mid.conv1.weight
    weight.add_(0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(4)))


# ---- kept back: written after the rules


def _kept_back(*kinds: str, words: str = "", tensors: bool = False) -> Callable[[Plant], Plant]:
    return fault(*kinds, words=words, tensors=tensors, round=KEPT_BACK)


@_kept_back("activation", words="up_proj gate_proj", tensors=True)
def llama_fused_parts_in_another_order(port: models.PortLlama) -> None:
    weight = port.h[1].ff.gate_up.weight
    weight.copy_(weight.roll(2 * WIDTH, 0))


@_kept_back("scaled", words="q_proj 0.25")
def llama_query_part_scaled(port: models.PortLlama) -> None:
    port.h[0].attn.qkv.weight[:WIDTH] *= HEAD**-0.5
    port.h[0].attn.qkv.bias[:WIDTH] *= HEAD**-0.5


@_kept_back("rows_permuted", "permuted", words="halves", tensors=True)
def llama_query_in_rotary_pairs(port: models.PortLlama) -> None:
    rows = torch.arange(WIDTH).unflatten(0, (HEADS, 2, HEAD // 2)).transpose(1, 2).flatten()
    for part in (port.h[1].attn.qkv.weight, port.h[1].attn.qkv.bias):
        part[:WIDTH] = part[:WIDTH][rows]


@_kept_back("attention_scale", words="√20", tensors=True)
def llama_scale_of_the_length(port: models.PortLlama) -> None:
    for layer in port.h:
        layer.attn.scale = TOKENS**-0.5


@_kept_back("rope", words="keys only", tensors=True)
def llama_queries_not_rotated(port: models.PortLlama) -> None:
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x if x.shape[1] == HEADS else models.rotate_halves(x, cos, sin)

    port.h[0].attn.rotate = rotate


@_kept_back("activation", words="ReLU", tensors=True)
def llama_relu_for_silu(port: models.PortLlama) -> None:
    for layer in port.h:
        layer.ff.act = F.relu


@_kept_back("other_tensor", "not_called", words="post_attention_layernorm")
def llama_norm_skipped(port: models.PortLlama) -> None:
    port.h[2].ln2 = nn.Identity()


@_kept_back("norm", words="layer RMS", tensors=True)
def llama_layer_norm_for_rms(port: models.PortLlama) -> None:
    def centered(x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,), norm.weight, None, norm.eps)

    norm = port.h[0].ln1
    norm.forward = centered


@_kept_back("norm", words="without its weight", tensors=True)
def llama_norm_without_weight(port: models.PortLlama) -> None:
    norm = port.ln_f
    norm.forward = lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps)


@_kept_back("bias_absent", words="bias")
def wan_query_without_bias(port: models.Wan) -> None:
    query = port.blocks[0].attn.to_q
    query.forward = lambda x: F.linear(x, query.weight)


@_kept_back("term_added", words="bias twice")
def wan_bias_twice(port: models.Wan) -> None:
    query = port.blocks[1].ffn_in
    query.forward = lambda x: F.linear(x, query.weight, query.bias) + query.bias


@_kept_back("other_weight", words="blocks.0.ffn_out")
def wan_output_of_the_first_block(port: models.Wan) -> None:
    port.blocks[2].ffn_out.load_state_dict(port.blocks[0].ffn_out.state_dict())


@_kept_back("scaled", words="0.9")
def wan_modulation_scaled(port: models.Wan) -> None:
    port.blocks[0].modulation.mul_(0.9)


@_kept_back("columns_permuted", words="exchanged", tensors=True)
def wan_shift_and_scale_exchanged(port: models.Wan) -> None:
    modulation = port.blocks[0].modulation
    modulation.copy_(modulation[:, [1, 0, 2, 3, 4, 5]])


@_kept_back("columns_permuted", words="exchanged", tensors=True)
def wan_two_columns_exchanged(port: models.Wan) -> None:
    weight = port.proj_out.weight
    weight[:, [3, 9]] = weight[:, [9, 3]]


@_kept_back("attention_scale", words="no scale", tensors=True)
def wan_scale_missing(port: models.Wan) -> None:
    for block in port.blocks:
        block.attn.scale = 1.0


@_kept_back("part", words="token 7", tensors=True)
def wan_one_token_zero(port: models.Wan) -> None:
    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 7] = 0
        return x

    port.embedded = change


@_kept_back("permuted", words="reversed", tensors=True)
def wan_tokens_reversed(port: models.Wan) -> None:
    port.embedded = lambda x: x.flip(1)


@_kept_back("rounded", words="float16")
def wan_tokens_through_fp16(port: models.Wan) -> None:
    port.embedded = lambda x: x.half().float()


@_kept_back("transposed", words="heads", tensors=True)
def wan_heads_before_tokens(port: models.Wan) -> None:
    def mix(x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, HEAD)).transpose(1, 2).reshape(x.shape)

    port.blocks[0].attn.after = mix


@_kept_back("part", words="odd", tensors=True)
def wan_odd_channels_lost(port: models.Wan) -> None:
    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x[..., 1::2] = 0
        return x

    port.embedded = change


@_kept_back("scaled", "term_scaled", words="0.125")
def unet_input_scaled(port: models.UNet) -> None:
    port.before_out = lambda x: x / 8


@_kept_back("exchanged", words="conv2")
def unet_convolutions_exchanged(port: models.UNet) -> None:
    port.mid.conv1, port.mid.conv2 = port.mid.conv2, port.mid.conv1


@_kept_back("not_loaded", words="zeros")
def unet_kernel_zero(port: models.UNet) -> None:
    port.conv_out.weight.zero_()


@_kept_back("transposed", tensors=True)
def unet_channels_transposed(port: models.UNet) -> None:
    weight = port.mid.conv2.weight
    weight.copy_(weight.transpose(0, 1).clone())


@_kept_back("zero", words="zeros")
def unet_shortcut_missing(port: models.UNet) -> None:
    port.mid.shortcut.forward = lambda x: torch.zeros_like(x)


@_kept_back("padding", words="reflection", tensors=True)
def unet_padding_reflected(port: models.UNet) -> None:
    port.mid.conv1.padding_mode = "reflect"
    port.mid.conv1._reversed_padding_repeated_twice = [1, 1, 1, 1]


@_kept_back()
def unet_time_off_by_one(port: models.UNet) -> None:
    forward = port.time_proj.forward
    port.time_proj.forward = lambda time: forward(time + 1)


@_kept_back()
def wan_gate_squared(port: models.Wan) -> None:
    port.blocks[1].attn.after = lambda x: x * x.abs()


@_kept_back()
def llama_sum_of_squares(port: models.PortLlama) -> None:
    port.embedded = lambda x: x + 0.3 * x.roll(1, -1)
