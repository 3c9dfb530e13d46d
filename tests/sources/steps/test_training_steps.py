"""Everything that runs in a training step has its step, phase and span."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from tests.support import ListSink, recording, work_of


class Net(nn.Module):
    def __init__(self, inputs: int = 4, outputs: int = 3) -> None:
        super().__init__()
        self.body = nn.Linear(inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Teacher(Net):
    pass


class Encoder(Net):
    pass


class Average(nn.Module):
    """An exponential moving average, as far as steps are concerned."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = copy.deepcopy(net)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


@contextmanager
def watching() -> Iterator[ListSink]:
    """Record all that training has; no record may be on the span of another step."""
    with recording(capture="outputs,gradients,parameters", stats="abs_mean") as sink:
        yield sink
    for batch in sink.batches:
        for record in batch.records:
            if batch.step is not None and record.phase != "attach":
                place = batch.step.attributes["torch.step"], batch.step.attributes["torch.loop"]
                assert (record.step, record.loop) == place, record


def steps(sink: ListSink, model: str, phase: str = "forward") -> list[int]:
    return sorted(set(sink.rows("step", model=model, phase=phase)))


def updates(sink: ListSink, model: str) -> list[tuple[int, str]]:
    """Return (step, tensor) of the parameters' gradients."""
    rows = sink.rows("step", "tensor", model=model, phase="backward")
    return sorted(row for row in rows if row[1].startswith("param_grad"))


def spans(sink: ListSink) -> list[int]:
    return [scope.attributes["torch.step"] for scope in sink.closed if scope.kind == "step"]


X, LABELS = torch.ones(2, 4), torch.tensor([0, 1])


