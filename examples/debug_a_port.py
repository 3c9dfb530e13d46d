"""A port and its reference side by side: `lockstep` stops at the first fault, then goes on and
lists them all.

The reference is a GPT-2 of transformers, the port one by another hand: other names, other cuts, and
two bugs. Positions begin at 1 in it, and it forgets that this checkpoint divides the attention of
each layer by the layer's number. After the first bug all numbers differ; so at each place where the
two correspond the port goes on from the reference's, and the second stands alone.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import otel_torch

WIDTH, HEADS, DEPTH, VOCABULARY = 32, 2, 2, 50


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.norm_a, self.norm_b = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, scaled: bool) -> torch.Tensor:
        q, k, v = (
            one.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for one in self.qkv(self.norm_a(x)).chunk(3, -1)
        )
        scale = (WIDTH // HEADS) ** -0.5 / (self.number if scaled else 1)
        x = x + self.proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
            .transpose(1, 2)
            .flatten(2)
        )
        return x + self.down(F.gelu(self.up(self.norm_b(x)), approximate="tanh"))


class Port(nn.Module):
    def __init__(self, first_position: int = 1, scaled: bool = False) -> None:
        super().__init__()
        self.first_position, self.scaled = (
            first_position,
            scaled,
        )  # the two bugs: it has to be 0, and True
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Layer(number) for number in range(1, DEPTH + 1))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]) + self.first_position)
        for layer in self.layers:
            x = layer(x, self.scaled)
        return self.head(self.norm(x))


NAMES = {
    "transformer.wte": "tokens", "transformer.wpe": "positions", "transformer.h": "layers", "transformer.ln_f": "norm",
    "lm_head": "head", "ln_1": "norm_a", "ln_2": "norm_b", "attn.c_attn": "qkv", "attn.c_proj": "proj", "mlp.c_fc": "up",
    "mlp.c_proj": "down",
}  # fmt: skip


def convert(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The reference's weights under the port's names; GPT-2 keeps those of its projections
    transposed.
    """
    converted = {}
    for name, value in weights.items():
        if ".c_" in name and value.dim() == 2:
            value = value.T
        for old, new in NAMES.items():
            name = name.replace(old, new)
        converted[name] = value
    return converted


def main() -> None:
    torch.manual_seed(0)
    reference = GPT2LMHeadModel(
        GPT2Config(
            n_layer=DEPTH, n_head=HEADS, n_embd=WIDTH, n_positions=64, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0,
            scale_attn_by_inverse_layer_idx=True,
        )
    ).eval()  # fmt: skip
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=0.2)
    port = Port().eval()
    port.load_state_dict(convert(reference.state_dict()))
    ids = torch.randint(VOCABULARY, (1, 8))

    with torch.no_grad():
        print(
            f"the logits are {(reference(ids).logits - port(ids)).norm() / reference(ids).logits.norm():.0%} apart\n"
        )

    print("stopped at the first fault, with both tensors in hand:")
    (fault,) = otel_torch.lockstep(reference, port, (ids,)).faults
    print(
        f"  {fault}\n    reference {fault.reference.flatten()[:4].tolist()}\n    port      {fault.port.flatten()[:4].tolist()}\n"
    )

    print("and all of them, the port going on from the reference's each time:")
    print(
        f"  {otel_torch.lockstep(reference, port, (ids,), heal=True)}".replace("\n", "\n  "), "\n"
    )

    print("with both mended:")
    port.first_position, port.scaled = 0, True
    print(f"  {otel_torch.lockstep(reference, port, (ids,))}".replace("\n", "\n  "))


if __name__ == "__main__":
    main()
