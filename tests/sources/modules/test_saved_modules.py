"""A module that is copied, pickled or saved while it is recorded has nothing of ours in it."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import recording, run_python

X = torch.ones(2, 4)


class WithSlots(nn.Linear):
    __slots__ = ("extra",)


def make() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(WithSlots(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4)))
    net[1].register_forward_hook(print_nothing, with_kwargs=True)
    return net


def print_nothing(*arguments: Any) -> None:
    """A hook of the program, which stays."""


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "torch_save": saved,
    "state_dict": lambda net: saved(net.state_dict()),
    "gradients": lambda net: saved([parameter.grad for parameter in net.parameters()]),
    "deepcopy": lambda net: saved(copy.deepcopy(net)),
    "copy": lambda net: saved(copy.copy(net[1])),
    "outputs": lambda net: saved(net(X).detach()),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_saved_is_the_same_to_the_byte(way: str) -> None:
    def save() -> Any:
        net = make()
        net(X).sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return WAYS[way](net)

    # torch numbers hooks over the life of a process, and writes the numbers
    next_id = torch.utils.hooks.RemovableHandle.next_id
    expected = save()
    with recording(capture="inputs,outputs,gradients,parameters", operations="."):
        torch.utils.hooks.RemovableHandle.next_id = next_id
        assert save() == expected


def test_a_copy_has_the_hooks_of_the_program_only() -> None:
    before = vars(nn.Module).get("__getstate__")
    with recording(capture="inputs,outputs"):
        net = make()
        net(X)
        for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            assert [len(module._forward_hooks) for module in twin.modules()] == [0, 0, 1, 0, 0]
            assert not any(module._forward_pre_hooks for module in twin.modules())
            assert len(twin[1]._forward_hooks_with_kwargs) == 1
    assert vars(nn.Module).get("__getstate__") is before


def test_a_saved_module_is_loaded_without_this_package(tmp_path: Path) -> None:
    program = """
        import copy, torch
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        net(torch.ones(1, 4))
        torch.save(net, "whole.pt"), torch.save(net.state_dict(), "state.pt")
        fx = torch.fx.symbolic_trace(net)
        fx(torch.ones(1, 4))
        torch.save(fx, "graph.pt")
        torch.save(torch.nn.DataParallel(net), "wrapped.pt")
    """
    run_python(tmp_path, "\n".join(line.strip() for line in program.splitlines()))
    load = (
        "import sys\n"
        "sys.modules['otel_torch'] = None\n"
        "import torch\n"
        "for name in ('whole', 'graph', 'wrapped'):\n"
        "    print(torch.load(name + '.pt', weights_only=False)(torch.ones(1, 4)).shape)\n"
        "print(len(torch.load('state.pt')))\n"
    )
    done = run_python(tmp_path, load, OTEL_TORCH_ENABLED="0")
    assert done.stdout == "torch.Size([1, 4])\n" * 3 + "2\n"
    for path in tmp_path.glob("*.pt"):
        assert b"otel_torch" not in path.read_bytes()


def test_a_module_is_sent_to_a_spawned_process(tmp_path: Path) -> None:
    program = """
import torch
import torch.multiprocessing

def run(net, results):
    results.put(net(torch.ones(1, 4)).shape)

if __name__ == "__main__":
    net = torch.nn.Linear(4, 4)
    net(torch.ones(1, 4))
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=run, args=(net, results))
    process.start()
    print(results.get())
    process.join()
"""
    assert run_python(tmp_path, program, fresh=True).stdout == "torch.Size([1, 4])\n"
