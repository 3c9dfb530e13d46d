"""`diff` on ports that compute every value right and hand one of them to the wrong place.

The place is the first use that differs, on each side in its own names: never the module that made
the value, whose output is right.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import otel_torch
from otel_torch import bootstrap
from tests.support import recording_to

WIDTH = 32

Tensor = torch.Tensor


# -- the reference: a decoder with normed queries and keys, cross-attention, experts and a skip
# --------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(WIDTH, WIDTH) for _ in range(4)
        )
        self.q_norm, self.k_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(context), self.v_proj(context)
        return self.o_proj(scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v))


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64)
        self.act_fn, self.down_proj = nn.SiLU(), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = nn.LayerNorm(WIDTH), Attention()
        self.cross_layernorm, self.cross_attn = nn.LayerNorm(WIDTH), Attention()
        self.mlp_layernorm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(GatedMLP() for _ in range(2))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        normed = self.input_layernorm(x)
        x = x + self.self_attn(normed, normed)
        x = x + self.cross_attn(self.cross_layernorm(x), context)
        normed = self.mlp_layernorm(x)
        weights = self.router(normed).softmax(-1)
        return x + sum(
            weights[..., i : i + 1] * expert(normed) for i, expert in enumerate(self.experts)
        )


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.context_embed = nn.Linear(8, WIDTH), nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(4))
        self.skip = nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        hidden, context = self.embed(x), self.context_embed(context)
        states = []
        for layer in self.layers:
            hidden = layer(hidden, context)
            states.append(hidden)
        hidden = self.skip(torch.cat([hidden, states[1]], -1))
        return self.lm_head(self.norm(hidden))


# -- the port: other names, functional activations, and a word that chooses the fault
# --------------------------------------------------------------------------------------------------


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm_q, self.norm_k = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.fault, self.projects_itself = "", False

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = self.to_q(x), self.to_k(context), self.to_v(context)
        if self.fault == "query and key exchanged":
            q, k = k, q
        if self.fault == "value used as key":
            k = v
        if self.fault == "query used as key":
            k = q
        q, k = self.norm_q(q), self.norm_k(k)
        if self.fault == "output projection of the value":
            return self.to_out(v)
        mixed = scaled_dot_product_attention(q, k, v)
        if self.projects_itself:
            return nn.functional.linear(mixed, self.to_out.weight, self.to_out.bias)
        return self.to_out(mixed)


class FusedAttend(nn.Module):
    """Self-attention with one projection for query, key and value."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        parts = attend.to_q, attend.to_k, attend.to_v
        self.to_qkv, self.to_out = nn.Linear(WIDTH, 3 * WIDTH), attend.to_out
        self.norm_q, self.norm_k = attend.norm_q, attend.norm_k
        with torch.no_grad():
            self.to_qkv.weight.copy_(torch.cat([part.weight for part in parts]))
            self.to_qkv.bias.copy_(torch.cat([part.bias for part in parts]))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).chunk(3, -1)
        return self.to_out(scaled_dot_product_attention(self.norm_q(q), self.norm_k(k), v))


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.act = nn.SiLU()
        self.fault = ""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w1(x), self.w3(x)
        if self.fault == "gate and up exchanged":
            gate, up = up, gate
        if self.fault == "activation left out":
            return self.w2(gate * up)
        return self.w2(self.act(gate) * up)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn1 = nn.LayerNorm(WIDTH), Attend()
        self.norm2, self.attn2 = nn.LayerNorm(WIDTH), Attend()
        self.norm3, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)
        self.ff = nn.ModuleList(Feed() for _ in range(2))
        self.fault = ""

    def forward(self, hidden: Tensor, encoded: Tensor) -> Tensor:
        fault, given = self.fault, hidden
        normed = self.norm1(hidden)
        residual = normed if fault == "residual after the norm" else hidden
        hidden = residual + self.attn1(normed, normed)
        queries = self.norm2(given if fault == "stale hidden state" else hidden)
        if fault == "branch without its norm":
            queries = hidden
        context = normed if fault == "context of the other branch" else encoded
        hidden = hidden + self.attn2(queries, context)
        normed = self.norm3(hidden)
        weights = self.gate(hidden if fault == "router before the norm" else normed).softmax(-1)
        given = hidden if fault == "expert before the norm" else normed
        return hidden + (
            weights[..., :1] * self.ff[0](given) + weights[..., 1:] * self.ff[1](normed)
        )


