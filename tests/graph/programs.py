"""Random small programs, written in a legal way of many, with no fault or one at a known place.

A program is a list of blocks. Each block writes the same function in one of several ways, and knows
how to be wrong: each of its faults names the lines (the block's number and a word) at which an
answer is right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from otel_torch.graph.graph import Graph
from tests.graph.trainings import FAULTS, VARIANTS, write_training
from tests.graph.writer import Tensor, Writer

T = TypeVar("T")
Choose = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a program.

    Attributes:
        kind: Key of `KINDS`.
        seed: Of its parameters.
        variant: How it is written, by choice.
        fault: What is wrong with it, "" for nothing.
    """

    kind: str
    seed: int
    variant: tuple[str, ...] = ()
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Spec:
    """A program.

    Attributes:
        tokens, width: Shape of its input.
        blocks: In order.
        dtype: What its values are rounded to.
        dead_code: It computes something that nobody uses.
        seed: Of its input.
    """

    tokens: int
    width: int
    blocks: tuple[Block, ...]
    dtype: str = "float32"
    dead_code: bool = False
    seed: int = 0
    file: str = "reference.py"
    noise: int | None = None


@dataclass(slots=True)
class Scope:
    """What a block's function gets: where to write, what to choose."""

    writer: Writer
    spec: Spec
    number: int
    block: Block
    random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.block.seed)

    def at(self, word: str) -> Writer:
        """Set the line, within this block, of the statements that follow."""
        return self.writer.at(f"{self.number}.{word}")

    def parameter(self, name: str, *shape: int, scale: float = 1.0, offset: float = 0.0) -> Tensor:
        """Return a parameter of this block."""
        array = self.random.standard_normal(shape) * scale + offset
        return self.writer.leaf(f"{self.number}.{name}", array.astype(np.float32))

    def array(self, *shape: int, scale: float = 1.0, offset: float = 0.0) -> np.ndarray:
        """Return the content of a parameter that is written in another way."""
        return (self.random.standard_normal(shape) * scale + offset).astype(np.float32)

    def has(self, word: str) -> bool:
        """Return whether the block is written in this way."""
        return word in self.block.variant

    def fails(self, fault: str) -> bool:
        """Return whether the block has this fault."""
        return self.block.fault == fault


# -- blocks: (scope, x) -> y, each of the shape (tokens, width)


def linear(scope: Scope, x: Tensor) -> Tensor:
    width = scope.spec.width
    weight = scope.array(width, width, scale=width**-0.5)
    bias = scope.array(width)
    other = scope.array(width, width, scale=width**-0.5)
    w = scope.at("linear")
    if scope.fails("weight"):
        weight = weight.copy()
        weight[:, 0] *= 1.5
    name = f"{scope.number}."
    if scope.fails("other_weight"):
        wt = w.leaf(name + "other", other)
    elif scope.has("turned_weight"):
        wt = w.op("transpose", w.leaf(name + "weight", weight.T.copy()), (1, 0))
    else:
        wt = w.leaf(name + "weight", weight)
    if scope.fails("turned"):
        wt = w.op("transpose", wt, (1, 0))
    b = w.leaf(name + "bias", bias)
    if scope.fails("no_bias"):
        y = w.op("mm", x, wt)
    elif scope.has("split"):
        half = width // 2
        parts = [(0, half), (half, width)]
        made = [
            w.op("addmm", w.op("slice", b, 0, i, j), x, w.op("slice", wt, 1, i, j))
            for i, j in parts
        ]
        y = w.op("cat", *made, 1)
    elif scope.has("fused"):
        y = w.op("addmm", b, x, wt)
    else:
        y = w.op("add", w.op("mm", x, wt), b)
    # both programs hold the other weight; only a fault uses it here
    z = w.at(f"{scope.number}.second").op("mm", y, w.leaf(name + "other", other))
    return scope.at("add").op("add", y, w.op("tanh", z))


def norm(scope: Scope, x: Tensor) -> Tensor:
    weight = scope.parameter("weight", scope.spec.width, scale=0.2, offset=1.0)
    eps = 0.3 if scope.fails("eps") else 0.1
    if scope.fails("small_eps"):
        eps = 0.100001
    w = scope.at("norm")
    if scope.has("fused"):
        if scope.fails("no_weight"):
            weight = w.leaf("ones", np.ones(scope.spec.width, np.float32), "constant")
        return w.op("rms_norm", x, weight, eps)
    if scope.has("fused_inside"):
        return fused_norm(scope, x, weight, eps)
    return plain_norm(scope, x, weight, eps)


