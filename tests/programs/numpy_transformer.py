"""A transformer in NumPy, as a reference that is not torch: names, kernels and layers as in JAX.

`run()` returns every tensor in the order of execution, under the names by which it would be dumped.
"""

from __future__ import annotations

from math import erf
from typing import Any

import numpy as np

WIDTH, HEADS, LAYERS, CLASSES = 32, 4, 3, 10
Arrays = dict[str, Any]

_random = np.random.default_rng(0)
inputs = _random.normal(0, 1, (2, 8, WIDTH)).astype(np.float32)


def _dense(inputs: int, outputs: int) -> Arrays:
    kernel = _random.normal(0, inputs**-0.5, (inputs, outputs)).astype(np.float32)
    return {"kernel": kernel, "bias": _random.normal(0, 0.1, outputs).astype(np.float32)}


def _norm() -> Arrays:
    scale, bias = _random.normal(0, 0.1, (2, WIDTH)).astype(np.float32)
    return {"scale": 1 + scale, "bias": bias}


params: Arrays = {"head": _dense(WIDTH, CLASSES)}
for _layer in range(LAYERS):
    for _name in ("query", "key", "value", "out"):
        params[f"layers_{_layer}/attention/{_name}"] = _dense(WIDTH, WIDTH)
    params[f"layers_{_layer}/ln_1"], params[f"layers_{_layer}/ln_2"] = _norm(), _norm()
    params[f"layers_{_layer}/mlp/wi"] = _dense(WIDTH, 4 * WIDTH)
    params[f"layers_{_layer}/mlp/wo"] = _dense(4 * WIDTH, WIDTH)


def run(x: Any = inputs) -> Arrays:
    """Return all tensors of one forward, the input as `:in[0]` and the output as `:out`."""
    tensors: Arrays = {":in[0]": x}

    def dense(name: str, x: Any) -> Any:
        return keep(name, x @ params[name]["kernel"] + params[name]["bias"])

    def norm(name: str, x: Any) -> Any:
        deviation = np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        normal = (x - x.mean(-1, keepdims=True)) / deviation
        return keep(name, normal * params[name]["scale"] + params[name]["bias"])

    def keep(name: str, x: Any) -> Any:
        tensors[name] = x
        return x

    def heads(x: Any) -> Any:
        return x.reshape(*x.shape[:2], HEADS, -1).transpose(0, 2, 1, 3)

    for layer in (f"layers_{number}" for number in range(LAYERS)):
        hidden = norm(f"{layer}/ln_1", x)
        q, k, v = (
            heads(dense(f"{layer}/attention/{name}", hidden)) for name in ("query", "key", "value")
        )
        scores = np.exp(q @ k.transpose(0, 1, 3, 2) / np.sqrt(WIDTH // HEADS))
        mixed = (scores / scores.sum(-1, keepdims=True)) @ v
        x = x + keep(
            f"{layer}/attention",
            dense(f"{layer}/attention/out", mixed.transpose(0, 2, 1, 3).reshape(x.shape)),
        )
        hidden = dense(f"{layer}/mlp/wi", norm(f"{layer}/ln_2", x))
        hidden = (hidden * 0.5 * (1 + np.vectorize(erf)(hidden / np.sqrt(2)))).astype(np.float32)
        x = keep(layer, x + dense(f"{layer}/mlp/wo", hidden))
    keep(":out", dense("head", x))
    return tensors