class Port(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.text = nn.Linear(8, WIDTH), nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.merge = nn.Linear(2 * WIDTH, WIDTH)
        self.final, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)
        self.fault = ""

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        first = hidden = self.stem(x)
        encoded = self.text(context)
        states = []
        for index, block in enumerate(self.blocks):
            is_stale = self.fault == "block fed with the input of the one before" and index == 2
            hidden = block(states[0] if is_stale else hidden, encoded)
            states.append(hidden)
        skip = states[2 if self.fault == "skip of another layer" else 1]
        parts = [hidden, first if self.fault == "skip of the embedding" else skip]
        if self.fault == "concatenated in another order":
            parts.reverse()
        hidden = self.merge(torch.cat(parts, -1))
        return self.out(hidden if self.fault == "final norm not used" else self.final(hidden))


NAMES = {
    "stem": "embed", "text": "context_embed", "merge": "skip", "final": "norm", "out": "lm_head",
}  # fmt: skip
BLOCK_NAMES = {
    "norm1": "input_layernorm", "norm2": "cross_layernorm", "norm3": "mlp_layernorm", "gate": "router",
}  # fmt: skip
ATTENTION_NAMES = {
    "to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "o_proj", "norm_q": "q_norm",
    "norm_k": "k_norm",
}  # fmt: skip
FEED_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def reference() -> Decoder:
    torch.manual_seed(3)
    model = Decoder().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # ones and zeros hide what goes wrong with them
                parameter.add_(0.2 * torch.randn(parameter.shape))
            else:
                parameter.mul_(2)
    return model


def port_of(model: Decoder) -> Port:
    port = Port().eval()
    _copy(port, model, NAMES)
    for block, layer in zip(port.blocks, model.layers, strict=True):
        _copy(block, layer, BLOCK_NAMES)
        _copy(block.attn1, layer.self_attn, ATTENTION_NAMES)
        _copy(block.attn2, layer.cross_attn, ATTENTION_NAMES)
        for feed, expert in zip(block.ff, layer.experts, strict=True):
            _copy(feed, expert, FEED_NAMES)
    return port


def _copy(target: nn.Module, source: nn.Module, names: dict[str, str]) -> None:
    for name, source_name in names.items():
        target.get_submodule(name).load_state_dict(source.get_submodule(source_name).state_dict())


def record(path: Path, model: nn.Module) -> Path:
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(2, 5, 8, generator=generator) for _ in range(2)]
    with recording_to(path):
        model(*inputs)
    return path


@pytest.fixture(scope="module", name="reference_recording")
def make_reference_recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("reference") / "reference.jsonl", reference())


# the port's module and its fault -> kind, then side, module and tensor in the reference and the port
FAULTS = {
    ("blocks.1.attn1", "query and key exchanged"):
        "value input layers.1.self_attn.q_norm in[0] input blocks.1.attn1.norm_q in[0]",
    ("blocks.1.attn1", "query used as key"):
        "value input layers.1.self_attn.k_norm in[0] input blocks.1.attn1.norm_k in[0]",
    ("blocks.1.attn2", "query and key exchanged"):
        "value input layers.1.cross_attn.q_norm in[0] input blocks.1.attn2.norm_q in[0]",
    ("blocks.1.attn2", "value used as key"):
        "value input layers.1.cross_attn.k_norm in[0] input blocks.1.attn2.norm_k in[0]",
    ("blocks.1.attn2", "output projection of the value"):
        "value input layers.1.cross_attn.o_proj in[0] input blocks.1.attn2.to_out in[0]",
    ("blocks.1.ff.1", "gate and up exchanged"):
        "value input layers.1.experts.1.act_fn in[0] input blocks.1.ff.1.act in[0]",
    ("blocks.1.ff.1", "activation left out"):
        "value input layers.1.experts.1.down_proj in[0] input blocks.1.ff.1.w2 in[0]",
    ("blocks.2", "residual after the norm"):
        "value input layers.2.cross_layernorm in[0] input blocks.2.norm2 in[0]",
    ("blocks.2", "stale hidden state"):
        "value input layers.2.cross_layernorm in[0] input blocks.2.norm2 in[0]",
    ("blocks.2", "branch without its norm"):
        "value input layers.2.cross_attn in[0] input blocks.2.attn2 in[0]",
    ("blocks.2", "context of the other branch"):
        "value input layers.2.cross_attn in[1] input blocks.2.attn2 in[1]",
    ("blocks.2", "router before the norm"):
        "value input layers.2.router in[0] input blocks.2.gate in[0]",
    ("blocks.2", "expert before the norm"):
        "value input layers.2.experts.0 in[0] input blocks.2.ff.0 in[0]",
    ("", "block fed with the input of the one before"):
        "value input layers.2 in[0] input blocks.2 in[0]",
    ("", "skip of another layer"): "value input skip in[0] input merge in[0]",
    ("", "skip of the embedding"): "value input skip in[0] input merge in[0]",
    ("", "concatenated in another order"): "layout input skip in[0] input merge in[0]",
}  # fmt: skip


