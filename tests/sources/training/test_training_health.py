"""The rows of phase `train` have what the program itself computes."""

from __future__ import annotations

import math
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import PROGRAMS, ListSink, lines, metadata, recording, run_python

X = torch.linspace(-1, 1, 8).view(2, 4)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def loss_of(model: nn.Module, scale: float = 1.0) -> torch.Tensor:
    return (scale * model(X)).square().mean()


def values(sink: ListSink, tensor: str, module: str = "", **where: Any) -> list[float]:
    """Return the values of one quantity, in order."""
    rows = sink.rows("stats", phase="train", tensor=tensor, module=module, **where)
    return [float(stats["mean"]) for stats in rows]


def norm(tensors: Any) -> float:
    return math.sqrt(sum(float(tensor.detach().double().square().sum()) for tensor in tensors))


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def copies(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def test_losses_and_rates_are_those_of_the_program() -> None:
    model = network()
    groups = [
        {"params": model[0].parameters(), "lr": 0.1, "name": "first"},
        {"params": model[2].parameters(), "lr": 0.01, "weight_decay": 0.5},
    ]
    optimizer = torch.optim.AdamW(groups)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    losses, rates = [], []
    with recording() as sink:
        for _ in range(3):
            loss = loss_of(model)
            optimizer.zero_grad()
            loss.backward()
            losses.append(loss.item())
            rates.append(schedule.get_last_lr())
            optimizer.step()
            schedule.step()
    assert values(sink, "loss") == losses
    assert values(sink, "lr[first]") == [rate[0] for rate in rates]
    assert values(sink, "lr[1]") == [rate[1] for rate in rates]
    assert values(sink, "weight_decay[1]") == [0.5] * 3
    assert sink.rows("step", "call", phase="train", tensor="loss") == [(0, 0), (1, 0), (2, 0)]
    assert {*sink.rows("model", phase="train")} == {"Sequential"}


def test_norms_are_those_of_the_gradients_and_of_the_update() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
    total, by_module, sizes, ratios, of_module = [], [], [], [], []
    with recording() as sink:
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model).backward()
            total.append(norm(gradients(model)))
            by_module.append(norm(gradients(model[2])))
            before = copies(model)
            optimizer.step()
            changes = [new - old for new, old in zip(copies(model), before, strict=True)]
            sizes.append(norm(before))
            ratios.append(norm(changes) / norm(before))
            of_module.append(norm(changes[2:]) / norm(before[2:]))
    assert values(sink, "grad_norm") == pytest.approx(total)
    assert values(sink, "grad_norm", "2") == pytest.approx(by_module)
    assert values(sink, "param_norm") == pytest.approx(sizes)
    assert values(sink, "update_ratio") == pytest.approx(ratios)
    assert values(sink, "update_ratio", "2") == pytest.approx(of_module)
    assert not values(sink, "grad_norm_clipped")


@pytest.mark.parametrize("max_norm", [0.01, 100.0])
def test_a_clipped_norm_is_the_one_that_the_program_got(max_norm: float) -> None:
    from torch.nn.utils import clip_grad_norm_

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    returned, clipped, by_module = [], [], []
    with recording() as sink:
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model).backward()
            by_module.append(norm(gradients(model[0])))
            returned.append(clip_grad_norm_(model.parameters(), max_norm).item())
            clipped.append(norm(gradients(model)))
            optimizer.step()
    assert values(sink, "grad_norm") == returned
    assert values(sink, "grad_norm_clipped") == pytest.approx(clipped, rel=1e-4)
    assert values(sink, "grad_norm", "0") == pytest.approx(by_module, rel=1e-4)


def test_a_nan_that_clipping_spreads_stays_with_the_module_that_had_it() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    with recording() as sink:
        loss_of(model).backward()
        expected = norm(gradients(model[0]))
        model[2].bias.grad[0] = math.nan
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert all(gradient.isnan().all() for gradient in gradients(model))
        optimizer.step()
    assert values(sink, "grad_norm", "0") == pytest.approx([expected])
    assert math.isnan(values(sink, "grad_norm", "2")[0])


