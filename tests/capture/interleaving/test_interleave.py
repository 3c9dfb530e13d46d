"""Bodies that take turns with a forward: they read and replace values, never hang, and leave no
hook.
"""

import contextvars
import copy
import gc
import pickle
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

import otel_torch
from otel_torch import interleave
from otel_torch.capture.interleaving.interleave_error import InterleaveError
from tests.support import recording, run_python


@pytest.fixture(autouse=True)
def no_thread_stays():
    yield
    names = [
        thread.name for thread in threading.enumerate() if thread.name.startswith("otel_torch")
    ]
    assert names == []


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.linear(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.h:
            x = block(x, scale=2.0)
        return self.head(x)


def make() -> Net:
    torch.manual_seed(0)
    return Net()


X = torch.linspace(-1, 1, 8).reshape(2, 4)


def test_a_read_returns_the_value_and_pauses_the_model() -> None:
    model = make()
    seen = []
    model.h[1].register_forward_hook(lambda *_: seen.append("h.1"))
    exact = model(X)
    seen.clear()
    with interleave(model).invoke(X) as run:
        first = run.h[0].output
        assert seen == []  # the model is paused after h[0]
        assert run.h[0].output is first
        args, kwargs = run.h[1].inputs
        assert args[0] is first and kwargs == {"scale": 2.0} and run.h[1].input is first
        assert run.h[1].linear.output.shape == (2, 4) and run.model.h[-1].output.shape == (2, 4)
        assert seen == ["h.1"] and len(run.h) == 3 and run["h.2"].output is run.h[2].output
        assert torch.equal(run.output, exact) and torch.equal(run.result, exact)


def test_an_assigned_value_replaces_the_model_s() -> None:
    model = make()
    it = interleave(model)
    with it.invoke(X) as run:
        run.h[1].output = torch.zeros(2, 4)
        assert torch.equal(run.h[2].input, torch.zeros(2, 4))
    assert torch.equal(it.result, model.head(model.h[2](torch.zeros(2, 4), scale=2.0)))
    with it.invoke(X) as run:
        run.h[0].input = X * 0
        run.h[1].inputs = (X,), {"scale": 0.0}
        assert torch.equal(run.h[1].output, X)
        run.head.output = run.head.output + 1
        assert torch.equal(run.result, model.head(model.h[2](X, scale=2.0)) + 1)
    assert torch.equal(it.result, model.head(model.h[2](X, scale=2.0)) + 1)


def test_leaving_the_body_lets_the_forward_finish() -> None:
    model = make()
    it = interleave(model)
    with it.invoke(X) as run:
        run.h[0].output  # noqa: B018
    assert torch.equal(it.result, model(X))
    with it.invoke(X):
        pass
    assert torch.equal(it.result, model(X))


def test_two_runs_interleave_as_the_body_asks() -> None:
    model = make()
    it = interleave(model)
    y = X.flip(0) * 2
    with it.invoke(X) as a, it.invoke(y) as b:
        hidden = b.h[1].output
        a.h[1].output = hidden  # activation patching
        patched = a.result
        assert torch.equal(b.result, model(y))
    assert torch.equal(patched, model(y)) and not torch.equal(patched, model(X))


def test_gradients_are_read_and_replaced() -> None:
    model = make()
    x = X.clone().requires_grad_()
    model(x).sum().backward()
    expected, x.grad = x.grad.clone(), None
    with interleave(model).invoke(x) as run:
        hidden = run.h[1].output
        hidden.retain_grad()
        run.result.sum().backward()
        assert torch.equal(run.h[1].grad, hidden.grad) and run.h[1].grad.shape == (2, 4)
    assert torch.equal(x.grad, expected)
    x.grad = None
    with interleave(model).invoke(x) as run:
        run.h[0].output  # noqa: B018
        run.h[0].grad = torch.zeros(2, 4)
        run.result.sum().backward()
    assert torch.equal(x.grad, torch.zeros(2, 4))

    def train(x: torch.Tensor) -> None:
        model(x).sum().backward()

    x.grad = None
    with interleave(model).execute(train, x) as run:
        assert run.h[0].grad.shape == (2, 4)  # the model's own code calls backward
    assert torch.equal(x.grad, expected)
    with (
        pytest.raises(
            InterleaveError, match=r"no gradient came to model\.h\.0: call backward\(\) first"
        ),
        interleave(model).invoke(x) as run,
    ):
        run.h[0].grad  # noqa: B018


def test_calls_that_passed_or_never_come_are_errors() -> None:
    model = make()
    it = interleave(model)
    with (
        pytest.raises(
            InterleaveError,
            match=r"model\.h\.0\.output of call 0 has already passed \(the forward waits at",
        ),
        it.invoke(X) as run,
    ):
        run.h[2].input  # noqa: B018
        run.h[0].output  # noqa: B018
    with (
        pytest.raises(
            InterleaveError,
            match=r"model\.head\.output of call 1 never came: the forward has ended after 1 calls",
        ),
        it.invoke(X) as run,
    ):
        run.next()
        run.head.output  # noqa: B018
    with pytest.raises(InterleaveError, match="already passed"), it.invoke(X) as run:
        run.h[1].output  # noqa: B018
        run.h[0].output = X
    with pytest.raises(InterleaveError, match="only inside its `with`"):
        run.h[2].output  # noqa: B018
    with pytest.raises(InterleaveError, match="entered once"), run:
        pass
    assert not any(module._forward_hooks for module in model.modules())


def test_next_goes_on_to_the_next_call() -> None:
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=50, bos_token_id=0, eos_token_id=49
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval()
    tokens = torch.tensor([[1, 2, 3]])
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(tokens, **options)
    generated = []
    it = interleave(model)
    with it.execute(model.generate, tokens, **options) as run:
        for _ in range(3):
            generated.append(run.lm_head.output[0, -1].argmax().item())
            run.next()
    assert generated == expected[0, 3:].tolist() and torch.equal(it.result, expected)

    shared = nn.Linear(4, 4)
    twice = nn.Sequential(shared, shared)
    with interleave(twice).invoke(X) as run:
        first = run[0].output
        assert torch.equal(run[0].next().output, shared(first)) and torch.equal(
            run.output, shared(first)
        )


def test_an_error_on_either_side_ends_both_and_is_raised_once() -> None:
    model = make()
    it = interleave(model)
    ran = []
    model.h[2].register_forward_hook(lambda *_: ran.append(1))
    with pytest.raises(ZeroDivisionError), it.invoke(X) as run:
        run.h[0].output  # noqa: B018
        1 / 0  # noqa: B018
    assert ran == []
    with pytest.raises(RuntimeError, match="mat1 and mat2"), it.invoke(torch.ones(2, 5)) as run:
        run.h[1].output  # noqa: B018
    with pytest.raises(RuntimeError, match="mat1 and mat2"), it.invoke(torch.ones(2, 5)):
        pass
    with it.invoke(torch.ones(2, 5)) as run, pytest.raises(RuntimeError, match="mat1 and mat2"):
        run.result  # noqa: B018
    with it.invoke(X) as run:
        assert run.result.shape == (2, 2)


def test_the_model_runs_in_the_body_s_thread_state() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="")
    seen: list[object] = []

    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(
                (
                    torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"),
                    torch.get_autocast_dtype("cpu"), torch.get_default_dtype(), torch.empty(0).device.type, variable.get(),
                )
            )  # fmt: skip
            return x

    variable.set("mine")
    it = interleave(nn.Sequential(Looks()))
    with (
        torch.no_grad(),
        torch.autocast("cpu", dtype=torch.float16),
        torch.device("meta"),
        it.invoke(X),
    ):
        pass
    with torch.inference_mode(), it.invoke(X):
        pass
    with it.invoke(X):
        pass
    assert seen == [
        (False, False, True, torch.float16, torch.float32, "meta", "mine"),
        (False, True, False, torch.bfloat16, torch.float32, "cpu", "mine"),
        (True, False, False, torch.bfloat16, torch.float32, "cpu", "mine"),
    ]


