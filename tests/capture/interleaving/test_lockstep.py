"""A reference and its port in lockstep: the first fault with its tensors, or all independent ones in
a single run.
"""

import copy
import gc

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import otel_torch
from otel_torch import lockstep
from otel_torch.capture.interleaving.interleaved_model import InterleavedModel
from otel_torch.capture.interleaving.interleaved_run import InterleavedRun
from otel_torch.capture.interleaving.lockstep import Lockstep, _LockstepComparison
from otel_torch.capture.interleaving.lockstep_events import PairedEvent, TensorLocation
from otel_torch.parity.tolerance import Tolerance
from tests.support import recording


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(torch.softmax(self.q(x) @ self.k(x).mT / 4, -1) @ self.v(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(16), Attention()
        self.norm2, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Reference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class PortBlock(nn.Module):
    """The same model with other names, and optional faults."""

    def __init__(self) -> None:
        super().__init__()
        self.pre, self.post = nn.LayerNorm(16), nn.LayerNorm(16)
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)
        self.faults: set[str] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.pre(x)
        scale = 3 if "scale" in self.faults else 4
        h = torch.softmax(self.query(h) @ self.key(h).mT / scale, -1) @ self.value(h)
        x = x + self.out(h)
        h = self.fc1(self.post(x))
        return x + self.fc2(
            nn.functional.gelu(h, approximate="tanh")
            if "gelu" in self.faults
            else nn.functional.gelu(h)
        )


class Port(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(8, 16)
        self.layers = nn.ModuleList(PortBlock() for _ in range(3))
        self.final, self.proj = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x)
        for layer in self.layers:
            x = layer(x)
        return self.proj(self.final(x))


RENAMED = {
    "embed": "patch", "blocks": "layers", "norm1": "pre", "norm2": "post", "attn.q": "query", "attn.k": "key", "attn.v": "value",
    "attn.o": "out", "up": "fc1", "down": "fc2", "norm": "final", "head": "proj",
}  # fmt: skip
X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


def pair() -> tuple[Reference, Port]:
    torch.manual_seed(0)
    reference, port = Reference().eval(), Port().eval()
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=0.3)
    state = {}
    for name, value in reference.state_dict().items():
        for old, new in RENAMED.items():
            name = (
                ".".join(name.split(".")).replace(f"{old}.", f"{new}.")
                if f".{old}." in f".{name}"
                else name
            )
        state[name] = value
    port.load_state_dict(state)
    return reference, port


def test_a_clean_port_has_no_fault() -> None:
    reference, port = pair()
    outcome = lockstep(reference, port, X)
    assert (
        outcome.faults == []
        and outcome.compared > 40
        and torch.allclose(outcome.result, reference(X), atol=1e-5)
    )
    assert str(outcome).startswith("no fault\n")


def test_it_stops_at_the_first_fault_with_both_tensors() -> None:
    reference, port = pair()
    port.layers[1].faults.add("scale")
    (fault,) = lockstep(reference, port, X).faults
    # the input of the projection is wrong: the code between the modules computed it
    assert (fault.module, fault.tensor, fault.kind, fault.reference_module) == (
        "layers.1.out",
        "in[0]",
        "input",
        "blocks.1.attn.o",
    )
    assert fault.error > 100 * fault.limit and fault.reference.shape == fault.port.shape == (
        2,
        5,
        16,
    )
    seen = []
    reference.blocks[1].attn.o.register_forward_hook(
        lambda module, inputs, output: seen.append(inputs[0])
    )
    reference(X)
    assert torch.allclose(fault.reference, seen[0], atol=1e-5)
    assert (
        "layers.1.out (blocks.1.attn.o of the reference), in[0], call 0: computed by code before this module"
        in str(fault)
    )


def test_healed_it_lists_every_independent_fault_once() -> None:
    reference, port = pair()
    port.layers[0].faults.add("gelu")
    port.layers[2].faults.add("scale")
    with torch.no_grad():
        port.final.bias += 0.1
    exact = reference(X)
    outcome = lockstep(reference, port, {"x": X}, heal=True)
    assert [(fault.module, fault.kind) for fault in outcome.faults] == [
        ("layers.0.fc2", "input"), ("layers.2.out", "input"), ("final", "output"),
    ]  # fmt: skip
    assert torch.allclose(outcome.result, exact, atol=1e-5)