def test_norms_of_modules_before_clipping_where_precisions_are_mixed() -> None:
    """Torch computes the norm of a bfloat16 gradient in three digits: ours has more."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = nn.Linear(4, 6).bfloat16(), nn.Linear(6, 3)
            self.last = nn.Linear(3, 5).bfloat16()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.high(self.low(x.bfloat16()).float()).bfloat16()).float()

    torch.manual_seed(0)
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    with recording() as sink:
        loss_of(model).backward()
        expected = {name: norm(gradients(part)) for name, part in model.named_children()}
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    for name, value in expected.items():
        assert values(sink, "grad_norm", name) == pytest.approx([value], rel=5e-3)


def test_every_group_that_is_clipped_alone_counts_in_the_total() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    with recording() as sink:
        loss_of(model).backward()
        expected = norm(gradients(model))
        for part in model[0], model[2]:
            nn.utils.clip_grad_norm_(part.parameters(), 0.05)
        clipped = norm(gradients(model))
        optimizer.step()
    assert values(sink, "grad_norm") == pytest.approx([expected], rel=1e-4)
    assert values(sink, "grad_norm_clipped") == pytest.approx([clipped], rel=1e-4)


def test_the_largest_norm_as_the_limit_of_clipping_is_no_gradient_norm() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    with recording() as sink:
        loss_of(model).backward()
        expected = norm(gradients(model))
        nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=math.inf)
        optimizer.step()
    assert values(sink, "grad_norm") == pytest.approx([expected], rel=1e-3)


def test_accumulated_losses_are_calls_of_their_step() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    with recording() as sink:
        for _ in range(2):
            for part in range(4):
                loss = loss_of(model, part + 1) / 4
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    assert values(sink, "loss") == losses
    places = [(step, call) for step in range(2) for call in range(4)]
    assert sink.rows("step", "call", phase="train", tensor="loss") == places
    assert len(values(sink, "grad_norm")) == 2


class Generator(nn.Sequential):
    pass


class Critic(nn.Sequential):
    pass


@pytest.mark.parametrize("together", [False, True])
def test_losses_of_a_generator_and_a_critic_are_told_apart(together: bool) -> None:
    torch.manual_seed(0)
    generator, critic = Generator(nn.Linear(4, 4)), Critic(nn.Linear(4, 1))
    optimizers = {
        "Critic": torch.optim.SGD(critic.parameters(), 0.1),
        "Generator": torch.optim.SGD(generator.parameters(), 0.2),
    }
    expected: dict[str, list[float]] = {"Critic": [], "Generator": []}
    with recording() as sink:
        for _ in range(3):
            fake = generator(X)
            optimizers["Critic"].zero_grad()
            for loss in critic(X).mean(), -critic(fake.detach()).mean():
                if not together:
                    loss.backward()
                    expected["Critic"].append(loss.item())
            if not together:
                optimizers["Critic"].step()
            optimizers["Generator"].zero_grad()
            loss = critic(fake).mean()
            loss.backward()
            expected["Generator"].append(loss.item())
            if together:
                optimizers["Critic"].zero_grad()
                loss = critic(X).mean() - critic(fake.detach()).mean()
                loss.backward()
                expected["Critic"].append(loss.item())
            optimizers["Generator"].step()
            if together:
                optimizers["Critic"].step()
    for name, losses in expected.items():
        assert values(sink, "loss", model=name) == losses, name
        rate = optimizers[name].param_groups[0]["lr"]
        assert values(sink, "lr[0]", model=name) == [rate] * 3


def test_a_second_optimizer_continues_the_numbers_of_the_groups() -> None:
    model = network()
    first = torch.optim.SGD(model[0].parameters(), 0.1)
    second = torch.optim.SGD(model[2].parameters(), 0.2)
    with recording() as sink:
        for _ in range(2):
            loss_of(model).backward()
            first.step(), second.step()
            first.zero_grad(), second.zero_grad()
    assert values(sink, "lr[0]") == [0.1, 0.1]
    assert values(sink, "lr[1]") == [0.2, 0.2]
    assert len(values(sink, "loss")) == 2


def test_scaled_losses_and_skipped_steps() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    losses, scales, norms = [], [], []
    with recording() as sink:
        for turn in range(4):
            optimizer.zero_grad()
            loss = loss_of(model)
            scales.append(scaler.get_scale())
            losses.append(loss.item())
            scaler.scale(loss).backward()
            if turn == 1:
                model[0].weight.grad[0, 0] = math.inf
            else:
                norms.append(norm(gradients(model)) / scales[-1])
            scaler.step(optimizer)
            scaler.update()
    assert values(sink, "loss") == losses
    assert values(sink, "loss_scale") == scales == [1024, 1024, 512, 512]
    assert values(sink, "skipped") == [0, 1, 0, 0]
    assert values(sink, "grad_norm") == pytest.approx(norms)
    steps = sink.rows("step", "call", phase="train", tensor="skipped")
    assert steps == [(0, 0), (1, 0), (1, 1), (2, 0)]


@pytest.mark.parametrize("unscale", [False, True])
def test_a_clipped_norm_is_divided_by_the_scale_that_is_on_it(unscale: bool) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with recording() as sink:
        scaler.scale(loss_of(model) / 2).backward()
        expected = norm(gradients(model)) / 256
        of_module = norm(gradients(model[2])) / 256
        if unscale:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
    assert values(sink, "grad_norm") == pytest.approx([expected], rel=1e-4)
    assert values(sink, "grad_norm", "2") == pytest.approx([of_module])


def test_a_scaled_loss_that_is_divided_afterwards() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with recording() as sink:
        loss = loss_of(model)
        (scaler.scale(loss) / 4).backward()
        scaler.step(optimizer)
    assert values(sink, "loss") == pytest.approx([loss.item() / 4])


def test_a_fused_optimizer_divides_by_the_scale_itself() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with recording() as sink:
        for turn in range(2):
            optimizer.zero_grad()
            scaler.scale(loss_of(model)).backward()
            expected = norm(gradients(model)) / 256
            if turn:
                model[0].weight.grad.fill_(math.nan)
            scaler.step(optimizer)
            scaler.update()
            if not turn:
                assert values(sink, "grad_norm") == pytest.approx([expected])
    assert values(sink, "skipped") == [0, 1]
    assert values(sink, "update_ratio")[1] == 0


def test_each_evaluation_of_a_closure_is_a_call() -> None:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    losses, norms = [], []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        losses.append(loss.item())
        norms.append(norm(gradients(model)))
        return loss

    with recording() as sink:
        for _ in range(2):
            optimizer.step(closure)
    assert values(sink, "loss") == losses
    assert values(sink, "grad_norm") == pytest.approx(norms)
    assert len(values(sink, "lr[0]")) >= 1


def test_a_program_that_updates_its_parameters_itself() -> None:
    model = network()
    losses = []
    with recording() as sink:
        for _ in range(4):
            loss = loss_of(model)
            loss.backward()
            losses.append(loss.item())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    assert values(sink, "loss") == losses
    assert len(values(sink, "grad_norm")) == 4


def test_a_program_that_trains_nothing_has_no_rows() -> None:
    model = network()
    with recording() as sink:
        for _ in range(4):
            x = X.clone().requires_grad_()
            model(x).sum().backward()
    assert not sink.rows("tensor", phase="train")


def test_losses_of_several_elements_and_inner_backward_passes_are_no_losses() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recording() as sink:
        y = torch.utils.checkpoint.checkpoint(model, X.clone().requires_grad_(), use_reentrant=True)
        y.backward(torch.ones_like(y), retain_graph=True)
        y.mean().backward()
        optimizer.step()
    assert values(sink, "loss") == [y.mean().item()]


def test_the_settings_select_steps_and_modules_and_switch_it_off() -> None:
    def train(**settings: str) -> ListSink:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with recording(**settings) as sink:
            for _ in range(4):
                loss_of(model).backward()
                optimizer.step()
        return sink

    assert {*train(steps="1,3").rows("step", phase="train")} == {1, 3}
    assert {*train(modules="^2$").rows("module", phase="train")} == {"", "2"}
    assert not train(training="0").rows("tensor", phase="train")
    assert values(train(activations="0", stats="l2"), "loss")


def test_modules_have_rows_in_the_first_steps_and_every_tenth() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recording() as sink:
        for _ in range(25):
            loss_of(model).backward()
            optimizer.step()
    detailed = [*range(10), 10, 20]
    assert sink.rows("step", phase="train", tensor="grad_norm", module="0") == detailed
    assert sink.rows("step", phase="train", tensor="update_ratio", module="") == detailed
    assert sink.rows("step", phase="train", tensor="grad_norm", module="") == [*range(25)]


def test_a_step_counts_its_samples_and_tokens(tmp_path: Path) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4)

        def forward(self, input_ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return scale * self.table(input_ids)

    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recording(jsonl=str(tmp_path / "run.jsonl")) as sink:
        for _ in range(3):
            for _ in range(2):
                model(input_ids=torch.ones(4, 5, dtype=torch.int64)).mean().backward()
            optimizer.step()
        with torch.no_grad():
            model(torch.ones(4, 5, dtype=torch.int64))
    trained = [scope.attributes for scope in sink.closed if scope.kind == "step"][:3]
    assert [step["torch.training.samples"] for step in trained] == [8, 8, 8]
    assert [step["torch.training.tokens"] for step in trained] == [40, 40, 40]
    summary = metadata(tmp_path / "run.jsonl")["training"]["Words"]
    assert summary["steps"] == 3
    assert summary["tokens_per_s"] == pytest.approx(5 * summary["samples_per_s"])


def test_a_model_that_first_runs_in_a_closure_has_all_rows_at_its_first_step() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    sizes, ratios = [], []
    with recording() as sink:
        for _ in range(2):
            before = copies(model)
            optimizer.step(closure)
            changes = [new - old for new, old in zip(copies(model), before, strict=True)]
            sizes.append(norm(before))
            ratios.append(norm(changes) / norm(before))
    assert values(sink, "lr[0]") == [0.1, 0.1]
    assert values(sink, "param_norm") == pytest.approx(sizes)
    assert values(sink, "update_ratio") == pytest.approx(ratios)


def test_a_limit_that_is_infinite_clips_nothing() -> None:
    """Programs ask `clip_grad_norm_` for the norm alone."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recording() as sink:
        loss_of(model).backward()
        expected = nn.utils.clip_grad_norm_(model.parameters(), math.inf).item()
        optimizer.step()
    assert values(sink, "grad_norm") == [expected]
    assert not values(sink, "grad_norm_clipped")