def update(loss: torch.Tensor, *optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()


def test_a_criterion_has_the_step_and_phase_of_the_model_that_it_judges() -> None:
    with watching() as sink:
        net, criterion = Net(), nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(2):
            for _ in range(2):
                update(criterion(net(X), LABELS), optimizer)
            with torch.no_grad():
                criterion(net(X), LABELS)
    assert steps(sink, "CrossEntropyLoss") == steps(sink, "Net") == [0, 1, 2, 3]
    assert steps(sink, "CrossEntropyLoss", "eval") == steps(sink, "Net", "eval") == [2, 4]
    assert spans(sink) == [0, 1, 2, 3, 4]
    regions = [scope.attributes["torch.region"] for scope in sink.closed if scope.kind == "natural"]
    assert regions.count("torch.step") == 4  # none for an evaluation


def test_frozen_models_around_a_training_step_are_part_of_it() -> None:
    with watching() as sink:
        net, teacher, encoder = Net(), Teacher(), Encoder(4, 4)
        average = Average(net)
        optimizer = torch.optim.AdamW(net.parameters())
        for _ in range(2):
            net.train()
            for _ in range(2):
                with torch.no_grad():
                    teacher(X), teacher(X)  # two views, in front of the trained model
                    latents = encoder(X)
                loss = net(latents).square().mean()
                with torch.no_grad():
                    teacher(X)
                update(loss, optimizer)
                with torch.no_grad():
                    average(X)
            net.eval()
            with torch.no_grad():
                net(encoder(X)), average(X)
    for model in ("Teacher", "Encoder", "Average"):
        assert steps(sink, model) == steps(sink, "Net") == [0, 1, 2, 3], model
    for model in ("Encoder", "Average"):
        assert steps(sink, model, "eval") == steps(sink, "Net", "eval") == [2, 4], model


def test_what_runs_after_training_is_no_part_of_it() -> None:
    with watching() as sink:
        net, other = Net(), Encoder()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(2):
            update(net(X).sum(), optimizer)
        for _ in range(3):
            with torch.no_grad():
                other(X)
    assert steps(sink, "Encoder") == [0, 1, 2]
    assert spans(sink) == [0, 1, 0, 1, 2]
    assert not sink.rows("step", phase="eval")


def test_a_teacher_of_a_second_training_is_part_of_its_steps() -> None:
    with watching() as sink:
        for trained in (Net(), Average(Net())):
            optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
            teacher = Teacher() if isinstance(trained, Average) else None
            for _ in range(3):
                if teacher is not None:
                    with torch.no_grad():
                        teacher(X)
                trained(X).sum().backward()
                optimizer.step()
    assert sink.rows("step", model="Teacher", module="", phase="forward") == [0, 1, 2]


def test_models_outside_of_any_loop_count_their_own_forwards() -> None:
    with watching() as sink:
        net, encoder = Net(), Encoder()
        for _ in range(2):
            with torch.no_grad():
                encoder(X), encoder(X), net(X)
    assert steps(sink, "Encoder") == [0, 1, 2, 3]
    assert steps(sink, "Net") == [0, 1]


def test_a_state_that_was_loaded_says_the_step() -> None:
    net = Net()
    before = torch.optim.Adam(net.parameters())
    for _ in range(3):
        update(net(X).sum(), before)
    with watching() as sink:
        after = torch.optim.Adam(net.parameters())
        after.load_state_dict(before.state_dict())
        for _ in range(2):
            update(net(X).sum(), after)
    assert steps(sink, "Net") == [3, 4]
    assert [step for step, _ in updates(sink, "Net")] == [3, 3, 4, 4]


def test_going_back_to_an_earlier_state_begins_a_loop() -> None:
    with watching() as sink:
        net = Net()
        optimizer = torch.optim.Adam(net.parameters())
        update(net(X).sum(), optimizer)
        state = copy.deepcopy(optimizer.state_dict())
        update(net(X).sum(), optimizer)
        optimizer.load_state_dict(state)
        update(net(X).sum(), optimizer)
    rows = sink.rows("loop", "step", "call", model="Net", module="", phase="forward")
    assert rows == [(0, 0, 0), (0, 1, 0), (1, 1, 0)]


def test_two_optimizers_of_one_model_make_one_step() -> None:
    with watching() as sink:
        net = Net()
        weights = torch.optim.SGD([net.body.weight], 0.1)
        biases = torch.optim.AdamW([net.body.bias])
        for _ in range(3):
            update(net(X).sum(), weights, biases)
    assert steps(sink, "Net") == [0, 1, 2]
    assert updates(sink, "Net") == [
        (step, f"param_grad.{name}") for step in range(3) for name in ("bias", "weight")
    ]
    assert spans(sink) == [0, 1, 2]


def test_an_optimizer_that_steps_inside_the_backward_pass() -> None:
    with watching() as sink:
        net = Net()
        for parameter in net.parameters():
            optimizer = torch.optim.SGD([parameter], 0.1)

            def step(parameter, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            net(X).sum().backward()
    assert steps(sink, "Net") == [0, 1, 2]
    assert [step for step, _ in updates(sink, "Net")] == [0, 0, 1, 1, 2, 2]
    assert spans(sink) == [0, 1, 2]


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("critic_steps", [1, 2])
def test_a_generator_and_a_critic_count_their_own_steps(detach: bool, critic_steps: int) -> None:
    class Generator(Net):
        pass

    with watching() as sink:
        generator, critic, criterion = Generator(4, 4), Net(), nn.CrossEntropyLoss()
        of_generator = torch.optim.Adam(generator.parameters())
        of_critic = torch.optim.Adam(critic.parameters())
        for _ in range(3):
            for _ in range(critic_steps):
                with torch.set_grad_enabled(detach):
                    fake = generator(X).detach()
                loss = criterion(critic(X), LABELS) + criterion(critic(fake), LABELS)
                update(loss, of_critic)
            update(criterion(critic(generator(X)), LABELS), of_generator)
    assert steps(sink, "Generator") == [0, 1, 2]
    assert steps(sink, "Net") == steps(sink, "CrossEntropyLoss") == list(range(3 * critic_steps))
    assert [step for step, _ in updates(sink, "Generator")] == [0, 0, 1, 1, 2, 2]
    assert sorted(spans(sink)) == sorted([*range(3), *range(3 * critic_steps)])


@pytest.mark.parametrize("delay", [1, 2])
def test_an_actor_and_a_critic_in_one_module_share_the_step(delay: int) -> None:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor, self.critic = nn.Linear(4, 2), nn.Linear(6, 1)

    with watching() as sink:
        policy = Policy()
        of_actor = torch.optim.Adam(policy.actor.parameters())
        of_critic = torch.optim.Adam(policy.critic.parameters())
        for turn in range(4):
            with torch.no_grad():
                action = policy.actor(X)
            update(policy.critic(torch.cat([X, action], 1)).square().mean(), of_critic)
            if turn % delay == delay - 1:
                action = policy.actor(X)
                update(-policy.critic(torch.cat([X, action], 1)).mean(), of_actor)
    assert steps(sink, "Policy") == [0, 1, 2, 3]
    actor_turns = [turn for turn in range(4) if turn % delay == delay - 1]
    # the critic has gradients from the actor's loss as well, which no optimizer uses
    updated = [step for step, _ in updates(sink, "Policy")]
    assert updated == sorted([*range(4), *range(4), *actor_turns, *actor_turns])
    assert spans(sink) == [0, 1, 2, 3]


def test_master_weights_are_the_models_optimizer() -> None:
    with watching() as sink:
        net = Net().bfloat16()
        masters = [p.detach().float().clone().requires_grad_() for p in net.parameters()]
        optimizer = torch.optim.AdamW(masters)
        for _ in range(3):
            for _ in range(2):
                net(X.bfloat16()).sum().backward()
            for master, parameter in zip(masters, net.parameters(), strict=True):
                master.grad = parameter.grad.float()
            optimizer.step()
            net.zero_grad()
            with torch.no_grad():
                for master, parameter in zip(masters, net.parameters(), strict=True):
                    parameter.copy_(master)
                net(X.bfloat16())
    rows = sink.rows("step", "call", model="Net", module="", phase="forward")
    assert rows == [(step, call) for step in range(3) for call in range(2)]
    assert steps(sink, "Net", "eval") == [1, 2, 3]
    assert [step for step, _ in updates(sink, "Net")] == [0, 0, 1, 1, 2, 2]


class Descent:
    """An optimizer that is none of torch's."""

    def __init__(self, net: nn.Module, through_data: bool) -> None:
        self.parameters, self.through_data = list(net.parameters()), through_data

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.parameters:
            (parameter.data if self.through_data else parameter).add_(parameter.grad, alpha=-0.1)
            parameter.grad = None


class NeverInitialized(torch.optim.Optimizer):
    """Does not call the constructor of its base class, so that torch runs no hook of its steps."""

    def __init__(self, net: nn.Module, through_data: bool) -> None:
        self.descent = Descent(net, through_data)

    def step(self) -> None:
        self.descent.step()


@pytest.mark.parametrize("through_data", [True, False])
@pytest.mark.parametrize("optimizer_class", [Descent, NeverInitialized])
def test_an_optimizer_that_torch_does_not_know(optimizer_class: type, through_data: bool) -> None:
    with watching() as sink:
        net, criterion = Net(), nn.CrossEntropyLoss()
        optimizer = optimizer_class(net, through_data)
        for _ in range(3):
            criterion(net(X), LABELS).backward()
            optimizer.step()
            with torch.no_grad():
                criterion(net(X), LABELS)
    for model in ("Net", "CrossEntropyLoss"):
        assert steps(sink, model) == [0, 1, 2], model
        assert steps(sink, model, "eval") == [1, 2, 3], model
    assert [step for step, _ in updates(sink, "Net")] == [0, 0, 1, 1, 2, 2]


def test_accumulation_is_seen_where_parameters_stay_as_they_are() -> None:
    with watching() as sink:
        net = Net()
        optimizer = Descent(net, through_data=False)
        net(X).sum().backward()
        optimizer.step()
        for _ in range(2):
            for _ in range(2):
                net(X).sum().backward()
            optimizer.step()
    rows = sink.rows("step", "call", model="Net", module="", phase="forward")
    assert rows == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_evaluation_after_a_train_function_has_returned() -> None:
    net = Net()

    def train() -> None:
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(2):
            update(net(X).sum(), optimizer)

    def evaluate() -> None:
        with torch.no_grad():
            net(X), net(X)

    with watching() as sink:
        evaluate()
        train()
        evaluate()
        train()
        evaluate()
    rows = sink.rows("loop", "step", "call", "phase", module="", tensor="out")
    assert rows == [
        (0, 0, 0, "forward"), (0, 1, 0, "forward"),  # nothing tells yet that it will be trained
        (1, 0, 0, "forward"), (1, 1, 0, "forward"), (1, 2, 0, "eval"), (1, 2, 1, "eval"),
        (2, 0, 0, "forward"), (2, 1, 0, "forward"), (2, 2, 0, "eval"), (2, 2, 1, "eval"),
    ]  # fmt: skip


class Fitting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))

    def fit(self, whole: bool) -> None:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        for _ in range(3):
            output = self(X) if whole else self.last(self.first(X))
            update(output.sum(), optimizer)