class FusedAttention(nn.Module):
    """Attention with its three projections in one."""

    def __init__(self, whole: Attention) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(16, 48), whole.o
        parts = [whole.q, whole.k, whole.v]
        with torch.no_grad():
            self.qkv.weight.copy_(torch.cat([part.weight for part in parts]))
            self.qkv.bias.copy_(torch.cat([part.bias for part in parts]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.o(torch.softmax(q @ k.mT / 4, -1) @ v)


def test_a_fault_in_a_fused_projection_lists_the_modules_that_were_not_compared() -> None:
    reference, _ = pair()
    port = copy.deepcopy(reference)
    for block in port.blocks:
        block.attn = FusedAttention(block.attn)
    assert lockstep(reference, port, X).faults == []
    with torch.no_grad():
        port.blocks[1].attn.qkv.weight[20] *= 1.5
        port.blocks[2].up.weight[3] *= 1.5
    fused, plain = lockstep(reference, port, X, heal=True).faults
    assert (fused.module, fused.kind, fused.unmet) == (
        "blocks.1.attn.o",
        "input",
        ["blocks.1.attn.qkv"],
    )
    assert str(fused).endswith("; not compared since the last match: blocks.1.attn.qkv")
    assert (plain.module, plain.kind, plain.unmet) == ("blocks.2.up", "output", [])


def test_a_port_may_take_other_inputs() -> None:
    reference, port = pair()
    outcome = lockstep(reference, port, (X,), port_inputs=lambda model: model(x=X.clone()))
    assert outcome.faults == []


def test_a_tensor_of_the_reference_may_correspond_to_distant_ones_of_the_port() -> None:
    reference = nn.Sequential(*[nn.Identity() for _ in range(12)])
    port = nn.Sequential(*[nn.Identity() for _ in range(12)])
    # the output of the reference's first module is that of the port's first and last
    modules = [("0" if index in (0, 11) else str(index)) for index in range(12)]
    events = [
        PairedEvent(str(i), "output", 0, {"out": TensorLocation(module, "output", 0, "out")}, [])
        for i, module in enumerate(modules)
    ]
    runs = [InterleavedRun(InterleavedModel(model), model, (X,), {}) for model in (reference, port)]
    outcome = _LockstepComparison(Tolerance(), True, Lockstep()).run(*runs, events)
    assert outcome.faults == [] and outcome.compared == 12


def test_a_real_model_and_a_planted_bug() -> None:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=3, n_head=2, n_embd=32, vocab_size=50)
    reference = GPT2LMHeadModel(config).eval()
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=0.2)
    port = GPT2LMHeadModel(config).eval()
    port.load_state_dict(reference.state_dict())
    port.transformer.h[1].mlp.act = nn.GELU()
    outcome = lockstep(reference, port, {"input_ids": torch.tensor([[1, 2, 3, 4]])}, heal=True)
    assert [fault.module for fault in outcome.faults][:1] == ["transformer.h.1.mlp.act"]
    assert len({fault.module.split(".")[2] for fault in outcome.faults}) == 1


def test_errors_are_clear() -> None:
    reference, port = pair()
    with pytest.raises(ValueError, match="nothing "):
        lockstep(
            reference, nn.Sequential(nn.Linear(3, 3), nn.Tanh()), X, port_inputs=torch.ones(2, 3)
        )
    with recording(), pytest.raises(RuntimeError, match=r"call otel_torch\.stop\(\) first"):
        lockstep(reference, port, X)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        lockstep(reference, port, torch.ones(2, 5))


def test_no_hook_remains_and_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    reference, port = pair()
    for _ in range(3):
        lockstep(reference, port, X)
    assert capsys.readouterr().err == ""
    gc.collect()
    for module in (*reference.modules(), *port.modules()):
        assert not (module._forward_hooks or module._forward_pre_hooks)
        assert otel_torch.ModuleHookManager.get_from(module) is None
