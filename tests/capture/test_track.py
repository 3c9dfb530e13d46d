"""tensor_tracker's interface, without its defects."""

import copy
import dataclasses
import gc
import pickle
import weakref
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import otel_torch
from otel_torch import (
    Event,
    Stash,
    Tracker,
    default_stash,
    default_stash_value,
    get_stash_fn,
    rmap_tensor,
    to_frame,
    track,
)
from tests.support import recording


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.linear(x))


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(4, 2))


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def names(tracker: Tracker, grad: bool) -> list[str]:
    return [stash.name for stash in tracker if stash.grad == grad]


def test_forward_and_gradients_of_every_module_in_order() -> None:
    model = make()
    with track(model) as tracker:
        out = model(X)
        out.sum().backward()
    assert names(tracker, False) == ["0.linear", "0.act", "0", "1.linear", "1.act", "1", "2", ""]
    # a module's gradient comes before those of the modules in it, as torch's own backward hooks
    # have it
    assert names(tracker, True) == ["", "2", "1", "1.act", "1.linear", "0", "0.act", "0.linear"]
    assert str(tracker) == "Tracker(stashes=16, tracking=0)" and len(tracker) == 16
    assert tracker[7] == Stash("", nn.Sequential, False, tracker[7].value) and torch.equal(
        tracker[7].value, out
    )
    assert [stash.name for stash in tracker[6:8]] == ["2", ""]
    (gradient,) = tracker[8].value
    assert (
        tracker[8].grad
        and torch.equal(gradient, torch.ones(3, 2))
        and torch.equal(tracker[8].first_value, gradient)
    )
    tracker.clear()
    assert list(tracker) == []


def test_values_are_those_before_a_later_in_place_operation() -> None:
    model = make()
    exact = model(X)
    exact.sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    seen = []
    model[0].linear.register_forward_hook(
        lambda module, inputs, output: seen.append(output.detach().clone())
    )
    with track(model) as tracker:
        found = model(X)
        found.sum().backward()
    assert torch.equal(exact, found)
    assert all(
        torch.equal(parameter.grad, old)
        for parameter, old in zip(model.parameters(), expected, strict=True)
    )
    assert torch.equal(tracker[0].value, seen[0]) and (tracker[0].value < 0).any()
    by_name = {stash.name: stash.first_value for stash in tracker if stash.grad}
    alive = seen[0] > 0
    assert torch.equal(by_name["0.linear"], by_name["0.act"] * alive)


Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    a: torch.Tensor
    b: object = None
    c: torch.Tensor = dataclasses.field(init=False, default=None)


class Returns(nn.Module):
    def __init__(self, kind: object) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> object:
        return self.kind(x * 2, x * 3)


@pytest.mark.parametrize(
    "kind",
    [
        Pair,
        Slotted,
        lambda a, b: {"a": a, "b": b},
        lambda a, b: (a, b),
        lambda a, b: [a, [b, None]],
    ],
)
def test_every_structure_is_tracked_with_its_gradients(kind: object) -> None:
    model = Returns(kind)
    x = torch.ones(2, requires_grad=True)
    with track(model) as tracker:
        output = model(x)
        tensors: list[torch.Tensor] = []
        rmap_tensor(output, tensors.append)
        sum((index + 1) * tensor.sum() for index, tensor in enumerate(tensors)).backward()
    forward, backward = tracker
    assert type(forward.value) is type(output) and backward.grad
    tensors: list[torch.Tensor] = []
    rmap_tensor(forward.value, tensors.append)
    assert [tensor.tolist() for tensor in tensors] == [[2.0, 2.0], [3.0, 3.0]] and not any(
        tensor.requires_grad for tensor in tensors
    )
    gradients: list[torch.Tensor] = []
    rmap_tensor(backward.value, gradients.append)
    assert [tensor.tolist() for tensor in gradients] == [[1.0, 1.0], [2.0, 2.0]]
    assert type(backward.value) is type(output)


def test_the_gradient_of_an_unused_output_is_none() -> None:
    model = Returns(lambda a, b: (a, b))
    with track(model) as tracker:
        model(torch.ones(2, requires_grad=True))[1].sum().backward()
    unused, used = tracker[1].value
    assert unused is None and used.tolist() == [1.0, 1.0]