@pytest.mark.parametrize("whole", [True, False])
def test_a_training_loop_in_a_method_of_the_model(whole: bool) -> None:
    with watching() as sink:
        Fitting().fit(whole)
    assert steps(sink, "Fitting") == spans(sink) == [0, 1, 2]
    assert [step for step, _ in updates(sink, "Fitting")] == sorted([*range(3)] * 4)


def test_a_sampling_loop_in_a_method_of_the_model() -> None:
    class Diffusion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.denoiser = Net(4, 4)

        @torch.no_grad()
        def sample(self) -> torch.Tensor:
            x = torch.randn(2, 4)
            for _ in range(4):
                x = x - 0.1 * self.denoiser(x)
            return x

    with watching() as sink:
        diffusion = Diffusion()
        diffusion.sample()
        diffusion.sample()
    assert sink.rows("step", "call", module="denoiser", tensor="out") == [(i, 0) for i in range(8)]


def test_tiles_of_a_decoder_stay_one_forward() -> None:
    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(4, 2), nn.Linear(2, 4)

        def decode(self, z: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.decoder(tile) for tile in z.split(1)])

    with watching() as sink:
        autoencoder = Autoencoder()
        for _ in range(2):
            autoencoder.decode(torch.ones(3, 2))
    assert sink.rows("step", "call", module="decoder", tensor="out") == [
        (step, call) for step in range(2) for call in range(3)
    ]


