"""Every model that runs is found, and its modules have canonical names in any wrapper."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

from otel_torch.recorder import Recorder
from otel_torch.records import Scope
from otel_torch.sources.modules.containers import Containers
from otel_torch.sources.modules.module_names import class_name, named_modules
from tests.support import PROGRAMS, lines, metadata, recording, run_ranks

X = torch.ones(2, 3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.linear(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Autoencoder(nn.Module):
    """A model of which only methods are called, like those of diffusers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 3)
        self.decoder = nn.Linear(3, 3)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.decoder(part) for part in x])


ALL = [
    "blocks.0.linear",
    "blocks.0.act",
    "blocks.0",
    "blocks.1.linear",
    "blocks.1.act",
    "blocks.1",
    "",
]


def test_every_module_is_recorded_in_order_of_completion() -> None:
    with recording() as sink:
        Net()(X)
    assert sink.rows("model", "module", "tensor") == [("Net", name, "out") for name in ALL]


def test_models_built_before_the_session_are_found() -> None:
    net = Net()
    with recording() as sink:
        net(X)
    assert sink.rows("module") == ALL


class Compiled(Net):
    """Calls its forward itself, like the models that vLLM compiles."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)


def test_models_built_before_the_session_are_found_though_the_heap_is_frozen() -> None:
    net = Compiled()
    # hides the model from `gc.get_objects`; unfrozen, a million objects would slow the tests after it
    gc.freeze()
    with recording() as sink:
        net(X)
        net(X)
    # the first call had begun before its model was known
    expected = [("Compiled", name, 0) for name in ALL[:-1]] + [
        ("Compiled", name, 1) for name in ALL
    ]
    assert sink.rows("model", "module", "step") == expected


def test_a_part_called_directly_belongs_to_its_owner_and_one_method_call_is_one_forward() -> None:
    with recording() as sink:
        vae = Autoencoder()
        for _ in range(2):
            vae.decode(vae.encode(X))
    assert sink.rows("model", "module", "step", "call") == [
        ("Autoencoder", "encoder", 0, 0), ("Autoencoder", "decoder", 1, 0), ("Autoencoder", "decoder", 1, 1),
        ("Autoencoder", "encoder", 2, 0), ("Autoencoder", "decoder", 3, 0), ("Autoencoder", "decoder", 3, 1),
    ]  # fmt: skip


def test_a_part_called_from_outside_is_a_forward_each_time() -> None:
    with recording() as sink:
        net = Net()
        for _ in range(2):
            net.blocks[1](X)
    assert sink.rows("model", "module", "step") == [
        ("Net", name, step) for step in (0, 1) for name in ALL[3:6]
    ]


def test_forward_called_by_name_is_one_forward() -> None:
    with recording() as sink:
        Net().forward(X)
    assert sink.rows("module", "step") == [(name, 0) for name in ALL]


def test_nothing_of_the_program_is_kept_alive() -> None:
    with recording():
        vae, x = Autoencoder(), X.clone()
        net = Net()
        net(x)
        vae.decode(x)
        references = [weakref.ref(vae), weakref.ref(net), weakref.ref(x)]
        del vae, x, net
        gc.collect()
        assert [reference() for reference in references] == [None, None, None]


def test_several_models_of_one_class_are_numbered_in_order_of_first_use() -> None:
    with recording() as sink:
        unused, first, second = Net(), Net(), Net()
        second(X)
        first(X)
        second(X)
    assert sink.rows("model", "step", module="") == [("Net", 0), ("Net#2", 0), ("Net", 1)]
    assert unused is not None


def test_losses_made_anew_each_time_are_one_model() -> None:
    with recording() as sink:
        for _ in range(3):
            nn.MSELoss()(X, X)
    assert sink.rows("model", "step") == [("MSELoss", 0), ("MSELoss", 1), ("MSELoss", 2)]


def test_losses_made_anew_are_recorded_whenever_the_last_is_collected() -> None:
    before = gc.get_threshold()
    try:
        with recording() as sink:
            for threshold in range(2, 500):
                gc.set_threshold(threshold)  # moves the collection to another place
                loss = nn.MSELoss()
                loss.itself = [loss]  # only the cycle collector frees it
                loss(X, X)
    finally:
        gc.set_threshold(*before)
    assert sink.rows("step") == list(range(498))


def test_a_module_made_inside_a_forward_is_glue() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.Softmax(dim=-1)(self.linear(x))

    with recording() as sink:
        Attention()(X)
    assert sink.rows("model", "module") == [("Attention", "linear"), ("Attention", "")]


def test_a_shared_module_goes_by_the_name_under_which_it_runs() -> None:
    class Half(nn.Module):
        def __init__(self, shared: nn.Module) -> None:
            super().__init__()
            self.shared = shared

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.shared(self.shared(x))

    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Linear(3, 3)
            self.left, self.right = Half(shared), Half(shared)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.right(self.left(x))

    with recording() as sink:
        Twins()(X)
    assert sink.rows("module", "call") == [
        ("left.shared", 0), ("left.shared", 1), ("left", 0), ("right.shared", 0), ("right.shared", 1), ("right", 0), ("", 0),
    ]  # fmt: skip


def test_a_module_added_after_the_first_forward_is_recorded() -> None:
    with recording() as sink:
        net = Net()
        net(X)
        net.blocks.append(Block())
        net(X)
    assert "blocks.2.linear" in sink.rows("module", step=1)


def test_modules_are_selected_by_their_canonical_names() -> None:
    with recording(modules=r"^blocks\.1", exclude="act$") as sink:
        Net()(X)
    assert sink.rows("module") == ["blocks.1.linear", "blocks.1"]


def test_models_are_selected_by_name(capfd: pytest.CaptureFixture[str]) -> None:
    with recording(models="Auto") as sink:
        Net()(X)
    assert not sink.records
    assert "OTEL_TORCH_MODELS='Auto' selects none" in capfd.readouterr().err


def test_a_selection_that_matches_no_module_says_so_with_an_example(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with recording(modules="^transformer") as sink:
        Net()(X)
    assert not sink.records
    reported = capfd.readouterr().err
    assert "no module of Net is selected" in reported and "'blocks.1.act'" in reported


WRAPPERS = {
    "compile": lambda net: torch.compile(net, backend="eager"),
    "data_parallel": lambda net: nn.DataParallel(net),
    "checkpoint": lambda net: checkpoint_wrapper(net),
    "both": lambda net: torch.compile(checkpoint_wrapper(net), backend="eager"),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_are_looked_through(wrapper: str) -> None:
    torch._dynamo.reset()
    with recording() as sink:
        WRAPPERS[wrapper](Net())(X)
    assert sink.rows("model", "module") == [("Net", name) for name in ALL]


class Encoding(nn.Module):
    """Shares its encoder with other models, and an activation with all models of its class."""

    activation = nn.SiLU()

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head, self.act = encoder, nn.Linear(3, 3), self.activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.head(self.encoder(x)))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)


class Actor(Encoding):
    pass


class Critic(Encoding):
    pass


def test_a_shared_module_belongs_to_the_model_whose_forward_is_running() -> None:
    whole = ["encoder.linear", "encoder.act", "encoder", "head", "act", ""]
    with recording(capture="inputs,outputs,parameters,gradients") as sink:
        encoder = Block()
        critic, actor = Critic(encoder), Actor(encoder)
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (critic, actor)]
        for _ in range(2):
            for net, optimizer in zip(
                (critic, critic, actor), (*optimizers[:1], *optimizers), strict=True
            ):
                net(X).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        actor.encode(X)
        encoder(X)
    forwards = {"phase": "forward", "tensor": "out"}
    assert sink.rows("module", model="Critic", **forwards)[: 4 * 6] == whole * 4
    assert sink.rows("module", model="Actor", **forwards) == whole * 2 + whole[:3]
    # called from outside, it is the part of the model that was built first
    assert sink.rows("module", model="Critic", **forwards)[4 * 6 :] == whole[:3]
    for name in ("Actor", "Critic"):
        names = sink.rows("module", "tensor", model=name, phase="attach")
        assert names == sink.rows("module", "tensor", model=name, phase="attach", step=0)
        assert {module for module, _ in names} == {"encoder.linear", "head"}
    # one model has the gradient with which an optimizer steps
    steps = sink.rows("model", module="encoder.linear", tensor="param_grad.weight")
    assert Counter(steps) == {"Critic": 4, "Actor": 2}


def test_a_module_of_a_deleted_model_belongs_to_the_next() -> None:
    with recording() as sink:
        Actor(Block())(X)
        gc.collect()
        critic = Critic(Block())
        critic(X)
        critic(X)
    assert sink.rows("model", module="act") == ["Actor", "Critic", "Critic"]


def test_only_the_selected_model_has_records_of_a_shared_module() -> None:
    with recording(models="^Actor$") as sink:
        encoder = Block()
        critic, actor = Critic(encoder), Actor(encoder)
        for net in (critic, actor, critic):
            net(X)
    assert len(sink.rows("module", model="Actor")) == 6 == len(sink.records)


def test_compiled_models_share_a_module() -> None:
    with recording() as sink:
        encoder = Block()
        for net in (Critic(encoder), Actor(encoder)):
            call = torch.compile(net, fullgraph=True, backend="eager")
            call(X)
            call(X)
    assert Counter(sink.rows("model", module="encoder")) == {"Critic": 2, "Actor": 2}


class Owner(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).square().mean()


@pytest.mark.parametrize("ran_before", [False, True], ids=["new", "ran-before"])
@pytest.mark.parametrize("owner_runs", [True, False], ids=["through-the-owner", "directly"])
def test_an_earlier_forward_changes_no_name(owner_runs: bool, ran_before: bool) -> None:
    with recording() as sink:
        net = Block()
        if ran_before:
            net(X)
        owner = Owner(net)
        for _ in range(2):
            (owner if owner_runs else owner.net)(X)
    names = sink.rows("model", "module")[3 * ran_before :]
    own = [("Owner", "")] if owner_runs else []
    assert names == [("Owner", "net.linear"), ("Owner", "net.act"), ("Owner", "net"), *own] * 2


def test_a_model_whose_owner_is_gone_is_a_model_again() -> None:
    with recording() as sink:
        net = Block()
        net(X)
        Owner(net)(X)
        gc.collect()
        net(X)
    assert sink.rows("model", module="") == ["Block", "Owner", "Block"]


@pytest.mark.parametrize("kind", [torch.Tensor.detach, nn.Parameter], ids=["tensor", "parameter"])
def test_a_functional_call_before_training_shifts_no_step(kind) -> None:
    """It runs the model with other tensors as its parameters."""
    with recording(training="0") as sink:
        net = nn.Linear(3, 1)
        others = {name: kind(torch.zeros_like(value)) for name, value in net.named_parameters()}
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        torch.func.functional_call(net, others, (X,))
        for _ in range(3):
            net(X).sum().backward()
            optimizer.step()
        with torch.no_grad():
            torch.func.functional_call(net, others, (X,))
            net(X)
    assert sink.rows("step", "phase")[1:4] == [(0, "forward"), (1, "forward"), (2, "forward")]
    assert sink.rows("step", "phase")[-1] == (3, "eval")


class Wrapper(nn.Module):
    """What averages, shards or converts a model, whatever model it is."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        return self.inner(*args, **kwargs)