def test_a_child_with_the_name_of_an_attribute(capfd: pytest.CaptureFixture[str]) -> None:
    config = BertConfig(
        num_hidden_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        intermediate_size=8,
        vocab_size=20,
    )
    model = BertModel(config).eval()
    with torch.no_grad(), interleave(model).invoke(torch.tensor([[1, 2]])) as run:
        inner = run["encoder.layer.0.output"].output
        assert inner.shape == (1, 2, 8) and run.encoder.layer[0].output is not None
    assert "encoder.layer.0 has a module called 'output'" in capfd.readouterr().err


def test_missing_modules_raise_with_the_existing_names() -> None:
    with interleave(make()).invoke(X) as run:
        with pytest.raises(AttributeError, match="Net has no module 'heads'; it has h, head"):
            run.heads  # noqa: B018
        with pytest.raises(KeyError, match="h has no module '7'; it has 0, 1, 2"):
            run.h["7"]
        with pytest.raises(IndexError, match="h has 3 entries, none at index 3"):
            run.h[3]
        with pytest.raises(TypeError, match="head is not a list"):
            run.head[0]
        with pytest.raises(AttributeError, match="'bias' cannot be assigned"):
            run.head.bias = 1
        assert [layer.output.shape for layer in run.h[:2]] == [(2, 4)] * 2