def test_the_port_without_a_fault_matches(tmp_path: Path, reference_recording: Path) -> None:
    report = otel_torch.diff(
        reference_recording, record(tmp_path / "port.jsonl", port_of(reference()))
    )
    assert (report.verdict, report.introduced) == ("match", [])


@pytest.mark.parametrize("module, fault", FAULTS, ids=[" ".join(key).strip() for key in FAULTS])
def test_the_wrong_use_of_a_right_value_is_named(
    tmp_path: Path, reference_recording: Path, module: str, fault: str
) -> None:
    port = port_of(reference())
    port.get_submodule(module).fault = fault
    report = otel_torch.diff(reference_recording, record(tmp_path / "port.jsonl", port))
    first = report.first
    assert first is not None
    place = first.kind, first.side, first.module, first.tensor
    port_place = first.port_side, first.port_module, first.port_tensor
    assert " ".join(map(str, (*place, *port_place))) == FAULTS[module, fault]


@pytest.mark.parametrize(
    "module, fault, place",
    [
        ("blocks.2", "router before the norm", "input layers.2.router input blocks.2.gate"),
        (
            "blocks.1.attn1",
            "query used as key",
            "input layers.1.self_attn.k_norm input blocks.1.attn1.norm_k",
        ),
    ],
)
def test_a_module_whose_work_is_done_without_calling_it_is_not_missing(
    tmp_path: Path, reference_recording: Path, module: str, fault: str, place: str
) -> None:
    port = port_of(reference())
    for block in port.blocks:
        block.attn1.projects_itself = True
    clean = otel_torch.diff(reference_recording, record(tmp_path / "clean.jsonl", port))
    assert (clean.verdict, clean.introduced) == ("match", [])
    port.get_submodule(module).fault = fault
    first = otel_torch.diff(reference_recording, record(tmp_path / "port.jsonl", port)).first
    assert first is not None
    assert f"{first.side} {first.module} {first.port_side} {first.port_module}" == place


def test_a_fused_weight_with_its_parts_in_another_order_is_named(
    tmp_path: Path, reference_recording: Path
) -> None:
    port = port_of(reference())
    for block in port.blocks:
        block.attn1 = FusedAttend(block.attn1)
    clean = otel_torch.diff(reference_recording, record(tmp_path / "clean.jsonl", port))
    assert (clean.verdict, clean.introduced) == ("match", [])
    with torch.no_grad():
        for tensor in port.blocks[1].attn1.to_qkv.parameters():
            query, key, value = tensor.clone().chunk(3)
            tensor.copy_(torch.cat([key, query, value]))
    first = otel_torch.diff(reference_recording, record(tmp_path / "port.jsonl", port)).first
    assert first is not None
    assert (first.kind, first.side, first.module) == (
        "layout",
        "output",
        "layers.1.self_attn.q_proj",
    )
    assert (first.port_side, first.port_module) == ("output", "blocks.1.attn1.to_qkv")


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Chain(nn.Module):
    """Doubles the input and what each layer returns, in a module of that name or without it."""

    def __init__(self, *, all_in_module: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.twice, self.all_in_module = Twice(), all_in_module

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2 if self.all_in_module else self.twice(x)
        for layer in self.layers:
            x = self.twice(layer(x)) if self.all_in_module else layer(x) * 2
        return x


def test_calls_of_one_name_on_other_values_are_not_compared(tmp_path: Path) -> None:
    chains = [Chain(all_in_module=False), Chain(all_in_module=True)]
    chains[1].load_state_dict(chains[0].state_dict())
    paths = []
    for index, chain in enumerate(chains):
        assert bootstrap.start(jsonl=str(tmp_path / f"{index}.jsonl"), capture="parity")
        chain(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH))
        bootstrap.stop()
        paths.append(tmp_path / f"{index}.jsonl")
    report = otel_torch.diff(*paths)
    assert report.verdict == "match"
    assert all(pair.state == "right" for pair in report.compared)