def test_threads_that_train_at_once_keep_their_losses_and_norms_apart() -> None:
    """One thread trains a whole step while a backward pass of the other waits."""
    models = [network(), nn.Sequential(nn.Linear(4, 2))]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    losses: list[list[float]] = [[], []]
    norms: list[list[float]] = [[], []]
    paused, resumed = threading.Event(), threading.Event()

    def wait(gradient: torch.Tensor) -> None:
        paused.set()
        resumed.wait(10)

    def train(number: int, scale: float, *, pauses: bool = False) -> None:
        optimizers[number].zero_grad()
        loss = loss_of(models[number], scale)
        losses[number].append(loss.item())
        if pauses:
            loss.register_hook(wait)
        loss.backward()
        limit = 0.01 if pauses else 0.02
        norms[number].append(nn.utils.clip_grad_norm_(models[number].parameters(), limit).item())
        optimizers[number].step()

    with recording() as sink:
        for number in range(2):
            train(number, 1.0)
        thread = threading.Thread(target=train, args=(0, 2.0), kwargs={"pauses": True})
        thread.start()
        assert paused.wait(10)
        train(1, 3.0)
        resumed.set()
        thread.join()
    for name, model_losses, model_norms in zip(
        ("Sequential", "Sequential#2"), losses, norms, strict=True
    ):
        assert values(sink, "loss", model=name) == pytest.approx(model_losses)
        assert values(sink, "grad_norm", model=name) == pytest.approx(model_norms)


def test_threads_that_train_their_own_models_do_not_crash(tmp_path: Path) -> None:
    """Torch crashes where one thread reads a gradient that another one's backward pass writes."""
    run_python(tmp_path, PROGRAMS / "training/train_in_threads.py")
    rows = [row for row in lines(tmp_path / "run.jsonl") if row["phase"] == "train"]
    losses = [row["model"] for row in rows if row["tensor"] == "loss"]
    assert sorted(Counter(losses).values()) == [150] * 4