class Converting(Wrapper):
    def forward(self, *inputs: torch.Tensor, upcast: bool = True, **kwargs: object) -> object:
        outputs = self.inner(*inputs, **kwargs)
        if upcast:
            outputs = outputs.float()
        return outputs


class Passing(Wrapper):
    """Looks up in the model what it does not have itself."""

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        return self.model()(*args, **kwargs)

    def model(self) -> nn.Module:
        return self.inner

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)


@pytest.mark.parametrize("wrap", [Wrapper, Converting, Passing, AveragedModel])
def test_a_wrapper_of_any_library_is_looked_through(wrap: type[nn.Module]) -> None:
    with recording() as sink:
        wrap(wrap(Net()))(X)
    assert sink.rows("module") == ALL and set(sink.rows("model")) == {"Net"}


class Delegating(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class WithLoss(Delegating):
    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        return self.net(*args, **kwargs).square().mean()


class WithLossInSteps(Delegating):
    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        out = self.net(*args, **kwargs)
        loss = out.square().mean()
        return loss


class WithScale(Wrapper):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.scale = nn.Parameter(torch.ones(()))


class WithHead(Wrapper):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.head = nn.Identity()


class InPlaceOf(Passing):
    """Runs the forward of its module on itself, which is never called."""

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        return type(self.inner).forward(self, *args, **kwargs)


OWNERS = (Delegating, WithLoss, WithLossInSteps, WithScale, WithHead, InPlaceOf)


@pytest.mark.parametrize("owner", OWNERS)
def test_a_model_with_one_child_is_no_wrapper(owner: type[nn.Module]) -> None:
    with recording() as sink:
        owner(Net())(X)
    assert set(sink.rows("model")) == {owner.__name__}
    assert {"", "inner.blocks.0"} <= set(sink.rows("module")) or {"", "net.blocks.0"} <= set(
        sink.rows("module")
    )


def test_wrapped_parts_have_canonical_names() -> None:
    with recording() as sink:
        net = Net()
        net.blocks[0] = checkpoint_wrapper(net.blocks[0])
        net.blocks[1].compile(backend="eager")
        net(X)
    assert sink.rows("module") == ALL


def test_a_model_wrapped_after_its_first_call_stays_the_same_model() -> None:
    with recording() as sink:
        net = Net()
        net(X)
        nn.DataParallel(net)(X)
    assert sink.rows("model", "step", module="") == [("Net", 0), ("Net", 1)]


def test_copies_and_pickles_made_while_attached_carry_nothing_of_ours() -> None:
    with recording() as sink:
        net = Net()
        net(X)
        twin = copy.deepcopy(net)
        data = pickle.dumps(net)
        assert b"otel_torch" not in data
        twin(X)
        pickle.loads(data)(X)
    assert sink.rows("model", "step", module="") == [("Net", 0), ("Net#2", 0), ("Net#3", 0)]
    assert len(sink.rows("module", module="blocks.0")) == 3


def test_several_threads_run_models_of_their_own() -> None:
    with recording() as sink:
        nets = [Net() for _ in range(4)]
        threads = [threading.Thread(target=net, args=(X,)) for net in nets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(sink.rows("model", module="")) == ["Net", "Net#2", "Net#3", "Net#4"]
    assert len(sink.records) == 4 * len(ALL)


def test_a_forward_that_raises_raises_the_same_and_leaves_what_was_recorded() -> None:
    class Failing(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            raise KeyError("mine")

    with recording() as sink:
        net = Failing()
        for _ in range(2):
            with pytest.raises(KeyError, match="mine"):
                net(X)
    # a step is a completed forward: one that raised is tried again, in another call
    assert sink.rows("step", "call", module="blocks.1") == [(0, 0), (0, 1)]
    assert {type(scope.error) for scope in sink.closed if scope.kind == "forward"} == {KeyError}


@pytest.mark.parametrize("method", ["open", "close"])
def test_a_failure_of_ours_at_either_end_of_a_forward_is_said_and_not_raised(
    method: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever fails, such as an allocation: the program's forward does not."""
    original = getattr(Recorder, method)

    def fail(recorder: Recorder, scope: Scope, *args: Any) -> None:
        if scope.kind == "forward":
            raise MemoryError("no more")
        original(recorder, scope, *args)

    monkeypatch.setattr(Recorder, method, fail)
    with recording() as sink:
        net = Net()
        for _ in range(2):
            net(X)
    assert len(sink.rows("step", module="")) == 2
    assert capfd.readouterr().err.count("MemoryError: no more") == 1


def test_a_module_deleted_while_attached_is_forgotten() -> None:
    with recording() as sink:
        net = Net()
        net(X)
        del net.blocks[0]
        gc.collect()
        net(X)
    assert sink.rows("module", step=1) == ["blocks.1.linear", "blocks.1.act", "blocks.1", ""]


def test_ten_thousand_modules_are_attached_once() -> None:
    with recording(stats="shape") as sink:
        net = nn.Sequential(*[nn.Identity() for _ in range(10_000)])
        net(X)
        net(X)
    assert len(sink.records) == 20_002


def test_stopping_leaves_nothing_behind() -> None:
    call, set_state = nn.Module.__call__, nn.Module.__setstate__
    init, backward = torch.optim.Optimizer.__init__, torch.autograd.backward
    net = Net()
    with recording():
        net(X)
        assert nn.Module.__call__ is not call
    assert (nn.Module.__call__, nn.Module.__setstate__) == (call, set_state)
    assert (torch.optim.Optimizer.__init__, torch.autograd.backward) == (init, backward)
    assert all(
        not module._forward_hooks and not module._forward_pre_hooks for module in net.modules()
    )


def test_a_session_after_a_session_records_again() -> None:
    net = Net()
    for _ in range(2):
        with recording() as sink:
            net(X)
        assert sink.rows("step", module="") == [0]


def test_canonical_names_of_a_wrapped_tree() -> None:
    net = Net()
    net.blocks[0] = checkpoint_wrapper(net.blocks[0])
    assert [name for name, _ in named_modules(torch.compile(net))] == [
        "", "blocks", "blocks.0", "blocks.0.linear", "blocks.0.act", "blocks.1", "blocks.1.linear", "blocks.1.act",
    ]  # fmt: skip
    assert class_name(net) == "Net"


RANKED = PROGRAMS / "training/train_in_a_wrapper.py"


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp1", "fsdp2"])
def test_distributed_wrappers_are_looked_through(tmp_path, wrapper: str) -> None:
    run_ranks(tmp_path, RANKED, wrapper)
    for rank in range(2):
        path = tmp_path / f"run.rank{rank}.jsonl"
        keys = [
            (row["model"], row["module"], row["step"])
            for row in lines(path)
            if row["phase"] == "forward"
        ]
        assert keys == [
            ("Net", name, step) for step in (0, 1) for name in ("blocks.0", "blocks.1", "")
        ]
        assert metadata(path)["rank"] == rank and metadata(path)["ended_cleanly"]
    assert not (tmp_path / "run.jsonl").exists()


def test_the_root_of_a_wide_sequential_is_found_in_linear_time(monkeypatch: pytest.MonkeyPatch):
    """Each lookup of a module's root reads all modules of its container."""
    lookups = Counter[str]()
    original = Containers.root_of

    def counting(self: Containers, module: nn.Module, ignore: nn.Module | None = None) -> nn.Module:
        lookups["root_of"] += 1
        return original(self, module, ignore)

    monkeypatch.setattr(Containers, "root_of", counting)
    with recording() as sink:
        nn.Sequential(*(nn.ReLU() for _ in range(50)))(X)
    assert lookups["root_of"] < 5
    assert len(sink.rows("module")) == 51


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
def test_a_model_that_holds_scripts_is_recorded_without_their_parts(
    capfd: pytest.CaptureFixture[str],
) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = nn.Linear(3, 3)
            self.script = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
            self.trace = torch.jit.trace(nn.Linear(3, 3), X)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.script(self.trace(self.plain(x)))  # type: ignore[no-any-return]

    early = Holder()  # alive while recording starts
    with recording() as sink:
        early(X)
        Holder()(X)
    expected = [("Holder", "plain"), ("Holder", "trace"), ("Holder", "")]
    ours = [row for row in sink.rows("model", "module") if row[0].startswith("Holder")]
    assert ours == [*expected, *((f"{model}#2", module) for model, module in expected)]
    printed = capfd.readouterr().err
    assert "takes no hook and is not recorded" in printed and "AttributeError" not in printed