def test_a_class_in_an_output_is_not_changed() -> None:
    assert rmap_tensor((Slotted, torch.Size([1]), "x", None), lambda tensor: 0) == (
        Slotted,
        torch.Size([1]),
        "x",
        None,
    )
    assert rmap_tensor({torch.ones(1): [torch.ones(2)]}, lambda tensor: len(tensor)) == {1: [2]}


def test_include_and_exclude_choose_by_name(capfd: pytest.CaptureFixture[str]) -> None:
    model = make()
    assert len(track(model, include=r"^\d$", grad=False)._hooks) == 3
    with track(model, include="linear", exclude="^0") as tracker:
        assert str(tracker) == "Tracker(stashes=0, tracking=2)"
        model(X)
    assert [stash.name for stash in tracker] == ["1.linear"]
    track(model, include="attention")
    assert (
        "track: no module of Sequential matches (8 modules, for example '0')"
        in capfd.readouterr().err
    )


def test_custom_functions_choose_what_is_kept() -> None:
    model = make()
    with track(model, stash_value=lambda tensor: tensor.std().detach()) as tracker:
        model(X)
    assert all(stash.value.shape == () for stash in tracker)
    events: list[Event] = []

    def stash(event: Event) -> Stash:
        events.append(event)
        return Stash(
            event.name.upper(), event.type, event.grad, tuple(tensor.shape for tensor in event.args)
        )

    with track(model, stash=stash, include="^0$") as tracker:
        model(X)
    assert tracker[0] == Stash("0", Block, False, (torch.Size([3, 4]),)) and events[0].kwargs == {}
    with pytest.raises(ValueError, match="not both"):
        get_stash_fn(stash_value=default_stash_value, stash=stash)
    stash = default_stash(Event("a", Block, False, (X, 1), (), {}), lambda tensor: tensor.shape[0])
    assert stash == Stash("a", Block, False, (3, 1))


def test_an_error_in_stash_never_reaches_the_forward(capfd: pytest.CaptureFixture[str]) -> None:
    model = make()

    def stash(event: Event) -> Stash:
        raise KeyError(event.name)

    with track(model, stash=stash, include="^2$") as tracker:
        model(X).sum().backward()
    assert len(tracker) == 0 and tracker.lost == 2
    assert "track: stash failed for '2'" in capfd.readouterr().err


def test_registering_by_hand() -> None:
    model = make()
    tracker = Tracker()
    tracker.register(model[0], "first")
    tracker.register(model[0], "again", grad=False)
    model(X).sum().backward()
    assert [(stash.name, stash.grad) for stash in tracker] == [
        ("first", False),
        ("again", False),
        ("first", True),
    ]
    tracker.unregister()
    model(X)
    assert len(tracker) == 3
    pickle.loads(pickle.dumps(model))
    copy.deepcopy(model)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_copy_of_a_tracked_model_is_not_tracked() -> None:
    model = make()
    with track(model) as tracker:
        copy.deepcopy(model)(X)
    assert len(tracker) == 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_forwards_are_marked(reentrant: bool) -> None:
    model = make()

    def forward(x: torch.Tensor) -> torch.Tensor:
        return model[2](
            checkpoint(
                model[1], checkpoint(model[0], x, use_reentrant=reentrant), use_reentrant=reentrant
            )
        )

    with track(model, include="linear") as tracker:
        forward(X.clone().requires_grad_()).sum().backward()
    assert [stash.name for stash in tracker if not (stash.grad or stash.recompute)] == [
        "0.linear",
        "1.linear",
    ]
    assert [stash.name for stash in tracker if stash.recompute] == ["1.linear", "0.linear"]
    assert names(tracker, True) == ["1.linear", "0.linear"]
    frame = tracker.to_frame()
    assert (
        list(frame.columns) == ["name", "type", "grad", "recompute", "std"]
        and frame["recompute"].sum() == 2
    )


def test_parameters_and_their_gradients() -> None:
    model = make()
    with track(model, include="^2$", parameters=True) as tracker:
        model(X).sum().backward()
    assert [(stash.name, stash.grad) for stash in tracker] == [
        ("2.weight", False), ("2.bias", False), ("2", False), ("2", True), ("2.bias", True), ("2.weight", True),
    ] or {(stash.name, stash.grad) for stash in tracker[4:]} == {("2.bias", True), ("2.weight", True)}  # fmt: skip
    gradients = {stash.name: stash.first_value for stash in tracker[4:]}
    assert torch.equal(gradients["2.weight"], model[2].weight.grad) and torch.equal(
        tracker[0].value, model[2].weight
    )


