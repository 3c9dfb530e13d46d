"""Two steps of a small training, written in a legal way of many: forward, loss, backward, Adam.

What a forward saves is read again behind the loss, where everything is wrong if a gradient is.
"""

from __future__ import annotations

import numpy as np

from tests.graph.writer import Tensor, Writer

RATE, BETA1, BETA2, EPS, SCALE = 1e-2, 0.9, 0.99, 1e-6, 0.3
# ways to write it, one of each group
VARIANTS = (("after", "before"), ("product", "fused", "formula"), ("scaled", "plain"))
# fault -> lines at which an answer is right, in either step
FAULTS = {
    "gradient": ("backward1",),
    "reduction": ("loss",),
    "rate": ("adam",),
    "decay": ("adam",),
    "eps": ("adam",),
    "beta": ("adam",),
    "clip": ("clip", "adam"),
    "not_transposed": ("backward2",),
}


def write_training(writer: Writer, block, tokens: int, width: int) -> None:
    """Write two steps; the ends are the losses and the parameters."""
    random = np.random.default_rng(block.seed)

    def array(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (random.standard_normal(shape) * scale).astype(np.float32)

    weights = [
        writer.at("start").leaf(f"w{index}", array(width, width, scale=width**-0.5))
        for index in (0, 1)
    ]
    moments: list[tuple[Tensor, Tensor] | None] = [None, None]
    for step in (0, 1):
        data = [
            writer.at(f"{step}.data").leaf(f"{name}{step}", array(tokens, width), "input")
            for name in ("x", "target")
        ]
        loss, gradients = gradients_of(writer, block, step, weights, data)
        if block.fault == "clip":
            w = writer.at(f"{step}.clip")
            gradients = [w.op("mul.scalar", gradient, 0.5) for gradient in gradients]
        for index in (0, 1):
            weights[index], moments[index] = adam(
                writer, block, step, weights[index], gradients[index], moments[index]
            )
        writer.end(f"loss{step}", loss)
    for index, weight in enumerate(weights):
        writer.end(f"param.w{index}", weight)


def gradients_of(
    writer: Writer, block, step: int, weights: list[Tensor], data: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Return the loss and the gradients of both weights."""
    first, second = weights
    x, target = data
    before = "before" in block.variant
    w = writer.at(f"{step}.forward")
    h = w.op("mm", x, first)
    gate = None
    if "fused" in block.variant:
        a = w.op("silu", h)
    elif "formula" in block.variant:
        a = w.op("div", h, w.op("add.scalar", w.op("exp", w.op("neg", h)), 1.0))
    else:
        gate = w.op("sigmoid", h)
        a = w.op("mul", h, gate)
    left = w.op("mul.scalar", a, SCALE) if before else a
    y = w.op("mm", left, second)
    if not before:
        y = w.op("mul.scalar", y, SCALE)
    w = writer.at(f"{step}.loss")
    error = w.op("sub", y, target)
    square = w.op("mul", error, error)
    loss = w.op("mean", w.op("mean", square, 0), 1)
    count = 1 if block.fault == "reduction" else error.array.size
    dy = w.op("mul.scalar", error, 2 / count)
    w = writer.at(f"{step}.backward2")
    if not before:
        dy = w.op("mul.scalar", dy, SCALE)
    d_second = w.op("mm", w.op("transpose", left, (1, 0)), dy)
    turned = second if block.fault == "not_transposed" else w.op("transpose", second, (1, 0))
    da = w.op("mm", dy, turned)
    if before:
        da = w.op("mul.scalar", da, SCALE)
    w = writer.at(f"{step}.backward1")
    if "fused" in block.variant:
        dh = w.op("silu_backward", da, h)
    else:
        gate = gate or w.op("sigmoid", h)
        slope = w.op("add.scalar", w.op("mul", h, w.op("add.scalar", w.op("neg", gate), 1.0)), 1.0)
        dh = w.op("mul", da, w.op("mul", gate, slope))
    if block.fault == "gradient":
        dh = w.op("mul.scalar", dh, 0.8)
    d_first = w.op("mm", w.op("transpose", x, (1, 0)), dh)
    return loss, [d_first, d_second]


def adam(
    writer: Writer,
    block,
    step: int,
    weight: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the weight after a step, and its moments."""
    w = writer.at(f"{step}.adam")
    rate = RATE * (0.5 if block.fault == "rate" and step else 1.0)
    beta = 0.8 if block.fault == "beta" else BETA1
    eps = 1e-2 if block.fault == "eps" else EPS
    first = w.op("mul.scalar", gradient, 1 - beta)
    second = w.op("mul.scalar", w.op("mul", gradient, gradient), 1 - BETA2)
    if moments is not None:
        first = w.op("add", w.op("mul.scalar", moments[0], beta), first)
        second = w.op("add", w.op("mul.scalar", moments[1], BETA2), second)
    corrections = 1 - beta ** (step + 1), 1 - BETA2 ** (step + 1)
    root = w.op("sqrt", w.op("mul.scalar", second, 1 / corrections[1]))
    update = w.op("div", first, w.op("add.scalar", root, eps))
    if block.fault == "decay":
        weight = w.op("mul.scalar", weight, 0.99)
    factor = rate / corrections[0]
    return w.op("sub", weight, w.op("mul.scalar", update, factor)), (first, second)