def plain_norm(scope: Scope, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    w = scope.at("norm")
    if scope.has("power"):
        mean = w.op("mul.scalar", w.op("sum", w.op("mul", x, x), -1), 1 / scope.spec.width)
    else:
        mean = w.op("mean", w.op("square", x), -1)
    if scope.fails("sum"):
        mean = w.op("sum", w.op("square", x), -1)
    shifted = w.op("add.scalar", mean, eps)
    if scope.has("divide"):
        y = w.op("div", x, w.op("sqrt", shifted))
    elif scope.has("weight_first") and not scope.fails("no_weight"):
        return w.op("mul", x, w.op("mul", w.op("rsqrt", shifted), weight))
    else:
        y = w.op("mul", x, w.op("rsqrt", shifted))
    if scope.fails("no_weight"):
        return y
    return w.op("mul", weight, y) if scope.has("exchanged") else w.op("mul", y, weight)


def fused_norm(scope: Scope, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Write the fused operation with its parts inside."""
    w = scope.at("norm")
    if scope.fails("no_weight"):
        weight = w.leaf("ones", np.ones(scope.spec.width, np.float32), "constant")
    whole = w.op("rms_norm", x, weight, eps)
    w.inside = w.builder.node_count - 1
    plain = replace(scope.block, fault="" if scope.fails("no_weight") else scope.block.fault)
    plain_norm(Scope(w, scope.spec, scope.number, plain), x, weight, eps)
    w.inside = -1
    return whole


def activation(scope: Scope, x: Tensor) -> Tensor:
    w = scope.at("activation")
    if scope.fails("relu"):
        return w.op("relu", x)
    if scope.fails("tanh"):
        return w.op("mul", x, w.op("tanh", x))
    if scope.has("formula"):
        return w.op("div", x, w.op("add.scalar", w.op("exp", w.op("neg", x)), 1.0))
    if scope.has("fused"):
        return w.op("silu", x)
    return w.op("mul", x, w.op("sigmoid", x))


def gate(scope: Scope, x: Tensor) -> Tensor:
    """x + gate * f(x): a residual with a gate."""
    width = scope.spec.width
    weight = scope.parameter("weight", width, width, scale=width**-0.5)
    factor = scope.parameter("gate", width, scale=0.5, offset=0.5)
    w = scope.at("inner")
    y = w.op("mm", x, weight)
    if scope.has("long"):
        y = w.op("mul", y, w.op("sigmoid", y))
    else:
        y = w.op("silu", y)
    w = scope.at("residual")
    if scope.fails("no_residual"):
        return w.op("mul", y, factor)
    if scope.fails("no_gate"):
        return w.op("add", x, y)
    if scope.fails("minus"):
        return w.op("sub", x, w.op("mul", y, factor))
    if scope.has("fused"):
        return w.op("addcmul", x, y, factor)
    scaled = w.op("mul", factor, y) if scope.has("exchanged") else w.op("mul", y, factor)
    return w.op("add", scaled, x) if scope.has("exchanged") else w.op("add", x, scaled)


def modulation(scope: Scope, x: Tensor) -> Tensor:
    """x * (1 + scale) + shift."""
    width = scope.spec.width
    condition = scope.parameter("condition", 1, width)
    weight = scope.parameter("weight", width, 2 * width, scale=width**-0.5)
    w = scope.at("chunk")
    both = w.op("mm", condition, weight)
    order = (1, 0) if scope.fails("exchanged_chunks") else (0, 1)
    chunks = [w.op("slice", both, 1, place * width, (place + 1) * width) for place in order]
    scale, shift = chunks
    w = scope.at("modulate")
    if scope.fails("no_one"):
        return w.op("add", w.op("mul", x, scale), shift)
    if scope.has("long"):
        return w.op("add", w.op("add", x, w.op("mul", x, scale)), shift)
    factor = w.op("add.scalar", scale, 1.0)
    if scope.has("fused"):
        return w.op("addcmul", shift, x, factor)
    return w.op("add", w.op("mul", x, factor), shift)


def attention(scope: Scope, x: Tensor) -> Tensor:
    width, heads = scope.spec.width, 2
    weights = [scope.array(width, width, scale=2 * width**-0.5) for _ in range(3)]
    size = width // heads
    number = size**-0.5
    if scope.fails("scale"):
        number = 1.0 / size
    w = scope.at("project")
    name = f"{scope.number}."
    if scope.fails("exchanged_qk"):
        weights = [weights[1], weights[0], weights[2]]
    if scope.has("fused_qkv"):
        whole = w.op("mm", x, w.leaf(name + "qkv", np.concatenate(weights, 1)))
        starts = [0, width, 2 * width - (1 if scope.fails("value_part") else 0)]
        w = scope.at("split")
        q, k, v = (w.op("slice", whole, 1, start, start + width) for start in starts)
    else:
        words = "kqv" if scope.fails("exchanged_qk") else "qkv"
        leaves = [w.leaf(name + word, array) for word, array in zip(words, weights, strict=True)]
        q, k, v = (w.op("mm", x, leaf) for leaf in leaves)
        if scope.fails("value_part"):
            v = scope.at("split").op("roll", v, 1, 1)
    if scope.has("listed_heads"):
        mixed = listed_heads(scope, q, k, v, number)
    else:
        mixed = batched_heads(scope, q, k, v, number)
    out = scope.parameter("out", width, width, scale=width**-0.5)
    y = scope.at("out").op("mm", mixed, out)
    return scope.at("residual").op("add", x, y)


def mask_of(scope: Scope) -> Tensor:
    """Return which keys each query sees: its past, within a window."""
    tokens = scope.spec.tokens
    w = scope.at("mask")
    window = 3 if scope.fails("window") else 2
    positions = w.leaf("positions", np.arange(tokens), "constant")
    queries = w.op("reshape", positions, (tokens, 1))
    keys = w.op("reshape", positions, (1, tokens))
    past = w.op("le", keys, queries)
    if scope.fails("no_window"):
        return past
    if scope.has("other_mask"):
        near = w.op("gt", w.op("add.int", keys, window), queries)
    else:
        near = w.op("gt", keys, w.op("sub.scalar", queries, window))
    return w.op("logical_and", past, near)


def additive_mask(scope: Scope, visible: Tensor) -> Tensor:
    tokens = scope.spec.tokens
    w = scope.at("mask")
    zeros = w.leaf("zeros", np.zeros((tokens, tokens), np.float32), "constant")
    return w.op("where", visible, zeros, -1e9)


def masked_softmax(scope: Scope, scores: Tensor, visible: Tensor) -> Tensor:
    if scope.has("additive"):
        bias = additive_mask(scope, visible)
        return scope.at("softmax").op("softmax", scope.writer.op("add", scores, bias))
    masked = scope.at("softmax").op("where", visible, scores, -1e9)
    return scope.writer.op("softmax", masked)


def batched_heads(scope: Scope, q: Tensor, k: Tensor, v: Tensor, number: float) -> Tensor:
    width, tokens, heads = scope.spec.width, scope.spec.tokens, 2
    size = width // heads
    w = scope.at("heads")

    def split(y: Tensor) -> Tensor:
        if scope.fails("head_order"):
            return w.op("transpose", w.op("reshape", y, (tokens, size, heads)), (2, 0, 1))
        return w.op("transpose", w.op("reshape", y, (tokens, heads, size)), (1, 0, 2))

    q, k, v = split(q), split(k), split(v)
    visible = mask_of(scope)
    if scope.has("fused"):
        bias = additive_mask(scope, visible)
        mixed = scope.at("scores").op("sdpa", q, k, v, bias, number)
    else:
        w = scope.at("scores")
        if scope.has("scale_first"):
            q = w.op("mul.scalar", q, number)
        scores = w.op("mm", q, w.op("transpose", k, (0, 2, 1)))
        if not scope.has("scale_first"):
            scores = w.op("mul.scalar", scores, number)
        weights = masked_softmax(scope, scores, visible)
        mixed = scope.at("mix").op("mm", weights, v)
    w = scope.at("merge")
    if scope.fails("merge_order"):
        return w.op("reshape", mixed, (tokens, width))
    return w.op("reshape", w.op("transpose", mixed, (1, 0, 2)), (tokens, width))


def listed_heads(scope: Scope, q: Tensor, k: Tensor, v: Tensor, number: float) -> Tensor:
    """Compute head after head."""
    width, heads = scope.spec.width, 2
    size = width // heads
    visible = mask_of(scope)
    made = []
    for head in range(heads):
        w = scope.at("heads")
        parts = []
        for y in (q, k, v):
            if scope.fails("head_order"):
                y = w.op("reshape", y, (scope.spec.tokens, size, heads))
                y = w.op("reshape", w.op("slice", y, 2, head, head + 1), (scope.spec.tokens, size))
            else:
                y = w.op("slice", y, 1, head * size, (head + 1) * size)
            parts.append(y)
        w = scope.at("scores")
        first = w.op("mul.scalar", parts[0], number) if scope.has("scale_first") else parts[0]
        scores = w.op("mm", first, w.op("transpose", parts[1], (1, 0)))
        if not scope.has("scale_first"):
            scores = w.op("mul.scalar", scores, number)
        weights = masked_softmax(scope, scores, visible)
        made.append(scope.at("mix").op("mm", weights, parts[2]))
    w = scope.at("merge")
    if scope.fails("merge_order"):
        stacked = w.op("cat", *made, 0)
        return w.op("reshape", stacked, (scope.spec.tokens, width))
    return w.op("cat", *made, 1)


def rotation(scope: Scope, x: Tensor) -> Tensor:
    """Rotate the halves of each token by its position."""
    width, tokens = scope.spec.width, scope.spec.tokens
    half = width // 2
    base = 50.0 if scope.fails("base") else 100.0
    angles = np.arange(1, tokens + 1)[:, None] * base ** -(np.arange(half) / half)
    w = scope.at("angles")
    tables = [np.cos(angles), np.sin(angles)]
    if scope.fails("exchanged_tables"):
        tables.reverse()
    cos, sin = (
        w.leaf(f"{scope.number}.{name}", table.astype(np.float32), "buffer")
        for name, table in zip(("cos", "sin"), tables, strict=True)
    )
    w = scope.at("rotate")
    first, second = w.op("slice", x, 1, 0, half), w.op("slice", x, 1, half, width)
    if scope.fails("exchanged_halves"):
        first, second = second, first
    if scope.has("whole"):
        cos2, sin2 = w.op("cat", cos, cos, 1), w.op("cat", sin, sin, 1)
        turned = w.op("cat", second if scope.fails("sign") else w.op("neg", second), first, 1)
        whole = w.op("cat", first, second, 1)
        return w.op("add", w.op("mul", whole, cos2), w.op("mul", turned, sin2))
    sign = "add" if scope.fails("sign") else "sub"
    left = w.op(sign, w.op("mul", first, cos), w.op("mul", second, sin))
    right = w.op("add", w.op("mul", second, cos), w.op("mul", first, sin))
    return w.op("cat", left, right, 1)


def mixer(scope: Scope, x: Tensor) -> Tensor:
    """Mix tokens: a linear layer across the other axis."""
    tokens, width = scope.spec.tokens, scope.spec.width
    weight = scope.parameter("weight", tokens, tokens, scale=tokens**-0.5)
    w = scope.at("mix")
    if scope.fails("shifted"):
        x = w.op("roll", x, 1, 0)
    if scope.has("turned"):
        turned = w.op("transpose", x, (1, 0))
        y = w.op("mm", turned, w.op("transpose", weight, (1, 0)))
        y = w.op("transpose", y, (1, 0))
    elif scope.has("batched"):
        half = width // 2
        halves = [w.op("slice", x, 1, start, start + half) for start in (0, half)]
        y = w.op("cat", *(w.op("mm", weight, part) for part in halves), 1)
    else:
        y = w.op("mm", weight, x)
    if scope.fails("order"):
        y = w.op("roll", y, 1, 0)
    return scope.at("add").op("add", w.op("tanh", y), x)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of block: ways to write it (one of each group), faults with the lines that are right."""

    write: Callable[[Scope, Tensor], Tensor]
    variants: tuple[tuple[str, ...], ...]
    faults: dict[str, tuple[str, ...]]


KINDS: dict[str, Kind] = {
    "linear": Kind(
        linear,
        (("plain", "fused", "split"), ("", "turned_weight")),
        {
            "weight": ("linear",),
            "other_weight": ("linear",),
            "turned": ("linear",),
            "no_bias": ("linear",),
        },
    ),
    "norm": Kind(
        norm,
        (
            ("plain", "fused", "fused_inside", "divide", "weight_first", "exchanged"),
            ("", "power"),
        ),
        {"eps": ("norm",), "no_weight": ("norm",)},
    ),
    "activation": Kind(
        activation,
        (("plain", "formula", "fused"),),
        {"relu": ("activation",), "tanh": ("activation",)},
    ),
    "gate": Kind(
        gate,
        (("plain", "fused", "exchanged"), ("", "long")),
        {"no_residual": ("residual",), "no_gate": ("residual",), "minus": ("residual",)},
    ),
    "modulation": Kind(
        modulation,
        (("plain", "fused", "long"),),
        {"exchanged_chunks": ("chunk", "modulate"), "no_one": ("modulate",)},
    ),
    "attention": Kind(
        attention,
        (
            ("", "fused_qkv"),
            ("batched", "listed_heads", "fused"),
            ("", "scale_first"),
            ("", "additive"),
            ("", "other_mask"),
        ),
        {
            "scale": ("scores",),
            "exchanged_qk": ("project", "scores"),
            "window": ("mask",),
            "no_window": ("mask",),
            "head_order": ("heads",),
            "merge_order": ("merge",),
            "value_part": ("split",),
        },
    ),
    "rotation": Kind(
        rotation,
        (("", "whole"),),
        {
            "base": ("angles", "rotate"),
            "exchanged_tables": ("angles", "rotate"),
            "exchanged_halves": ("rotate",),
            "sign": ("rotate",),
        },
    ),
    "mixer": Kind(
        mixer,
        (("plain", "turned", "batched"),),
        {"shifted": ("mix",), "order": ("mix", "add")},
    ),
}


def write_program(spec: Spec) -> Graph:
    """Return the graph of a program, computed."""
    return compute_program(spec)[0]


def compute_program(
    spec: Spec, put: dict[int, np.ndarray] | None = None
) -> tuple[Graph, list[np.ndarray]]:
    """Return the graph of a program and all its values.

    Args:
        put: What values are to be instead, by their numbers.
    """
    writer = Writer(spec.dtype, spec.file, spec.noise, put or {})
    if spec.blocks[0].kind == "training":
        write_training(writer, spec.blocks[0], spec.tokens, spec.width)
        return writer.finish(), writer.arrays
    array = np.random.default_rng(spec.seed).standard_normal((spec.tokens, spec.width))
    x = writer.at("input").leaf("x", array.astype(np.float32), "input")
    for number, block in enumerate(spec.blocks):
        x = KINDS[block.kind].write(Scope(writer, spec, number, block), x)
        if spec.dead_code:
            writer.at(f"{number}.dead").op("exp", writer.op("neg", writer.op("tanh", x)))
    writer.end("out", x)
    return writer.finish(), writer.arrays


# -- cases


@dataclass(frozen=True, slots=True)
class Case:
    """Two programs, and the lines of the fault if there is one."""

    reference: Spec
    port: Spec
    lines: frozenset[str]

    @property
    def fault(self) -> str:
        """The fault's name, "" for a clean case."""
        return next((f"{b.kind}.{b.fault}" for b in self.port.blocks if b.fault), "")


def draw_case(choose: Choose, faulty: bool, dtype: str = "float32") -> Case:
    """Draw a case.

    Args:
        choose: Returns one of some items; the first is the simplest.
        faulty: Whether the port has a fault.
        dtype: Of the port.
    """
    if choose([False] * 5 + [True]):
        return draw_training(choose, faulty, dtype)
    count = choose([1, 2, 3, 4])
    kinds = list(KINDS)
    blocks = [Block(choose(kinds), number + 10 * choose(range(50))) for number in range(count)]
    width, tokens = choose([8, 12]), choose([4, 5, 6])

    def written(block: Block) -> Block:
        return replace(block, variant=tuple(choose(group) for group in KINDS[block.kind].variants))

    reference = Spec(tokens, width, tuple(map(written, blocks)), seed=choose(range(50)))
    port = replace(
        reference,
        blocks=tuple(map(written, blocks)),
        dead_code=choose([False, True]),
        file="port.py",
        dtype=dtype,
    )
    if not faulty:
        return Case(reference, port, frozenset())
    place = choose(range(count))
    faults = KINDS[port.blocks[place].kind].faults
    name = choose(list(faults))
    wrong = list(port.blocks)
    wrong[place] = replace(wrong[place], fault=name)
    lines = frozenset(f"{place}.{word}" for word in faults[name])
    return Case(reference, replace(port, blocks=tuple(wrong)), lines)


def draw_training(choose: Choose, faulty: bool, dtype: str) -> Case:
    """Draw a case of two steps of a training."""
    seed, tokens, width = choose(range(500)), choose([4, 5, 6]), choose([8, 12])

    def written(fault: str) -> tuple[Block, ...]:
        return (Block("training", seed, tuple(choose(group) for group in VARIANTS), fault),)

    reference = Spec(tokens, width, written(""))
    name = choose(list(FAULTS)) if faulty else ""
    port = replace(reference, blocks=written(name), file="port.py", dtype=dtype)
    words = FAULTS.get(name, ())
    return Case(reference, port, frozenset(f"{step}.{word}" for step in (0, 1) for word in words))