def test_a_shared_module_is_tracked_once_and_called_twice() -> None:
    inner = nn.Linear(4, 4)
    model = nn.Sequential(inner, inner)
    with track(model, grad=False) as tracker:
        model(X)
    assert [stash.name for stash in tracker] == ["0", "0", ""]


def test_a_frame_of_several_statistics() -> None:
    model = make()
    with track(model, grad=False) as tracker:
        model(X)
    frame = tracker.to_frame()
    assert list(frame.columns) == ["name", "type", "grad", "std"]
    assert frame["type"][0] == "torch.nn.modules.linear.Linear"
    assert frame["std"].tolist() == [stash.value.std().item() for stash in tracker]
    assert list(tracker.to_frame(lambda tensor: 1, "one")["one"]) == [1] * 8
    several = tracker.to_frame(["abs_mean", torch.mean, "shape"])
    assert list(several.columns[3:]) == ["abs_mean", "mean", "shape"] and several["shape"][7] == [
        3,
        2,
    ]
    assert several["abs_mean"][0] == pytest.approx(tracker[0].value.abs().mean().item())
    assert list(tracker.to_frame({"largest": "max"}).columns[3:]) == ["largest"]
    with pytest.raises(ValueError, match="'avg' is not a statistic; use abs_mean"):
        tracker.to_frame("avg")
    whole = Tracker()
    assert list(whole.to_frame().columns) == ["name", "type", "grad", "std"]
    whole.take(Event("ids", nn.Embedding, False, torch.tensor([1, 3]), (), {}))
    whole.take(Event("none", nn.Identity, False, None, (), {}))
    assert whole.to_frame()["std"].tolist()[0] == pytest.approx(2**0.5)


def test_a_frame_of_a_recording(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    model = make()
    with recording(jsonl=str(path), capture="outputs,gradients"), track(model) as tracker:
        model(X).sum().backward()
    frame = to_frame(path, ["std", "mean"])
    assert list(frame.columns) == [
        "name",
        "grad",
        "recompute",
        "tensor",
        "step",
        "call",
        "loop",
        "model",
        "std",
        "mean",
    ]
    live = tracker.to_frame()
    for grad in (False, True):
        recorded = {row["name"]: row["std"] for _, row in frame[frame["grad"] == grad].iterrows()}
        assert recorded == pytest.approx(
            {row["name"]: row["std"] for _, row in live[live["grad"] == grad].iterrows()}, abs=1e-6
        )
    with pytest.raises(ValueError, match="'rms' was not recorded; see OTEL_TORCH_STATS"):
        to_frame(path, "rms")
    with pytest.raises(ValueError, match="no tensors; name recorded statistics"):
        to_frame(path, torch.std)
    assert list(to_frame(tracker).columns) == ["name", "type", "grad", "std"]


def test_whole_and_regional_compilation(fresh_compiler: None) -> None:
    model = make()
    with torch.no_grad():
        model(X)
        with track(model) as tracker:
            compiled = torch.compile(model, fullgraph=True, backend="eager")
            out = compiled(X)
        assert names(tracker, False) == [
            "0.linear",
            "0.act",
            "0",
            "1.linear",
            "1.act",
            "1",
            "2",
            "",
        ]
        assert torch.equal(tracker[-1].value, out)
        tracker.clear()
        compiled(X)
        assert len(tracker) == 0


def test_no_hook_remains() -> None:
    model = make()
    hooks = [dict(module._forward_hooks) for module in model.modules()]
    for _ in range(20):
        with track(model, parameters=True) as tracker, pytest.raises(RuntimeError):
            model(torch.ones(3, 5))
        with track(model) as tracker:
            out = model(X)
            out.sum().backward()
            reference = weakref.ref(out)
        whole = weakref.ref(tracker)
        del tracker, out
    gc.collect()
    assert reference() is None and whole() is None
    assert [dict(module._forward_hooks) for module in model.modules()] == hooks
    assert otel_torch.ModuleHookManager.get_from(model) is None
