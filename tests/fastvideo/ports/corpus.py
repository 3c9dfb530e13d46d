"""One side of one pair, built and ready to run, with at most one bug or fault in it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from tests.fastvideo.ports import dits, encoders, vaes
from tests.fastvideo.ports.pair import Draw, Inputs, Pair, forward_context, prepare_fastvideo
from tests.fastvideo.ports.weights import cast, reference_state

Side = Literal["reference", "port"]

PAIRS: dict[str, Callable[[], Pair]] = {**dits.PAIRS, **encoders.PAIRS, **vaes.PAIRS}
FAULTY: dict[str, Callable[[], Pair]] = dits.FAULTY
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Program:
    """A model with its input. A bug's patches of FastVideo's code last until `close()`, for those
    who build several.
    """

    model: nn.Module
    call: Callable[[nn.Module, Inputs], Tensor]
    inputs: Inputs
    patches: ExitStack

    def run(self) -> Tensor:
        """The output that the two sides of a pair have in common."""
        with torch.no_grad():
            return self.call(self.model, self.inputs)

    def close(self) -> None:
        self.patches.close()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def build(
    pair: str,
    side: Side,
    *,
    bug: str | None = None,
    fault: str | None = None,
    dtype: str = "fp32",
    seed: int = 0,
) -> Program:
    """Build one side of a pair of `PAIRS` or `FAULTY`. `bug` is a name of `bugs.BUGS`, `fault` a
    spec of `faults`: both are the port's.
    """
    made = (PAIRS | FAULTY)[pair]()
    torch_dtype = DTYPES[dtype]
    inputs = {
        name: value.to(torch_dtype) if _is_cast(name, value, made) else value
        for name, value in made.inputs(Draw(pair, seed)).items()
    }
    reference = made.reference().eval()
    state = reference_state(seed, reference)
    patches = ExitStack()
    if side == "reference":
        missing, unknown = reference.load_state_dict(state, strict=False)
        assert not unknown and not set(missing) & {name for name, _ in reference.named_parameters()}
        cast(reference, torch_dtype, tuple(getattr(reference, "_keep_in_fp32_modules", None) or ()))
        return Program(reference, made.call_reference, inputs, patches)
    del reference
    prepare_fastvideo()
    if bug is not None:
        from tests.fastvideo.ports.bugs import BUGS

        BUGS[bug].patch(patches)
    port = made.port().eval()
    with torch.no_grad():
        made.load(port, state)
    cast(port, torch_dtype, made.keep_fp32)
    if bug is not None:
        BUGS[bug].change(port)
    if fault is not None:
        from tests.fastvideo.ports.faults import Fault

        Fault.parse(fault).plant(port)

    def call(model: nn.Module, i: Inputs) -> Tensor:
        with forward_context():
            return made.call_port(model, i)

    return Program(port, call, inputs, patches)


def _is_cast(name: str, value: object, pair: Pair) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and name not in pair.exact
