"""Whatever code decides by looking at the hooks of modules, it decides as in a bare run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import fuse_modules

from otel_torch import torch_private
from tests.support import recording
from tests.test_neutral import bits

X = torch.ones(2, 3)


def ask(module: nn.Module) -> bool:
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        if any(len(getattr(part, name)) for part in module.modules()):
            return True
    return False


class Asking(nn.Module):
    """Calls its part only where a module has a hook, as fused layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_hooked():
            return self.part(x)
        return x + 1

    def is_hooked(self) -> bool:
        raise NotImplementedError


class ByAttribute(Asking):
    def is_hooked(self) -> bool:
        return any(part._forward_hooks or part._forward_pre_hooks for part in self.modules())


class ByText(Asking):
    def is_hooked(self) -> bool:
        return any(len(getattr(part, "_forward_hooks", {})) for part in self.modules())


class ByFunction(Asking):
    def is_hooked(self) -> bool:
        return ask(self)


class ByProperty(Asking):
    @property
    def hooks(self) -> list[Any]:
        return [hook for part in self.modules() for hook in part._forward_hooks.values()]

    def is_hooked(self) -> bool:
        return bool(self.hooks)


def by_own_forward() -> nn.Module:
    """Return a module that got its forward as an attribute."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self[0](x) if self[0]._forward_hooks else x + 1

    module = nn.Sequential(nn.Linear(3, 3))
    module.forward = MethodType(forward, module)  # type: ignore[method-assign]
    return module


MAKERS = [ByAttribute, ByText, ByFunction, ByProperty, by_own_forward]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("capture", ["outputs", "inputs,outputs", "parity"])
def test_a_module_that_asks_for_hooks_finds_none_of_ours(
    make: Callable[[], nn.Module], capture: str
) -> None:
    early = make()
    with recording(capture=capture) as sink:
        for module in (early, make(), nn.Sequential(make())):
            assert torch.equal(module(X), X + 1)
    called = [module for module, tensor in sink.rows("module", "tensor") if tensor == "out"]
    assert called == ["", "", "0", ""]


@pytest.mark.parametrize("make", MAKERS)
def test_a_module_that_asks_for_hooks_finds_those_of_the_program(
    make: Callable[[], nn.Module],
) -> None:
    with recording() as sink:
        module = make()
        inner = next(module.children())
        handle = inner.register_forward_hook(lambda module, args, output: output + 5)
        assert torch.equal(module(X), inner(X))
        handle.remove()
        assert torch.equal(module(X), X + 1)
    assert sink.rows("module").count("") == 2


class Clearing(nn.Module):
    """Removes the hooks of its part before it calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.part._forward_hooks.clear()
        return self.part(x)


def test_code_that_removes_hooks_removes_those_of_the_program_alone() -> None:
    with recording() as sink:
        net = Clearing()
        net(X)
        net.part.register_forward_hook(lambda module, args, output: output + 5)
        assert torch.equal(net(X), X)
    assert sink.rows("module") == ["part", "", "part", ""]


@pytest.mark.parametrize("make", [ByAttribute, ByText, ByFunction])
def test_compiled_code_takes_the_way_of_the_bare_run(make: Callable[[], nn.Module]) -> None:
    torch._dynamo.reset()
    with recording(capture="inputs,outputs"):
        compiled = torch.compile(make(), backend="eager", fullgraph=True)
        assert torch.equal(compiled(X), X + 1)
    torch._dynamo.reset()


def encode(wrap: Callable[[nn.Module], Any], training: bool = False) -> Any:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    mask = torch.tensor([[False] * 4, [True] * 4])
    with torch.no_grad():
        return wrap(net)(torch.randn(2, 4, 16), src_key_padding_mask=mask)


def test_a_compiled_encoder_is_fused_as_in_the_bare_run(capfd: pytest.CaptureFixture[str]) -> None:
    def compiled(net: nn.Module) -> Any:
        return torch.compile(net, backend="eager", fullgraph=True)

    torch._dynamo.reset()
    bare = encode(compiled)
    torch._dynamo.reset()
    with recording():
        recorded = encode(compiled)
    torch._dynamo.reset()
    assert bits(bare) == bits(recorded) and bare[1].isnan().all()
    assert "compiled before recording began" not in capfd.readouterr().err


