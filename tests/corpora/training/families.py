"""The trained models, tiny and with random weights, and what each learns: a model of our own, a Llama
and a GPT-2 of transformers, a UNet of diffusers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, VOCABULARY, TOKENS, BATCH, PADDING = 16, 24, 8, 4, 0

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


@dataclass
class Family:
    """A model, its loss, and one batch after the other."""

    model: nn.Module
    loss: Loss
    batches: Callable[[], Iterator[Batch]]


# ---- a model of our own


class Gate(torch.autograd.Function):
    """SiLU with a backward pass of its own, whose result is multiplied by `factor`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return ctx.factor * gradient * (gate + x * gate * (1 - gate)), None


class Product(torch.autograd.Function):
    """A matrix product with a backward pass of its own; `transposed` is its fault."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transposed = transposed
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        of_weight = gradient.flatten(0, -2).T @ x.flatten(0, -2)
        return gradient @ weight, of_weight.T if ctx.transposed else of_weight, None


class Activation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return Gate.apply(x, self.factor)


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * WIDTH**-0.5)
        self.transposed = False

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight, self.transposed)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            Activation(),
        )
        self.drop, self.down, self.mix = nn.Dropout(0.0), nn.Linear(2 * WIDTH, WIDTH), Mix()
        self.preserves_random_state: bool | None = None  # None: no checkpointing
        self.residual: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        if self.preserves_random_state is None:
            return self.residual(x) + self.body(x)
        return x + checkpoint(
            self.body, x, use_reentrant=False, preserve_rng_state=self.preserves_random_state
        )

    def body(self, x: Tensor) -> Tensor:
        return self.mix(self.down(self.drop(self.act(self.up(self.norm(x))))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PADDING)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        hidden = hidden + hidden.mean(1, keepdim=True)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def token_batches(padded: bool = True) -> Iterator[Batch]:
    """Yield random tokens; the rows end with different amounts of padding."""
    generator = torch.Generator().manual_seed(1)
    while True:
        ids = torch.randint(1, VOCABULARY, (BATCH, TOKENS), generator=generator)
        lengths = torch.randint(TOKENS // 2, TOKENS + 1, (BATCH, 1), generator=generator)
        if padded:
            ids[torch.arange(TOKENS) >= lengths] = PADDING
        yield {"ids": ids}


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean over the next tokens that are not padding."""
    ids = batch["ids"]
    logits = model(ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=PADDING)


def net() -> Family:
    return Family(Net(), next_token_loss, token_batches)


# ---- transformers and diffusers


def labelled_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss that a language model of transformers computes."""
    ids = batch["ids"]
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def llama() -> Family:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, attn_implementation="sdpa",
    )  # fmt: skip
    return Family(LlamaForCausalLM(config), labelled_loss, lambda: token_batches(padded=False))


def gpt2() -> Family:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=WIDTH, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return Family(GPT2LMHeadModel(config), labelled_loss, lambda: token_batches(padded=False))


def image_batches() -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield {
            "image": torch.randn(2, 4, 8, 8, generator=generator),
            "noise": torch.randn(2, 4, 8, 8, generator=generator),
            "time": torch.randint(0, 1000, (2,), generator=generator),
        }


def denoising_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return how well the model predicts the noise."""
    level = (batch["time"] / 1000).view(-1, 1, 1, 1)
    noisy = (1 - level) * batch["image"] + level * batch["noise"]
    return F.mse_loss(model(noisy, batch["time"]).sample, batch["noise"])


def unet() -> Family:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, norm_num_groups=4,
        block_out_channels=(8, 16), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8,
    )  # fmt: skip
    return Family(model, denoising_loss, image_batches)


FAMILIES = {"net": net, "llama": llama, "gpt2": gpt2, "unet": unet}


def build(name: str) -> Family:
    """Return a family whose weights depend on nothing but its name."""
    torch.manual_seed(0)
    family = FAMILIES[name]()
    with torch.no_grad():
        for parameter in family.model.parameters():
            if parameter.ndim == 1:  # zeros and ones hide half of all faults
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return family