def test_steps_that_a_scaler_skips_are_reported(capfd: pytest.CaptureFixture[str]) -> None:
    with watching() as sink:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu")
        for turn in range(4):
            loss = net(X).sum() * (math.inf if turn == 1 else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert sink.rows("step", "call", model="Net", module="", phase="forward") == [
        (0, 0), (1, 0), (1, 1), (2, 0)
    ]  # fmt: skip
    assert "GradScaler skipped 1 of 4 optimizer steps" in capfd.readouterr().err


def test_a_training_step_costs_the_same_however_many_modules_do_not_run() -> None:
    class Net(nn.Module):
        def __init__(self, unused: int) -> None:
            super().__init__()
            self.used = nn.Linear(4, 4)
            self.unused = nn.ModuleList(nn.Linear(1, 1) for _ in range(unused))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    def work_of_a_step(unused: int) -> int:
        with recording():
            net = Net(unused)
            optimizer = torch.optim.SGD(net.used.parameters())

            def step() -> None:
                net(torch.ones(1, 4)).sum().backward()
                optimizer.step()

            for _ in range(6):  # in steps 3 to 5 what was found at first is looked at once more
                step()
            return work_of(step).total()

    gc.collect()  # optimizers of other tests
    _, small, large = (work_of_a_step(unused) for unused in (2, 2, 200))  # the first fills caches
    # less than one call for each of the 198 modules more; a queue that is flushed at another moment
    # is a few calls
    assert large - small < 100
