"""Recording is invisible: a program computes the same bits, and nothing is left behind."""

from __future__ import annotations

import gc
import random
import runpy
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from otel_torch import session
from otel_torch.sources.tensors import tensor_measurer
from tests.support import recording

ALL_STATS = "abs_mean,sum,min,max,mean,std,nonfinite,rms,l2,zeros,numel,shape,dtype"
EVERYTHING = "inputs,outputs,gradients,parameters"


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def random_state() -> list[Any]:
    return [torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)]


def bits(value: Any) -> Any:
    """Return a value with every tensor replaced by its type, shape, strides and bytes."""
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            return "meta", value.dtype, tuple(value.shape)
        plain = value.detach().cpu().contiguous()
        return (
            value.dtype,
            tuple(value.shape),
            value.stride(),
            value.requires_grad,
            plain.reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return value


def assert_neutral(program: Callable[[], Any], records: bool = True, **settings: str) -> list[Any]:
    """Run a program without recording and with everything recorded; check that bits and random
    states agree.
    """
    outcomes = []
    for attempt in (
        nullcontext(),
        recording(**({"capture": EVERYTHING, "stats": ALL_STATS} | settings)),
    ):
        seed()
        with attempt as sink:
            outcomes.append(bits([program(), random_state()]))
    assert outcomes[0] == outcomes[1]
    keys = [tuple(record.key().values()) for record in sink.records]
    assert len(set(keys)) == len(keys), "a key was recorded twice"
    assert bool(keys) == records
    assert not session.current()
    return sink.records


class Net(nn.Module):
    """In-place modules, dropout, a buffer that changes, a dict output, a parameter that is
    returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.3)
        )
        self.second = nn.Linear(8, 4)
        self.scale = Scale()

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = self.first(x)
        return {
            "logits": self.second(hidden) * self.scale(),
            "hidden": (hidden, [hidden.argmax(-1)]),
        }


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 1.5))

    def forward(self) -> torch.Tensor:
        return self.weight


def train(
    wrap: Callable[[nn.Module], Callable[..., Any]] = lambda net: net,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Any:
    net = Net()
    call = wrap(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    seen = []
    for _ in range(3):
        for _ in range(2):
            x = torch.randn(5, 4) + random.random() + np.random.rand()
            with within():
                output = call(x)
                loss = output["logits"].float().pow(2).mean()
            loss.backward()
            seen += [output, loss]
        seen += [parameter.grad.clone() for parameter in net.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [seen, net.state_dict(), optimizer.state_dict()["state"]]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SURROUNDINGS = {
    "nothing": nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "deterministic": deterministic,
    "saved_tensors": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.clone(), lambda t: t
    ),
    "default_bf16": lambda: default_dtype(torch.bfloat16),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_training_is_bit_identical(name: str) -> None:
    assert_neutral(lambda: train(within=SURROUNDINGS[name]))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_training_is_bit_identical(reentrant: bool) -> None:
    records = assert_neutral(
        lambda: train(
            lambda net: (
                lambda x: {
                    "logits": checkpoint(
                        lambda y: net(y)["logits"], x.requires_grad_(), use_reentrant=reentrant
                    )
                }
            )
        )
    )
    assert {"recompute", "backward"} <= {record.phase for record in records}


def test_a_second_backward_pass_through_the_same_call_has_keys_of_its_own() -> None:
    def penalised() -> Any:
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        x = torch.randn(2, 4, requires_grad=True)
        output = net(x).sum()
        (slope,) = torch.autograd.grad(output, x, create_graph=True)
        (output + slope.pow(2).sum()).backward()
        return [x.grad, *(parameter.grad for parameter in net.parameters())]

    records = assert_neutral(penalised)
    assert {"grad", "grad#2"} <= {record.tensor for record in records}


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, torch.enable_grad], ids=lambda mode: mode.__name__
)
def test_inference_is_bit_identical(mode: Any) -> None:
    def infer() -> Any:
        net = Net().eval()
        with mode():
            return [net(torch.randn(5, 4)), net.second(torch.randn(1, 8))]

    records = assert_neutral(infer)
    assert {"out.logits", "out.hidden[0]", "out.hidden[1][0]"} <= {
        record.tensor for record in records
    }


def test_a_default_device_without_memory_is_left_alone() -> None:
    def infer() -> Any:
        with torch.device("meta"):
            net = Net()
            output = net(torch.ones(5, 4))
        with torch.device("cpu"):
            real = Net()(torch.ones(5, 4))
        return [output, real]

    records = assert_neutral(infer)
    shapes = {record.model: record.stats for record in records if record.tensor == "out.logits"}
    assert set(shapes["Net"]) == {"shape", "dtype", "numel"} and "mean" in shapes["Net#2"]


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [Functions, Operations])
def test_modes_of_the_user_see_nothing_of_ours(kind: type) -> None:
    def watched() -> Any:
        net = Net()
        with kind() as mode:
            net(torch.ones(5, 4))["logits"].sum().backward()
            net(torch.ones(5, 4))["logits"].sum().backward()
        return [str(seen) for seen in mode.seen if "__get__" not in str(seen)]

    assert_neutral(watched)


def test_a_flop_counter_counts_the_program_only() -> None:
    def counted() -> Any:
        net = Net()
        with FlopCounterMode(display=False) as counter:
            net(torch.ones(5, 4))["logits"].sum().backward()
        return counter.get_total_flops()

    assert_neutral(counted)


def test_the_users_own_hooks_run_in_their_order_and_may_change_the_output() -> None:
    def hooked() -> Any:
        net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        order: list[str] = []
        net[0].register_forward_hook(lambda module, args, output: order.append("early"))
        net(torch.randn(2, 4))
        net[0].register_forward_hook(
            lambda module, args, output: (order.append("late"), output * 2)[1]
        )
        net[0].register_forward_pre_hook(lambda module, args: order.append("before"))
        net[0].register_full_backward_hook(lambda module, before, after: order.append("backward"))
        net[1].register_forward_hook(
            lambda module, args, output: order.append("always"), always_call=True
        )
        output = net(torch.randn(2, 4).requires_grad_())
        output.sum().backward()
        return [order, output]

    assert_neutral(hooked)


def transforms(net: nn.Module, x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    parameters = {name: parameter.detach() for name, parameter in net.named_parameters()}

    def stateless(values: dict[str, torch.Tensor], one: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, values, (one,)).sum()

    many = {name: torch.stack([value, value * 2]) for name, value in parameters.items()}
    return {
        "vmap": lambda: torch.vmap(net)(x),
        "grad": lambda: torch.func.grad(stateless)(parameters, x),
        "per_sample": lambda: torch.vmap(torch.func.grad(stateless), (None, 0))(parameters, x),
        "ensemble": lambda: torch.vmap(stateless, (0, None))(many, x),
        "jvp": lambda: torch.func.jvp(net, (x,), (x,)),
        "jacrev": lambda: torch.func.jacrev(net)(x),
        "hessian": lambda: torch.func.hessian(lambda one: net(one).sum())(x[0]),
        "vmap_random": lambda: torch.vmap(
            lambda one: nn.functional.dropout(net(one), 0.5), randomness="different"
        )(x),
    }


@pytest.mark.parametrize("name", sorted(transforms(nn.Linear(1, 1), torch.ones(1, 1))))
def test_function_transforms_are_bit_identical(name: str) -> None:
    def transformed() -> Any:
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        return transforms(net, torch.randn(3, 4))[name]()

    assert_neutral(transformed)


def test_a_forward_that_raises_raises_the_same() -> None:
    def raising() -> Any:
        net, reported = Net(), []
        for x in (torch.ones(5, 3), torch.ones(5, 4), "no tensor", torch.ones(1, 4)):
            try:
                net(x)
            except Exception as error:
                reported.append((type(error).__name__, str(error), error.__cause__))
        return [reported, net.first[1].running_mean]

    assert_neutral(raising)


def test_an_error_inside_measuring_never_reaches_the_program(
    monkeypatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("boom in measuring")

    monkeypatch.setattr(tensor_measurer, "measure", broken)
    with recording(capture=EVERYTHING, training="0") as sink:
        running = session.current()
        assert running is not None
        train()
        assert not sink.records
        lost = {reason: number for _, reason, number in running.recorder.losses.items()}
    assert lost["error"] > 100
    assert capfd.readouterr().err.count("boom in measuring") <= 4  # once for each kind of tensor


def test_nothing_grows_over_many_steps_and_activations_die() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    alive: list[weakref.ref[torch.Tensor]] = []

    def step() -> None:
        output = net(torch.randn(5, 4))
        output["logits"].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        alive.append(weakref.ref(output["hidden"][0]))

    def objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    with recording(capture=EVERYTHING) as sink:
        for _ in range(20):
            step()
        (
            sink.records.clear(),
            sink.batches.clear(),
            sink.opened.clear(),
            sink.closed.clear(),
            alive.clear(),
        )
        before = objects()
        for _ in range(60):
            step()
            sink.records.clear(), sink.batches.clear(), sink.opened.clear(), sink.closed.clear()
        assert [reference() for reference in alive] == [None] * 60
        alive.clear()
        assert objects() - before < 100
        # a hook on a parameter that a module hands out would outlive every step
        hooks = net.scale.weight._backward_hooks
        assert hooks is None or len(hooks) <= 1
    assert not net.scale.weight._backward_hooks


def test_hooks_on_parameters_do_not_pile_up_without_a_backward_pass() -> None:
    net = Scale()
    with recording(capture="gradients"):
        for _ in range(50):
            net()
        assert len(net.weight._backward_hooks or {}) <= 1
    assert not net.weight._backward_hooks


PROGRAMS = Path(__file__).parent.parent / "examples"


def run_example(name: str, *modules: str) -> Any:
    for module in modules:
        pytest.importorskip(module)
    return runpy.run_path(str(PROGRAMS / name))["main"]()


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("quickstart.py", "diffusers"),
        ("diffusers_generate.py", "diffusers"),
        ("transformers_train.py", "transformers"),
    ],
)
def test_the_examples_compute_the_same(
    name: str, needs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(needs)
    printed: list[str] = []

    def program() -> Any:
        result = run_example(name, needs)
        printed.append(capsys.readouterr().out)
        return result

    assert_neutral(program)
    assert printed[0] == printed[1]


def test_a_language_model_that_trains_and_samples_is_bit_identical() -> None:
    transformers = pytest.importorskip("transformers")

    def program() -> Any:
        config = transformers.GPT2Config(
            vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=32
        )
        model = transformers.GPT2LMHeadModel(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        ids, seen = torch.arange(16).reshape(2, 8), []
        for _ in range(2):
            model.train()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            seen += [loss, norm, [parameter.grad.clone() for parameter in model.parameters()]]
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            seen.append(model.generate(ids, max_new_tokens=4, do_sample=True, pad_token_id=0))
        return [seen, model.state_dict()]

    assert_neutral(program)
