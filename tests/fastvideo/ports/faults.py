"""Faults that a machine plants at random modules: they find what faults thought up by people do
not.

A fault is a line of text, `KIND@MODULE` or `sister@MODULE#INDEX`, the same in every process.

What belongs to a module (`output.*`, `weight.*`, `bias.zero`, `skip`, `sister`) is wrong inside its
forward: right inputs, wrong output, whichever way somebody listens. What lies in front of it
(`input.*`) is done before its call begins.
"""

from __future__ import annotations

import functools
import random
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.corpora.case import Place
from tests.corpora.truth import Event, relative_error, trace
from tests.fastvideo.ports.corpus import build

_Change = Callable[[Tensor, torch.Generator], Tensor]


def _noise(tensor: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
    return tensor + 1e-2 * tensor.float().square().mean().sqrt().to(tensor.dtype) * noise


def _swap(tensor: Tensor, _: torch.Generator) -> Tensor:
    """The first two of the batch, or, where it is one, of the tokens."""
    axis = 0 if len(tensor) > 1 else 1
    order = torch.arange(tensor.shape[axis])
    order[:2] = order[:2].flip(0)
    return tensor.index_select(axis, order)


_OUTPUT: dict[str, _Change] = {
    "output.scale": lambda tensor, _: tensor * 1.1,
    "output.flip": lambda tensor, _: -tensor,
    "output.noise": _noise,
    "output.round": lambda tensor, _: tensor.bfloat16().to(tensor.dtype),
}
_INPUT: dict[str, _Change] = {
    "input.scale": lambda tensor, _: tensor * 1.1,
    "input.roll": lambda tensor, _: tensor.roll(1, -1),
    "input.swap": _swap,
}
_WEIGHT: dict[str, Callable[[nn.Module], None]] = {
    "weight.transpose": lambda module: module.weight.data.copy_(module.weight.data.T.clone()),
    "weight.scale": lambda module: module.weight.data.mul_(1.1),
    "bias.zero": lambda module: module.bias.data.zero_(),
}
KINDS = (*_OUTPUT, *_INPUT, *_WEIGHT, "skip", "sister")


def _floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0


def _change_all(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Every floating tensor of a result changed; the containers that hold tensors directly are
    rebuilt.
    """
    if _floating(value):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(_change_all(part, change) for part in value)
    return value


def _change_first(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> Any:
    """The call's first floating tensor changed, positional ones first."""
    for place, value in enumerate(args):
        if _floating(value):
            return (*args[:place], change(value), *args[place + 1 :]), kwargs
    for name, value in kwargs.items():
        if _floating(value):
            return args, kwargs | {name: change(value)}
    return args, kwargs


def _sister(module: str, index: int) -> str:
    """The module of this name in another block: the first index in the name replaced."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", str(index), module, count=1)


@dataclass(frozen=True)
class Fault:
    """A fault of one module.

    >>> Fault.parse("sister@blocks.0.to_q#2")
    Fault(kind='sister', module='blocks.0.to_q', index=2)
    >>> str(_)
    'sister@blocks.0.to_q#2'
    """

    kind: str
    module: str
    index: int | None = None

    @classmethod
    def parse(cls, spec: str) -> Fault:
        """ValueError, which names the kinds there are, on a spec that is none."""
        match = re.fullmatch(r"([a-z.]+)@([^#]+)(?:#(\d+))?", spec)
        if match is None or match[1] not in KINDS:
            raise ValueError(
                f"not a fault: {spec!r}; write KIND@MODULE, KIND one of {', '.join(KINDS)}"
            )
        return cls(match[1], match[2], int(match[3]) if match[3] else None)

    def __str__(self) -> str:
        return f"{self.kind}@{self.module}" + ("" if self.index is None else f"#{self.index}")

    def plant(self, model: nn.Module) -> None:
        """Put it into a model that has not been called yet."""
        module = model.get_submodule(self.module)
        generator = torch.Generator().manual_seed(zlib.crc32(str(self).encode()))
        if self.kind in _OUTPUT:
            change = _OUTPUT[self.kind]
            forward = module.forward

            @functools.wraps(forward)
            def changed_forward(*args: Any, **kwargs: Any) -> Any:
                return _change_all(
                    forward(*args, **kwargs), lambda tensor: change(tensor, generator)
                )

            module.forward = changed_forward
        elif self.kind in _INPUT:
            change_input = _INPUT[self.kind]
            call = (
                module._call_impl
            )  # in front of every hook, wherever and whenever it is registered

            def changed_call(*args: Any, **kwargs: Any) -> Any:
                args, kwargs = _change_first(
                    args, kwargs, lambda tensor: change_input(tensor, generator)
                )
                return call(*args, **kwargs)

            module._call_impl = changed_call
        elif self.kind in _WEIGHT:
            _WEIGHT[self.kind](module)
        elif self.kind == "skip":
            forward_signature = module.forward

            @functools.wraps(forward_signature)
            def skipped(*args: Any, **kwargs: Any) -> Any:
                entered = next(value for value in (*args, *kwargs.values()) if _floating(value))
                # FastVideo's linear layers return their output and a bias
                return (entered, None) if returns_a_bias else entered

            returns_a_bias = hasattr(module, "skip_bias_add")
            module.forward = skipped
        else:
            assert self.index is not None
            module.load_state_dict(
                model.get_submodule(_sister(self.module, self.index)).state_dict()
            )

    def truth(self, model: nn.Module) -> tuple[Place, ...]:
        """The right answers, in the port's names: any of them is exact."""
        module = model.get_submodule(self.module)
        names = _names(model, module)
        if self.kind in _INPUT:
            return tuple(Place("input", name) for name in names)
        places = [Place("output", name) for name in names]
        if self.kind in _WEIGHT:
            places += [Place("parameter", name) for name in names]
        if self.kind == "sister":  # each owner below has wrong weights of its own
            owners = [
                owner for owner in module.modules() if dict(owner.named_parameters(recurse=False))
            ]
            below = [name for owner in owners for name in _names(model, owner)]
            places = [
                Place(side, name)
                for name in dict.fromkeys(names + below)
                for side in ("output", "parameter")
            ]
        return tuple(places)


def _names(model: nn.Module, wanted: nn.Module) -> list[str]:
    """A module that hangs in the tree twice has two names."""
    return [
        name for name, module in model.named_modules(remove_duplicate=False) if module is wanted
    ]


def eligible(model: nn.Module, events: list[Event]) -> dict[str, list[Fault]]:
    """Every fault that can be planted at the modules that were called, by kind."""
    entered = {event.module: event.tensors for event in reversed(events) if event.side == "input"}
    left = {event.module: event.tensors for event in reversed(events) if event.side == "output"}
    found: dict[str, list[Fault]] = {kind: [] for kind in KINDS}
    for name in dict.fromkeys(event.module for event in events):
        if not name or name not in left:
            continue
        module = model.get_submodule(name)
        inputs = [tensor for tensor in entered[name] if _floating(tensor)]
        outputs = [tensor for tensor in left[name] if _floating(tensor)]
        if outputs:
            for kind in _OUTPUT:
                found[kind].append(Fault(kind, name))
        if inputs:
            found["input.scale"].append(Fault("input.scale", name))
            if inputs[0].shape[-1] > 1:
                found["input.roll"].append(Fault("input.roll", name))
            if len(inputs[0]) > 1 or (inputs[0].dim() > 1 and inputs[0].shape[1] > 1):
                found["input.swap"].append(Fault("input.swap", name))
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if isinstance(weight, nn.Parameter):
            found["weight.scale"].append(Fault("weight.scale", name))
            if weight.dim() == 2 and weight.shape[0] == weight.shape[1]:
                found["weight.transpose"].append(Fault("weight.transpose", name))
            if isinstance(bias, nn.Parameter):
                found["bias.zero"].append(Fault("bias.zero", name))
        if inputs and len(outputs) == 1 and inputs[0].shape == outputs[0].shape:
            found["skip"].append(Fault("skip", name))
        if any(True for _ in module.parameters()):
            for index in range(8):
                sister = _sister(name, index)
                if (
                    sister != name
                    and sister in left
                    and _alike(module, model.get_submodule(sister))
                ):
                    found["sister"].append(Fault("sister", name, index))
    return {kind: faults for kind, faults in found.items() if faults}


def _alike(a: nn.Module, b: nn.Module) -> bool:
    shapes = [
        {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        for module in (a, b)
    ]
    return shapes[0] == shapes[1]


ROUNDING = {"fp32": 1e-6, "bf16": 1e-2}


@functools.cache
def _clean(pair: str, dtype: str, seed: int) -> tuple[Tensor, list[Event], float]:
    """The clean port's output and events, and how far rounding alone takes it from the reference."""
    port = build(pair, "port", dtype=dtype, seed=seed)
    output, events = trace(port.model, port.run)
    reference = build(pair, "reference", dtype=dtype, seed=seed).run()
    return output, events, max(ROUNDING[dtype], relative_error(output, reference))


def reaches(pair: str, spec: str, *, dtype: str = "fp32", seed: int = 0) -> bool:
    """Whether the fault changes the port's output by more than ten times what rounding does."""
    clean, _, rounding = _clean(pair, dtype, seed)
    with build(pair, "port", fault=spec, dtype=dtype, seed=seed) as program:
        try:
            error = relative_error(program.run(), clean)
        except Exception:  # the program itself finds it
            return False
    return not error <= 10 * rounding  # NaN reaches, too


def draw(
    pair: str, count: int, seed: int = 0, *, dtype: str = "fp32", weights: int = 0
) -> list[str]:
    """Different faults that reach the output, kinds evenly at random, then modules. Fewer than
    `count` where there are no more. `weights` is the seed of weights and inputs.
    """
    with build(pair, "port", dtype=dtype, seed=weights) as program:
        _, events, _ = _clean(pair, dtype, weights)
        candidates = eligible(program.model, events)
    chance = random.Random(f"{pair}/{seed}")
    drawn: list[str] = []
    while candidates and len(drawn) < count:
        kind = chance.choice(list(candidates))
        fault = candidates[kind].pop(chance.randrange(len(candidates[kind])))
        if not candidates[kind]:
            del candidates[kind]
        if reaches(pair, str(fault), dtype=dtype, seed=weights):
            drawn.append(str(fault))
    return drawn
