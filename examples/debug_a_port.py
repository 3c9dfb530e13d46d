"""Compare a port with its reference in lockstep: first stop at the first fault, then list them all.

The reference is a GPT-2 of transformers. The port has other names, another module structure and two
bugs: positions start at 1, and it ignores that this checkpoint divides the attention of each layer
by the layer's number. After the first bug all values differ. So wherever the two correspond, the
port continues from the reference's values, and the second bug shows separately.
"""

from textwrap import indent

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
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_a(x)).chunk(3, -1)
        )
        scale = (WIDTH // HEADS) ** -0.5 / (self.number if scaled else 1)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        x = x + self.proj(heads.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_b(x)), approximate="tanh"))


class Port(nn.Module):
    def __init__(self, first_position: int = 1, scaled: bool = False) -> None:
        super().__init__()
        # the two bugs: these should be 0 and True
        self.first_position, self.scaled = first_position, scaled
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Layer(number) for number in range(1, DEPTH + 1))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]) + self.first_position)
        for layer in self.layers:
            x = layer(x, self.scaled)
        return self.head(self.norm(x))


NAMES = {
    "transformer.wte": "tokens", "transformer.wpe": "positions", "transformer.h": "layers",
    "transformer.ln_f": "norm", "lm_head": "head", "ln_1": "norm_a", "ln_2": "norm_b",
    "attn.c_attn": "qkv", "attn.c_proj": "proj", "mlp.c_fc": "up", "mlp.c_proj": "down",
}  # fmt: skip


def convert(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the reference's weights under the port's names. GPT-2's projections are transposed."""
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
    config = GPT2Config(
        n_layer=DEPTH, n_head=HEADS, n_embd=WIDTH, n_positions=64, vocab_size=VOCABULARY,
        bos_token_id=0, eos_token_id=0, scale_attn_by_inverse_layer_idx=True,
    )  # fmt: skip
    reference = GPT2LMHeadModel(config).eval()
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=0.2)
    port = Port().eval()
    port.load_state_dict(convert(reference.state_dict()))
    ids = torch.randint(VOCABULARY, (1, 8))

    with torch.no_grad():
        expected = reference(ids).logits
        distance = (expected - port(ids)).norm() / expected.norm()
        print(f"relative error of the logits: {distance:.0%}\n")

    print("stop at the first fault, with both tensors:")
    (fault,) = otel_torch.lockstep(reference, port, (ids,)).faults
    print(f"  {fault}")
    print(f"    reference {fault.reference.flatten()[:4].tolist()}")
    print(f"    port      {fault.port.flatten()[:4].tolist()}\n")

    print("list all faults; after each, the port continues from the reference's values:")
    print(indent(str(otel_torch.lockstep(reference, port, (ids,), heal=True)), "  "), "\n")

    print("with both bugs fixed:")
    port.first_position, port.scaled = 0, True
    print(indent(str(otel_torch.lockstep(reference, port, (ids,))), "  "))


if __name__ == "__main__":
    main()
