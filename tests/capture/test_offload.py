"""Layer-wise offload: the same results, with only the running layer and the next on the device."""

import copy

import pytest
import torch
from torch import nn

from otel_torch import (
    LayerwiseOffloadHook,
    LayerwiseOffloadState,
    ModuleHookManager,
    enable_layerwise_offload,
    track,
)

CPU = torch.device("cpu")
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
    ),
]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.norm(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Layer() for _ in range(3))
        self.tower = nn.Sequential(nn.Linear(8, 8))
        self.tower.refiners = nn.ModuleList(Layer() for _ in range(2))
        self.skipped: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for index, block in enumerate([*self.blocks, *self.tower.refiners]):
            if index not in self.skipped:
                x = block(x)
        return x


def make() -> Model:
    torch.manual_seed(0)
    return Model()


def layers(model: Model) -> list[Layer]:
    return [*model.blocks, *model.tower.refiners]


def sizes(model: Model) -> list[int]:
    """Return how many elements of each layer are on the device."""
    return [
        sum(tensor.numel() for tensor in (*layer.parameters(), *layer.buffers()))
        for layer in layers(model)
    ]


X = torch.linspace(-1, 1, 32).reshape(4, 8)


def hook(layer: nn.Module) -> LayerwiseOffloadHook:
    found = ModuleHookManager.get_from(layer).get_forward_hook("LayerwiseOffloadHook")
    assert isinstance(found, LayerwiseOffloadHook)
    return found


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_results_are_the_same_and_one_layer_is_on_the_device_at_a_time(device: str) -> None:
    model, whole = make(), make()
    whole.to(device)
    enable_layerwise_offload(model, device=device)
    assert sizes(model) == [0] * 5 and model.first.weight.device.type == device
    assert [parameter.ndim for parameter in model.blocks[0].parameters()] == [
        1,
        2,
        1,
        1,
        1,
    ]  # the rank is the same, except for a scalar
    there: list[list[bool]] = []
    for layer in layers(model):
        layer.linear.register_forward_hook(
            lambda *_: there.append([size > 0 for size in sizes(model)])
        )
    x = X.to(device)
    for _ in range(3):  # running means continue from their last values
        assert torch.equal(model(x), whole(x))
    assert there[:5] == [[index == layer for index in range(5)] for layer in range(5)]
    assert sizes(model) == [0] * 5


@torch.no_grad()
def test_the_next_layer_is_fetched_while_one_runs() -> None:
    model = make()
    enable_layerwise_offload(model, device="cpu")
    states = [hook(layer).state for layer in layers(model)]
    fetched: list[list[bool]] = []
    for layer in layers(model):
        layer.linear.register_forward_hook(
            lambda *_: fetched.append([bool(state.gpu_named_parameters) for state in states])
        )
    model(X)
    assert fetched == [
        [index in (layer, (layer + 1) % 5) for index in range(5)] for layer in range(5)
    ]


@pytest.mark.parametrize("skipped", [{1}, {0}, {4}, {1, 2}, {0, 2, 4}])
@torch.no_grad()
def test_skipped_layers_are_freed(skipped: set[int]) -> None:
    model, whole = make(), make()
    enable_layerwise_offload(model, device="cpu")
    model.skipped = whole.skipped = skipped
    for _ in range(3):
        assert torch.equal(model(X), whole(X))
    assert sum(bool(hook(layer).state.gpu_named_parameters) for layer in layers(model)) <= 1
    model.skipped = whole.skipped = set()
    assert torch.equal(model(X), whole(X))


@torch.no_grad()
def test_a_forward_that_raises_leaves_no_layer_on_the_device() -> None:
    model, whole = make(), make()
    enable_layerwise_offload(model, device="cpu")

    def fail(*_: object) -> None:
        raise KeyError("inside")

    handle = model.blocks[1].norm.register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        model(X)
    handle.remove()
    whole.blocks[0](whole.first(X))  # the batch that the failing run had already averaged
    assert torch.equal(model(X), whole(X)) and sizes(model) == [0] * 5


@torch.no_grad()
def test_removing_the_hooks_leaves_the_whole_model() -> None:
    model = make()
    state = copy.deepcopy(model.state_dict())
    enable_layerwise_offload(model, device="cpu")
    offloaded = model.state_dict()
    assert all(torch.equal(offloaded[name], value) for name, value in state.items())
    for layer in layers(model):
        ModuleHookManager.remove_from_manager(layer)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
    assert torch.equal(copy.deepcopy(model)(X), make()(X))


@torch.no_grad()
def test_weights_changed_in_a_scope_stay_changed() -> None:
    model, whole = make(), make()
    enable_layerwise_offload(model, device="cpu")
    with hook(model.blocks[1]).mutate_params_scope():
        model.blocks[1].linear.weight += 1
        model.blocks[1].linear.bias = nn.Parameter(torch.zeros(8))
    whole.blocks[1].linear.weight += 1
    whole.blocks[1].linear.bias.zero_()
    assert sizes(model) == [0] * 5
    assert torch.equal(model(X), whole(X))


@torch.no_grad()
def test_hooks_are_replaced_only_if_all_layers_have_one() -> None:
    model = make()
    with pytest.raises(AssertionError, match="has no LayerwiseOffloadHook"):
        enable_layerwise_offload(model, is_replace=True, device="cpu")
    enable_layerwise_offload(model, device="cpu")
    first = hook(model.blocks[0])
    enable_layerwise_offload(model, is_replace=True, device="cpu")
    assert hook(model.blocks[0]) is not first and torch.equal(model(X), make()(X))
    with pytest.raises(ValueError, match="already has a forward hook"):
        enable_layerwise_offload(model, device="cpu")


@torch.no_grad()
def test_shared_tensors_stay_on_the_device(capfd: pytest.CaptureFixture[str]) -> None:
    model, whole = make(), make()
    for net in (model, whole):
        net.blocks[1].linear.weight = net.blocks[0].linear.weight
        net.blocks[2].linear.weight = net.first.weight
    enable_layerwise_offload(model, device="cpu")
    assert sizes(model) == [64, 64, 64, 0, 0]
    assert torch.equal(model(X), whole(X))
    assert "2 tensors stay on the device" in capfd.readouterr().err


def test_a_model_without_lists_and_a_machine_without_an_accelerator(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"Linear has no nn\.ModuleList"):
        enable_layerwise_offload(nn.Linear(1, 1), device="cpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    model = make()
    enable_layerwise_offload(model)
    assert min(sizes(model)) > 0 and "layer-wise offload does nothing" in capfd.readouterr().err


@torch.no_grad()
def test_one_layer_alone_and_a_state_made_by_hand() -> None:
    layer, whole = Layer(), Layer()
    whole.load_state_dict(layer.state_dict())
    ModuleHookManager.get_from_or_default(layer).append_forward_hook(
        LayerwiseOffloadHook(LayerwiseOffloadState(None, CPU))
    )
    assert layer.linear.weight.numel() == 0
    assert torch.equal(layer(X), whole(X))
    model = nn.Sequential(nn.ModuleList([layer]))
    assert LayerwiseOffloadHook.name() == "LayerwiseOffloadHook" and len(model) == 1


@torch.no_grad()
def test_an_offloaded_model_is_tracked_and_compiled(fresh_compiler: None) -> None:
    model, whole = make().eval(), make().eval()
    enable_layerwise_offload(model, device="cpu")
    with track(model, include=r"linear$") as tracker:
        model(X)
    assert [stash.name for stash in tracker][:2] == ["blocks.0.linear", "blocks.1.linear"]
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(X), whole(X))