def test_modules_that_are_not_called_are_listed_once(capfd: pytest.CaptureFixture[str]) -> None:
    with recording() as sink:
        encode(lambda net: net, training=True)
        assert "not recorded" not in capfd.readouterr().err
        encode(lambda net: net)
        encode(lambda net: net)
    said = [line for line in capfd.readouterr().err.splitlines() if "not recorded" in line]
    assert len(said) == 2  # once for each model
    assert "TransformerEncoder#2: 18 modules are not recorded" in said[0]
    rows = sink.rows("model", "module")
    assert ("TransformerEncoder", "layers.0.linear1") in rows
    assert [module for model, module in rows if model == "TransformerEncoder#2"] == [
        "layers.0", "layers.1", "",
    ]  # fmt: skip


def test_fused_modules_get_the_hooks_of_the_program_alone() -> None:
    def fused() -> tuple[int, int]:
        net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)).eval()
        net(torch.ones(1, 1, 2, 2))
        net[1].register_forward_hook(lambda *called: None)
        conv = fuse_modules(net, ["0", "1"])[0]
        return len(conv._forward_pre_hooks), len(conv._forward_hooks)

    bare = fused()
    with recording(capture="inputs,outputs"):
        assert fused() == bare == (0, 1)


def test_a_module_may_become_a_graph_of_an_accelerator() -> None:
    def refusal() -> str:
        with pytest.raises(Exception) as raised:
            torch.cuda.make_graphed_callables(net, (torch.ones(2, 3, requires_grad=True),))
        return str(raised.value)

    net = nn.Sequential(nn.Linear(3, 3))
    with recording():
        net(X)
        assert "hooks" not in refusal()  # on a machine without an accelerator it fails later


def test_all_code_is_the_programs_own_after_the_session() -> None:
    functions = [nn.TransformerEncoderLayer.forward, ask, ByAttribute.is_hooked, ByText.is_hooked]
    before = [function.__code__ for function in functions]
    attributes = set(vars(nn.Module))
    with recording():
        ByFunction()(X), ByAttribute()(X), ByText()(X)
        unlike = [
            function.__code__ is not code for function, code in zip(functions, before, strict=True)
        ]
        assert unlike == [True] * 4
    assert [function.__code__ for function in functions] == before
    assert set(vars(nn.Module)) == attributes


# files of torch that read the tables of hooks without deciding anything by ours: they call hooks,
# register their own or look for one of a class of theirs, or are the compiler, which traces ours
_DECIDES_NOTHING = {
    "_dynamo/convert_frame.py", "_dynamo/functional_export.py", "_dynamo/trace_rules.py",
    "_dynamo/utils.py", "_dynamo/variables/nn_module.py",
    "_functorch/_aot_autograd/frontend_utils.py", "_functorch/aot_autograd.py",
    "ao/pruning/_experimental/pruner/prune_functions.py",
    "distributed/fsdp/_fully_shard/_fsdp_state.py", "distributed/nn/api/remote_module.py",
    "export/_trace.py", "fx/passes/split_module.py", "jit/_recursive.py", "nn/modules/module.py",
    "nn/utils/prune.py", "nn/utils/spectral_norm.py", "nn/utils/weight_norm.py",
}  # fmt: skip


def test_every_place_in_torch_that_reads_hooks_is_known() -> None:
    root = Path(torch.__file__).parent
    asking = {
        name.removeprefix("torch.").replace(".", "/") + ".py"
        for name in torch_private.MODULES_THAT_ASK_FOR_HOOKS
    }
    reads = re.compile(r"\b_forward_(pre_)?hooks\b")
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if "testing" not in path.parts and reads.search(path.read_text(errors="replace"))
    }
    assert found - asking - _DECIDES_NOTHING == set()
