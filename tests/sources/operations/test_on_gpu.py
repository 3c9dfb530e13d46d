"""The graph of operations on a GPU: neutral, never waited for, and the one that a CPU has."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import otel_torch
from otel_torch import bootstrap
from tests.sources.operations.test_operation_recorder import record
from tests.support import recording

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "looped": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=False),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
}


class Block(nn.Module):
    """Attention and a gated network, each behind a norm."""

    def __init__(self, width: int = 64, heads: int = 4, scale: float = 1.0) -> None:
        super().__init__()
        self.heads, self.scale = heads, scale
        self.before, self.behind = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2)) * self.scale
        return x + self.down(F.gelu(self.up(self.behind(x))))


class Model(nn.Module):
    def __init__(self, dropout: float = 0.0, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Embedding(50, 64)
        self.blocks = nn.ModuleList(Block(scale=scale if index else 1.0) for index in range(2))
        self.dropout, self.last = nn.Dropout(dropout), nn.Linear(64, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(tokens)
        for block in self.blocks:
            x = block(x)
        return self.last(self.dropout(x))


TOKENS = torch.arange(32).reshape(2, 16) % 50


@contextmanager
def without_waiting() -> Iterator[None]:
    """Make every wait for the device an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def train(
    make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype, steps: int = 3
) -> list[Tensor]:
    """Train a model that draws random numbers; return its parameters and the next random numbers."""
    model = Model(dropout=0.3).to(DEVICE)
    optimizer, tokens = make(model.parameters()), TOKENS.to(DEVICE)
    torch.manual_seed(1)
    for _ in range(steps):
        with torch.autocast(DEVICE, dtype, enabled=dtype is not torch.float32):
            loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*model.parameters(), torch.rand(4, device=DEVICE), torch.rand(4)]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_training_is_the_same_to_the_bit(optimizer: str, dtype: torch.dtype) -> None:
    expected, state = train(OPTIMIZERS[optimizer], dtype), random.getstate()
    actual: list[Tensor] = []
    graph = record(lambda: actual.extend(train(OPTIMIZERS[optimizer], dtype)), steps="0-2")
    assert all(torch.equal(left, right) for left, right in zip(actual, expected, strict=True))
    assert random.getstate() == state
    assert not graph.fields(leaf="unseen")
    ends = [row for row in graph.fields() if row.get("end", "").startswith("param.")]
    assert len(ends) == 3 * len(list(Model().parameters()))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_the_device_is_not_waited_for_within_a_step(dtype: torch.dtype) -> None:
    model = Model().to(DEVICE, dtype)
    optimizer, tokens = OPTIMIZERS["foreach"](model.parameters()), TOKENS.to(DEVICE)

    def step() -> None:
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    step()
    with recording(capture="graph", steps="0-99"):
        with without_waiting():
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()


def test_no_memory_of_the_device_is_kept() -> None:
    model, tokens = Model().to(DEVICE), TOKENS.to(DEVICE)
    with torch.no_grad():
        model(tokens)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with recording(capture="graph", steps="0-99"), torch.no_grad():
        for _ in range(3):
            model(tokens)
        bootstrap.flush()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before + 2**21  # rows of numbers, sketch tables


def test_a_backward_operation_has_the_line_of_its_forward() -> None:
    """The threads of autograd are another one for each device."""
    model, tokens = Model().to(DEVICE), TOKENS.to(DEVICE)
    graph = record(lambda: model(tokens).sum().backward())
    lines = {
        graph.text(row, "forward_line").strip()
        for row in graph.fields(op="aten.gelu_backward.default")
    }
    assert lines == {"return x + self.down(F.gelu(self.up(self.behind(x))))"}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_fused_attention_is_broken_up(dtype: torch.dtype) -> None:
    model, tokens = Model().to(DEVICE, dtype), TOKENS.to(DEVICE)
    with torch.no_grad():
        graph = record(lambda: model(tokens))
    assert "aten._softmax" in graph.operations(), sorted(set(graph.operations()))


def on(device: str, model: Model) -> Callable[[Tensor], Tensor]:
    model.to(device)

    def run(tokens: Tensor) -> Tensor:
        return model(tokens.to(device)).cpu()

    return run


def test_a_port_on_a_gpu_is_compared_with_a_reference_on_a_cpu() -> None:
    with torch.no_grad():
        clean = otel_torch.bisect(on("cpu", Model()), on(DEVICE, Model()), TOKENS)
        assert (clean.verdict, clean.faults) == ("match", [])
        answer = otel_torch.bisect(on("cpu", Model()), on(DEVICE, Model(scale=0.9)), TOKENS)
    (fault,) = answer.faults
    assert fault.proof == "proven"
    assert fault.port_line.text.strip().endswith("* self.scale")


def test_a_port_in_another_dtype_is_compared() -> None:
    with torch.no_grad():
        answer = otel_torch.bisect(
            on(DEVICE, Model()), on(DEVICE, Model(scale=0.5).bfloat16()), TOKENS
        )
    (fault,) = answer.faults
    assert fault.port_line.text.strip().endswith("* self.scale")


def test_streams_do_not_mix_their_numbers() -> None:
    model, other = Model().to(DEVICE), torch.cuda.Stream()
    results: list[Tensor] = []

    def program() -> None:
        with torch.no_grad():
            hidden = model.first(TOKENS.to(DEVICE))
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                hidden = model.blocks[0](hidden)
            torch.cuda.current_stream().wait_stream(other)
            results.append(model.blocks[1](hidden))

    program()
    graph = record(program, steps="0-99")
    assert torch.equal(*results)
    means = [row["mean"] for row in graph.fields(op="aten.add.Tensor")]
    assert means[-1] == pytest.approx(results[0].double().mean().item(), rel=1e-6)


def test_a_replayed_graph_is_new_to_the_graph_of_operations() -> None:
    static, inner = torch.randn(4, 4, device=DEVICE), nn.Linear(4, 4).to(DEVICE)
    captured, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.no_grad():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            inner(static)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(captured):
            out = inner(static)

    class Replayed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            static.copy_(x)
            captured.replay()
            return out * 1

    x, net = torch.ones(4, 4, device=DEVICE), Replayed()
    with torch.no_grad():
        graph = record(lambda: [net(x), net(x * 2)], steps="0-1")
        wanted = [inner(x).double().mean().item(), inner(x * 2).double().mean().item()]
    means = [row["mean"] for row in graph.fields(op="aten.mul.Tensor")]
    assert [means[0], means[-1]] == pytest.approx(wanted, rel=1e-5)
    leaves = [row["mean"] for row in graph.fields() if "leaf" in row and row["name"] != "x"]
    assert leaves[:1] + leaves[-1:] == pytest.approx(wanted, rel=1e-5)


def test_a_sketch_leaves_out_what_is_not_finite() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.masked_fill(x > 0.5, -torch.inf)

    x = torch.linspace(-1, 1, 1000)
    rows = []
    for device in ("cpu", DEVICE):
        graph = record(lambda device=device: Masked()(x.to(device)))
        (row,) = graph.fields(op="aten.masked_fill.Scalar")
        rows.append({name: row[name] for name in ("nonfinite", "min", "sketch")})
    sketches = [np.frombuffer(base64.b64decode(row.pop("sketch")), np.float32) for row in rows]
    assert rows[0] == rows[1] and np.isfinite(sketches[1]).all()
    assert sketches[1] == pytest.approx(sketches[0], rel=1e-5, abs=1e-5)