def test_bodies_as_functions_wait_at_a_barrier() -> None:
    model = make()
    it = interleave(model)
    barrier = it.barrier(2)
    shared: dict[str, torch.Tensor] = {}

    def give(run: object) -> None:
        shared["hidden"] = run.h[1].output
        barrier()

    def take(run: object) -> torch.Tensor:
        barrier()
        run.h[1].output = shared["hidden"]
        return run.result

    y = X.flip(0) * 2
    giver, taker = it.invoke(y).do(give), it.invoke(X).do(take)
    assert giver.wait() is None and torch.equal(taker.wait(), model(y))
    lonely = it.barrier(3)
    runs = [it.invoke(X).do(lambda run: lonely()) for _ in range(2)]
    for run in (*runs, it.invoke(X).do(lambda run: None)):
        if run is runs[0] or run is runs[1]:
            continue
        run.wait()
    for run in runs:
        with pytest.raises(
            InterleaveError, match=r"barrier\(3\) was reached by 2 bodies; the others have ended"
        ):
            run.wait()
    with pytest.raises(InterleaveError, match="give one to `do` first"):
        it.invoke(X).wait()


def test_a_compiled_body_hooks_only_the_modules_it_asked_for() -> None:
    model = make()
    it = interleave(model)
    hooked: list[int] = []

    def body(run: object) -> torch.Tensor:
        total = run.h[1].output.sum()
        hooked.append(sum(bool(module._forward_hooks) for module in model.modules()))
        return total

    total = it.compile(body)
    assert torch.equal(total(X), total(X)) and hooked == [9, 1]
    changing = it.compile(lambda run: run.h[len(hooked) - 2].output.sum())
    changing(X)
    hooked.append(0)
    with pytest.raises(
        InterleaveError, match=r"asks for 'h\.1', which it did not in its first call"
    ):
        changing(X)


def test_a_cache_holds_the_values_that_the_bodies_assigned() -> None:
    model = make()
    it = interleave(model)
    cache = it.cache(["h.0", "head"])
    with it.invoke(X) as run:
        run.h[0].output = torch.ones(2, 4)
    assert torch.equal(cache.h[0].output, torch.ones(2, 4)) and torch.equal(
        cache.head.output, it.result
    )
    model(X)
    assert len(cache.head.calls) == 1


def test_a_recorded_run_has_a_span() -> None:
    model = make()
    with recording() as sink, interleave(model).invoke(X) as run:
        run.h[1].output = torch.ones(2, 4)
        run.result  # noqa: B018
    assert sink.rows("stats", module="h.1")[0]["mean"] == 1.0
    (span,) = [scope for scope in sink.closed if scope.name == "torch.interleave"]
    assert [event[2]["torch.module"] for event in span.events] == [
        "h.1",
        "",
    ] and span.attributes == {"torch.model": "Net"}


