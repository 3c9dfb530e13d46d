"""The hook contract: order, names, errors, attaching and detaching, and models that carry hooks."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from otel_torch import ForwardHook, ModuleHookManager
from tests.support import run_python

X = torch.ones(1, 2)


class Noting(ForwardHook):
    def __init__(self, label: str, notes: list[str]) -> None:
        self.label, self.notes = label, notes

    def name(self) -> str:  # type: ignore[override]
        return self.label

    def on_attach(self, module):
        self.notes.append(f"attach {self.label}")

    def on_detach(self, module):
        self.notes.append(f"detach {self.label}")

    def pre_forward(self, module, *args, **kwargs):
        self.notes.append(f"pre {self.label}")
        return args, kwargs

    def post_forward(self, module, output):
        self.notes.append(f"post {self.label}")
        return output


def hooked(*labels: str) -> tuple[nn.Module, ModuleHookManager, list[str]]:
    module, notes = nn.Linear(2, 2), []
    manager = ModuleHookManager.get_from_or_default(module)
    for label in labels:
        manager.append_forward_hook(Noting(label, notes))
    return module, manager, notes


def test_hooks_nest() -> None:
    module, _, notes = hooked("a", "b")
    module(X)
    assert notes == ["attach a", "attach b", "pre a", "pre b", "post b", "post a"]


def test_hooks_may_change_both_sides() -> None:
    class Doubling(ForwardHook):
        @classmethod
        def name(cls) -> str:
            return "doubling"

        def pre_forward(self, module, *args, **kwargs):
            return (args[0] * 2,), {"scale": kwargs["scale"] + 1}

        def post_forward(self, module, output):
            return output, "more"

    class Scale(nn.Module):
        def forward(self, x, scale):
            return x * scale

    module = Scale()
    ModuleHookManager.get_from_or_default(module).append_forward_hook(Doubling())
    output, more = module(X, scale=2)
    assert torch.equal(output, X * 6) and more == "more"


def test_a_module_has_one_manager() -> None:
    module, manager, _ = hooked()
    assert (
        ModuleHookManager.get_from_or_default(module)
        is manager
        is ModuleHookManager.get_from(module)
    )
    assert ModuleHookManager.get_from(nn.Linear(2, 2)) is None


def test_names_are_unique_and_missing_ones_are_errors() -> None:
    _, manager, notes = hooked("a")
    with pytest.raises(ValueError, match="already has a forward hook named 'a'"):
        manager.append_forward_hook(Noting("a", notes))
    with pytest.raises(ValueError, match="no forward hook named 'b'"):
        manager.remove_forward_hook("b")
    with pytest.raises(ValueError, match="no forward hook named 'b'"):
        manager.replace_forward_hook("b", Noting("c", notes))
    assert manager.get_forward_hook("b") is None and manager.get_forward_hook("a") is not None


def test_a_manager_that_is_not_attached_refuses_hooks() -> None:
    module, manager, notes = hooked("a")
    with pytest.raises(ValueError, match="not attached"):
        ModuleHookManager(nn.Linear(2, 2)).append_forward_hook(Noting("b", notes))
    ModuleHookManager.remove_from_manager(module)
    with pytest.raises(ValueError, match="not attached"):
        manager.append_forward_hook(Noting("b", notes))
    with pytest.raises(ValueError, match="no hook manager"):
        ModuleHookManager.remove_from_manager(module)


@pytest.mark.parametrize(
    ("flag", "expected"), [(True, ["detach a", "attach c"]), (False, ["attach c"])]
)
def test_replacing_keeps_the_place(flag: bool, expected: list[str]) -> None:
    module, manager, notes = hooked("a", "b")
    notes.clear()
    manager.replace_forward_hook("a", Noting("c", notes), flag)
    assert notes == expected
    notes.clear()
    module(X)
    assert notes == ["pre c", "pre b", "post b", "post c"]


def test_removing_may_leave_out_on_detach() -> None:
    module, manager, notes = hooked("a", "b")
    notes.clear()
    manager.remove_forward_hook("a", run_detach=False)
    manager.remove_forward_hook("b")
    assert notes == ["detach b"]
    assert not module._forward_hooks and not module._forward_pre_hooks


def test_what_a_hook_raises_reaches_the_caller_and_a_raising_forward_runs_no_post_hook() -> None:
    class Raising(Noting):
        def pre_forward(self, module, *args, **kwargs):
            raise KeyError("hook")

    module, _, notes = hooked("a")
    ModuleHookManager.get_from_or_default(module).append_forward_hook(Raising("r", notes))
    with pytest.raises(KeyError, match="hook"):
        module(X)
    notes.clear()
    module, _, notes = hooked("a")
    with pytest.raises(RuntimeError):
        module(torch.ones(3, 5))
    assert notes == ["attach a", "pre a"]


def test_a_copy_has_no_hooks_that_do_anything() -> None:
    module, _, notes = hooked("a")
    twin = copy.deepcopy(module)
    notes.clear()
    assert torch.equal(twin(X), module(X))
    assert notes == ["pre a", "post a"]
    assert ModuleHookManager.get_from(twin) is None


def test_a_pickle_needs_nothing_of_ours(tmp_path) -> None:
    module, _, _ = hooked("a")
    path = tmp_path / "module.pickle"
    path.write_bytes(pickle.dumps(module))
    code = (
        "import pickle, sys, torch; sys.modules['otel_torch'] = None; "
        f"print(tuple(pickle.load(open({str(path)!r}, 'rb'))(torch.ones(1, 2)).shape))"
    )
    assert run_python(tmp_path, code, OTEL_TORCH_ENABLED="0").stdout == "(1, 2)\n"


def test_hooks_are_traced_into_one_graph_for_all_layers() -> None:
    class Adding(ForwardHook):
        def __init__(self, row: torch.Tensor) -> None:
            self.row = row

        @classmethod
        def name(cls) -> str:
            return "adding"

        def post_forward(self, module, output):
            self.row.add_(output.sum().detach())
            return output

    torch._dynamo.reset()
    layers = nn.Sequential(*[nn.Linear(2, 2) for _ in range(12)])
    rows = [torch.zeros(()) for _ in layers]
    for layer, row in zip(layers, rows, strict=True):
        ModuleHookManager.get_from_or_default(layer).append_forward_hook(Adding(row))
    graphs: list[int] = []

    def backend(graph, inputs):
        graphs.append(1)
        return graph.forward

    compiled = torch.compile(layers, backend=backend, fullgraph=True)
    for _ in range(3):
        output = compiled(X)
    assert len(graphs) == 1
    assert torch.allclose(rows[-1], 3 * output.sum())


class Keeping(ForwardHook):
    """Keeps the outputs of a module."""

    def __init__(self) -> None:
        self.outputs: list[torch.Tensor] = []

    @classmethod
    def name(cls) -> str:
        return "keeping"

    def post_call(self, module, args, kwargs, output):
        self.outputs.append(output)


@pytest.mark.parametrize("in_front", [True, False])
def test_hooks_that_are_removed_while_torch_calls_the_others_raise_nothing_and_run_no_more(
    in_front: bool,
) -> None:
    module, notes, keeping = nn.Linear(2, 2), [], Keeping()
    if in_front:
        module.register_forward_pre_hook(lambda *_: ModuleHookManager.remove_from_manager(module))
    else:
        module.register_forward_hook(lambda *_: ModuleHookManager.remove_from_manager(module))
    manager = ModuleHookManager.get_from_or_default(module)
    manager.append_forward_hook(Noting("a", notes))
    manager.append_forward_hook(keeping)
    assert module(X).shape == (1, 2)
    assert (
        notes == ["attach a", *([] if in_front else ["pre a"]), "detach a"]
        and keeping.outputs == []
    )


def test_hooks_that_come_while_torch_calls_the_others_take_none_of_them_away() -> None:
    module, notes, keeping = nn.Linear(2, 2), [], Keeping()
    handle = module.register_forward_hook(
        lambda *_: manager.append_forward_hook(Noting("a", notes))
    )
    manager = ModuleHookManager.get_from_or_default(module)
    manager.append_forward_hook(keeping)
    out = module(X)
    assert notes == ["attach a", "post a"] and keeping.outputs == [out]
    handle.remove()
    module(X)
    assert notes == ["attach a", "post a", "pre a", "post a"] and len(keeping.outputs) == 2