def test_plain_calls_and_other_threads_are_not_paused() -> None:
    model = make()
    exact = model(X)
    with interleave(model).invoke(X) as run:
        run.h[0].output  # noqa: B018
        assert torch.equal(model(X), exact)


def test_under_compile(fresh_compiler: None) -> None:
    model = make()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad(), interleave(compiled).invoke(X) as run:
        run.h[0].output = torch.zeros(2, 4)
        output = run.result
    with torch.no_grad():
        assert torch.equal(
            output, model.head(model.h[2](model.h[1](torch.zeros(2, 4), scale=2.0), scale=2.0))
        )


def test_no_hook_remains() -> None:
    model = make()
    gc.collect()
    before = len(gc.get_objects())
    for index in range(200):
        try:
            with interleave(model).invoke(X) as run:
                run.h[1].output  # noqa: B018
                if index % 2:
                    raise KeyError
        except KeyError:
            pass
    del run
    gc.collect()
    assert len(gc.get_objects()) - before < 200
    assert torch.equal(pickle.loads(pickle.dumps(model))(X), copy.deepcopy(model)(X))
    assert otel_torch.ModuleHookManager.get_from(model) is None


def test_a_body_that_asks_for_nothing_needs_no_thread_and_no_hook() -> None:
    net, seen = Net(), []

    def look(module: nn.Module, args: object) -> None:
        ours = [len(part._forward_pre_hooks) for part in net.modules() if part is not net.head]
        seen.append(
            (
                threading.current_thread() is threading.main_thread(),
                torch.is_grad_enabled(),
                sum(ours),
            )
        )

    net.head.register_forward_pre_hook(look)
    it = interleave(net)
    cache = it.cache()
    with torch.no_grad(), it.invoke(torch.ones(1, 4)) as run:
        torch.set_grad_enabled(
            True
        )  # the forward has the state of the moment when the run was entered
    assert seen == [(True, False, 0)] and len(cache) == 8
    assert torch.equal(cache["head"].output, it.result)
    with it.invoke(torch.ones(1, 4)) as run:
        assert run.h[0].output.requires_grad
    assert seen[1] == (False, True, len(list(net.modules())) - 1)


def test_a_run_inside_the_forward_of_another_does_not_change_that_one() -> None:
    net, inner = Net(), interleave(Net())

    def look(module: nn.Module, args: object) -> None:
        with inner.invoke(torch.ones(1, 4)):
            pass

    net.h[1].register_forward_pre_hook(look)
    with interleave(net).invoke(torch.ones(1, 4)) as run:
        first, last = run.h[0].output, run.h[2].output
        assert torch.equal(run.result, net.head(last)) and not torch.equal(first, last)
    assert inner.result.shape == (1, 2)


def test_a_run_that_cannot_be_entered_leaves_no_hook() -> None:
    net = Net()
    it = interleave(net)
    it.cache()
    it.cache("no.such.module")
    for _ in range(2):
        with (
            pytest.raises(ValueError, match=r"no module of Net matches 'no\.such\.module'"),
            it.invoke(torch.ones(1, 4)),
        ):
            pass
    assert not any(part._forward_hooks for part in net.modules())


@pytest.mark.parametrize("asks", [False, True])
def test_a_run_frees_its_tensors_without_the_garbage_collector(asks: bool) -> None:
    it = interleave(Net())
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad(), it.invoke(torch.ones(1, 4)) as run:
            if asks:
                assert run.head.output.shape == (1, 2)
        reference = weakref.ref(it.result)
        del run, it
        assert reference() is None
    finally:
        gc.enable()


def test_a_model_that_outlives_the_session_ends_quietly(tmp_path: Path) -> None:
    """Python clears the globals of modules before it frees a model that the cache still holds."""
    program = """
import torch
import otel_torch
model = torch.nn.Sequential(torch.nn.Linear(2, 2))
interleaver = otel_torch.interleave(model)
cache = interleaver.cache(["0"])
with torch.no_grad(), interleaver.invoke(torch.ones(1, 2)):
    pass
"""
    assert "Exception ignored" not in run_python(tmp_path, program, fresh=True).stderr
