"""A third set, broken and healthy, written without a look at the checks: loops of 2025 and 2026."""

from __future__ import annotations

import copy
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LinearLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.corpora.laws import models
from tests.corpora.laws.models import LanguageModel, Mlp, accuracy, images, points, texts
from tests.corpora.laws.program import breaks, healthy
from tests.corpora.laws.second_models import Gru, Vit, mlp, observations, rewards, signals

FEATURES, CLASSES, STATE, ACTIONS = models.FEATURES, models.CLASSES, 6, 3


def descend(optimizer: Optimizer, loss_of: Callable[[], Tensor], steps: int = 14) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()


def loss_on(data: Callable[..., tuple[Tensor, Tensor]], net: Callable[[Tensor], Tensor]) -> Tensor:
    x, y = data()
    return F.cross_entropy(net(x), y)


def text_loss(model: nn.Module) -> Tensor:
    return models.next_token_loss(model, texts())


def epochs(net: nn.Module, optimizer: Optimizer, data: Callable[..., Any]) -> Iterator[int]:
    for epoch in range(4):
        net.train()
        yield epoch
        descend(optimizer, lambda: loss_on(data, net), 5)
        net.eval()
        yield -1  # before its evaluation
        print(accuracy(net, [data(64)]))


def reloaded(net: nn.Module) -> dict[str, Tensor]:
    with tempfile.TemporaryFile() as file:
        torch.save(net.state_dict(), file)
        file.seek(0)
        return torch.load(file)


def follow(slow: nn.Module, fast: nn.Module, rate: float) -> None:
    for average, parameter in zip(slow.parameters(), fast.parameters(), strict=True):
        average.data.lerp_(parameter.data, rate)


class Own(Optimizer):
    def __init__(self, params: Any, lr: float, decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    def write(self, p: Tensor, change: Tensor) -> None:
        p.sub_(change)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    change = self.change(p, group, self.state[p]) + group["decay"] * p
                    self.write(p, group["lr"] * change)


class Lion(Own):
    def change(self, p: Tensor, group: Any, state: Any) -> Tensor:
        mean = state.setdefault("mean", torch.zeros_like(p))
        sign = mean.lerp(p.grad, 0.1).sign()
        mean.lerp_(p.grad, 0.01)
        return sign


class Muon(Own):
    def change(self, p: Tensor, group: Any, state: Any) -> Tensor:
        speed = state.setdefault("speed", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
        left, _, right = torch.linalg.svd(speed, full_matrices=False)
        return left @ right


def flow_loss(net: nn.Module) -> Tensor:
    x, y = points(32)
    noise, time = torch.randn_like(x), torch.randn(32, 1).sigmoid()
    y = torch.where(torch.rand(32) < 0.2, -1, y)[:, None]  # -1: of no class
    return F.mse_loss(net(torch.cat([torch.lerp(noise, x, time), time, y], 1)), x - noise)


@breaks("every_step_skipped")
def smoothed_labels_with_the_weight_of_an_empty_class() -> None:
    net, scaler = Mlp(classes=4), torch.amp.GradScaler("cpu")
    optimizer = AdamW(net.parameters(), 0.01)
    for _ in range(12):
        x, y = points()
        weight = 1 / torch.bincount(y, minlength=4)  # no sample has class 3
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(net(x), y, weight, label_smoothing=0.1)).backward()
        scaler.step(optimizer)
        scaler.update()


@breaks("learning_rate_zero")
def warm_up_in_epochs_of_a_run_of_one() -> None:
    model = LanguageModel()
    optimizer = Lion(model.parameters(), 0.001, decay=0.1)
    scheduler = LambdaLR(optimizer, lambda epoch: min(1.0, epoch / 5))
    descend(optimizer, lambda: text_loss(model), 16)
    scheduler.step()


@breaks("no_gradients")
def loss_of_data_and_a_perturbation() -> None:
    def loss() -> Tensor:
        nudge = (0.01 * torch.randn(FEATURES)).requires_grad_()
        return loss_on(points, lambda x: net(x + nudge).data) + nudge.square().sum()

    net = Mlp()
    descend(Adam(net.parameters(), 0.01), loss)


@breaks("gradients_zero")
def rounded_scores_without_a_straight_through_estimate() -> None:
    net = mlp(FEATURES, 24, CLASSES)
    descend(SGD(net.parameters(), 0.05), lambda: loss_on(points, lambda x: net(8 * x).round()))


@breaks("no_gradient")
def value_loss_of_values_detached_for_the_advantage() -> None:
    class Agent(nn.ModuleList):
        def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
            trunk, policy, value = self
            hidden = trunk(states).tanh()
            return policy(hidden).log_softmax(1), value(hidden)[:, 0]

    def loss() -> Tensor:
        states = observations()
        scores, values = agent(states)
        values, actions = values.detach(), scores.exp().multinomial(1)
        returns = rewards(states, actions[:, 0])
        advantage = returns - values
        return F.mse_loss(values, returns) - (scores.gather(1, actions)[:, 0] * advantage).mean()

    agent = Agent(nn.Linear(*size) for size in ((STATE, 16), (16, ACTIONS), (16, 1)))
    descend(Adam(agent.parameters(), 0.01), loss, 16)


@breaks("no_gradient")
def reentrant_checkpoint_of_the_first_layers() -> None:
    class Checkpointed(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.encoder, x, use_reentrant=True))

    net = Checkpointed()
    descend(AdamW(net.parameters(), 0.005), lambda: loss_on(points, net))


@breaks("gradients_not_cleared")
def gradients_of_the_average_cleared() -> None:
    net = mlp(FEATURES + 2, 24, FEATURES)
    average, optimizer = copy.deepcopy(net), SGD(net.parameters(), 0.01)
    for _ in range(14):
        average.zero_grad()
        flow_loss(net).backward()
        optimizer.step()
        follow(average, net, 0.1)


@breaks("clipped_after_step")
def clipped_behind_the_scaler() -> None:
    net, scaler = Vit(), torch.amp.GradScaler("cpu", init_scale=64)
    optimizer = AdamW(net.parameters(), 0.003)
    for _ in range(12):
        optimizer.zero_grad()
        scaler.scale(loss_on(images, net)).backward()
        scaler.step(optimizer)
        scaler.update()
        clip_grad_norm_(net.parameters(), 1.0)


@breaks("clipped_early")
def clipped_after_each_loss_of_a_step() -> None:
    net = mlp(FEATURES, 24, CLASSES + 1)
    optimizer = Adam(net.parameters(), 0.005)
    for _ in range(14):
        x, y = points()
        out = net(x)
        optimizer.zero_grad()
        for loss in (F.cross_entropy(out[:, :CLASSES], y), F.mse_loss(out[:, CLASSES], x[:, 0])):
            loss.backward(retain_graph=True)
            clip_grad_norm_(net.parameters(), 0.2)
        optimizer.step()


@breaks("optimizer_holds_others")
def weights_assigned_after_the_optimizer_was_made() -> None:
    net = Vit()
    optimizer = AdamW(net.parameters(), 0.003)
    net.load_state_dict(reloaded(Vit()), assign=True)
    descend(optimizer, lambda: loss_on(images, net))


@breaks("nothing_changes")
def own_optimizer_that_updates_a_copy_in_doubles() -> None:
    class Precise(Lion):
        def write(self, p: Tensor, change: Tensor) -> None:
            p.data.double().sub_(change)

    net = Gru()
    descend(Precise(net.parameters(), 0.002, decay=0.01), lambda: loss_on(signals, net))


@breaks("not_held")
def kernels_neither_matrices_nor_vectors() -> None:
    net = models.Cnn()
    muon = Muon([p for p in net.parameters() if p.ndim == 2], 0.02)
    adam = AdamW([p for p in net.parameters() if p.ndim < 2], 0.003)
    for _ in range(14):
        net.zero_grad()
        loss_on(images, net).backward()
        muon.step()
        adam.step()


@breaks("never_changes")
def own_optimizer_that_passes_vectors_by() -> None:
    class OfMatrices(Lion):
        def write(self, p: Tensor, change: Tensor) -> None:
            if p.ndim > 1:  # no decay for biases and norms, was meant
                p.sub_(change)

    model = LanguageModel()
    descend(OfMatrices(model.parameters(), 0.001, decay=0.1), lambda: text_loss(model))


@breaks("weights_parted")
def tie_lost_on_the_way_from_the_meta_device() -> None:
    model = LanguageModel()
    model.head.weight = model.embedding.weight
    state = reloaded(model)
    model.to("meta").to_empty(device="cpu").load_state_dict(state)
    descend(AdamW(model.parameters(), 0.003), lambda: text_loss(model))


@breaks("rounded_away")
def steps_of_lion_in_bfloat16() -> None:
    net = Vit(depth=1).bfloat16()
    descend(Lion(net.parameters(), 2e-6), lambda: loss_on(images, lambda x: net(x.bfloat16())))


@breaks("optimizer_remade")
def optimizer_for_each_turn_of_two_parts() -> None:
    net = Mlp()
    for part in [net.encoder, net.head] * 7:
        net.requires_grad_(False)
        part.requires_grad_(True)
        descend(Adam(part.parameters(), 0.01), lambda: loss_on(points, net), 1)


@breaks("state_not_continued")
def layers_exchanged_for_some_without_biases_after_loading() -> None:
    net = Mlp()
    net.load_state_dict(reloaded(Mlp()))
    net.encoder[0] = nn.Linear(FEATURES, 24, bias=False)
    net.head = nn.Linear(24, CLASSES, bias=False)
    descend(Adam(net.parameters(), 0.003), lambda: loss_on(points, net))


@breaks("batch_norm_still")
def ghost_batches_whose_statistics_are_not_written_back() -> None:
    class GhostNorm(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            kept = self.running_mean, self.running_var, self.weight, self.bias
            halves = x.view(-1, 2 * self.num_features)
            return F.batch_norm(halves, *(v.repeat(2) for v in kept), self.training).view_as(x)

    net = nn.Sequential(nn.Linear(FEATURES, 16), GhostNorm(16), nn.ReLU(), nn.Linear(16, CLASSES))
    list(epochs(net, SGD(net.parameters(), 0.05, momentum=0.9), points))


@breaks("eval_while_training")
def own_train_that_means_the_norms_alone() -> None:
    class Finetuned(Vit):
        def train(self, mode: bool = True) -> Finetuned:
            super().train(mode).blocks.eval()  # their norms were meant
            return self

    net = Finetuned(dropout=0.2).train()
    descend(AdamW(net.parameters(), 0.003), lambda: loss_on(images, net))


@breaks("train_while_evaluating")
def training_set_to_false_at_the_root_alone() -> None:
    net = Gru(dropout=0.3)
    optimizer = Adam(net.parameters(), 0.01)
    for _ in range(3):
        net.training = True
        descend(optimizer, lambda: loss_on(signals, net), 5)
        net.training = False
        print(accuracy(net, [signals(40)]))


@breaks("scheduler_never_stepped")
def schedule_of_the_first_of_two_optimizers_stepped_twice() -> None:
    net = Mlp()
    optimizers = [SGD(part.parameters(), 0.1) for part in (net.encoder, net.head)]
    schedules = [LinearLR(optimizer, 1.0, 0.2, 60) for optimizer in optimizers]
    for _ in range(14):
        net.zero_grad()
        loss_on(points, net).backward()
        for optimizer in optimizers:
            optimizer.step()
            schedules[0].step()


@breaks("scheduler_before_optimizer")
def schedule_that_runs_while_the_replay_is_filled() -> None:
    net, replay = Mlp(), deque(maxlen=500)
    optimizer = Adam(net.parameters(), 0.005)
    scheduler = ExponentialLR(optimizer, 0.97)
    for step in range(24):
        replay.append(points())
        if step >= 8:
            descend(optimizer, lambda: loss_on(replay.popleft, net), 1)
        scheduler.step()


@breaks("same_batch")
def loader_seeded_and_made_in_each_step() -> None:
    def batch() -> list[Tensor]:
        seeded = torch.Generator().manual_seed(0)
        return next(iter(DataLoader(data, 16, shuffle=True, generator=seeded)))

    net, data = Mlp(), list(zip(*points(96), strict=True))
    descend(AdamW(net.parameters(), 0.003), lambda: loss_on(batch, net))


@breaks("loss_ignores_inputs")
def shares_cut_off_to_whole_numbers() -> None:
    class Bucketed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.long().clamp(0, 9))  # 10 * x was meant

    net = Bucketed(nn.Embedding(10, 8), nn.Flatten(), *mlp(8 * FEATURES, 16, CLASSES))
    descend(Adam(net.parameters(), 0.01), lambda: loss_on(points, lambda x: net(x.sigmoid())))


@healthy
def muon_in_each_step_and_adam_in_each_second() -> None:
    model = LanguageModel()
    matrices = {p for p in model.blocks.parameters() if p.ndim == 2}
    muon = Muon(list(matrices), 0.01)
    adam = AdamW([p for p in model.parameters() if p not in matrices], 0.005)
    for step in range(16):
        text_loss(model).backward()
        for optimizer in (muon, adam) if step % 2 else (muon,):
            optimizer.step()
            optimizer.zero_grad()


@healthy
def cautious_lion() -> None:
    class Cautious(Lion):
        def change(self, p: Tensor, group: Any, state: Any) -> Tensor:
            sign = super().change(p, group, state)
            return sign * (sign * p.grad > 0)

    model = LanguageModel()
    descend(Cautious(model.parameters(), 0.001, decay=0.1), lambda: text_loss(model))


@healthy
def soft_actor_and_twin_critics() -> None:
    def critic_loss() -> Tensor:
        states, following = observations(), observations()
        with torch.no_grad():
            actions = policy(states).softmax(1).multinomial(1)
            choice = policy(following).softmax(1)
            value = torch.minimum(*target(following).chunk(2, 1)) - 0.1 * choice.log()
            goal = rewards(states, actions[:, 0]) + 0.9 * (choice * value).sum(1)
        return sum(F.mse_loss(q.gather(1, actions)[:, 0], goal) for q in critic(states).chunk(2, 1))

    def policy_loss() -> Tensor:  # the critic's gradients of it are cleared before its next step
        states = observations()
        choice, best = policy(states).softmax(1), torch.minimum(*critic(states).chunk(2, 1))
        return (choice * (0.1 * choice.log() - best)).sum(1).mean()

    policy, critic = mlp(STATE, 16, ACTIONS), mlp(STATE, 16, 2 * ACTIONS)
    target, of_critic = copy.deepcopy(critic), Adam(critic.parameters(), 0.005)
    of_policy = Adam(policy.parameters(), 0.005)
    for _ in range(16):
        descend(of_critic, critic_loss, 1)
        descend(of_policy, policy_loss, 1)
        follow(target, critic, 0.05)


@healthy
def student_of_its_average_with_a_late_last_layer() -> None:
    student, center = Mlp(dropout=0.1, classes=10), torch.zeros(10)
    teacher, optimizer = copy.deepcopy(student).requires_grad_(False), Adam(student.parameters())
    for step in range(16):
        x, _ = points(24)
        goals = teacher(x + 0.2 * torch.randn_like(x))
        chances = ((goals - center) / 0.04).softmax(1)
        optimizer.zero_grad()
        F.cross_entropy(student(x + 0.2 * torch.randn_like(x)) / 0.1, chances).backward()
        if step < 5:
            student.head.zero_grad()
        optimizer.step()
        follow(teacher, student, 0.02)
        center = center.lerp(goals.mean(0), 0.1)


@healthy
def equation_by_adam_and_then_by_lbfgs() -> None:
    def closure() -> Tensor:
        net.zero_grad()
        edge, u = net(torch.zeros(1, 1)) - 1, net(x)
        slope = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
        loss = (slope + u).square().mean() + edge.square().mean()
        loss.backward()
        return loss

    net = mlp(1, 16, 1, activation=nn.Tanh)
    adam, lbfgs = Adam(net.parameters(), 0.01), LBFGS(net.parameters(), max_iter=5)
    for step in range(18):
        x = (3 * torch.rand(48, 1)).requires_grad_()
        (adam if step < 12 else lbfgs).step(closure)


@healthy
def features_of_batches_before_as_negatives() -> None:
    def loss() -> Tensor:
        x, y = points()
        features = F.normalize(net(x), dim=1)
        memory.append((features.detach(), y))
        keys, labels = (torch.cat(part) for part in zip(*memory, strict=True))
        same = (y[:, None] == labels).float()
        scores = (features @ keys.T / 0.2).log_softmax(1)
        return -((scores * same).sum(1) / same.sum(1)).mean()

    net, memory = mlp(FEATURES, 24, 8), deque(maxlen=4)
    descend(SGD(net.parameters(), 0.05, momentum=0.9), loss, 18)


@healthy
def flow_with_guidance_sampled_from_its_average() -> None:
    net = mlp(FEATURES + 2, 24, FEATURES)
    average, optimizer = copy.deepcopy(net).requires_grad_(False), AdamW(net.parameters(), 0.003)
    for _ in range(15):
        descend(optimizer, lambda: flow_loss(net), 1)
        follow(average, net, 0.2)
        x, y = torch.randn(6, FEATURES), torch.arange(6)[:, None] % CLASSES
        for time in (0.0, 0.25, 0.5, 0.75):
            now = torch.full((6, 1), time)
            free, led = (average(torch.cat([x, now, label], 1)) for label in (0 * y - 1, y))
            x = x + 0.25 * (free + 2 * (led - free))


@healthy
def gradients_divided_by_the_tokens_of_a_step() -> None:
    model = LanguageModel()
    optimizer = AdamW(model.parameters(), 0.005)
    for batches in [3] * 13 + [2]:
        optimizer.zero_grad(set_to_none=False)
        count = 0
        for tokens in [texts() for _ in range(batches)]:
            labels = torch.where(torch.rand(6, 7) < 0.3, -100, tokens[:, 1:])
            F.cross_entropy(model(tokens[:, :-1]).mT, labels, reduction="sum").backward()
            count += int((labels >= 0).sum())
        for p in model.parameters():
            p.grad /= count
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@healthy
def weights_made_by_another_net() -> None:
    def loss() -> Tensor:
        x, style = points()[0], torch.randn(CLASSES)
        weight = {"weight": maker(style).view(CLASSES, FEATURES)}
        return F.mse_loss(functional_call(skeleton, weight, x), style * x[:, :CLASSES])

    skeleton = nn.Linear(FEATURES, CLASSES, bias=False).requires_grad_(False)
    maker = mlp(CLASSES, 16, CLASSES * FEATURES)
    descend(Adam(maker.parameters(), 0.01), loss)


@healthy
def bags_of_words_with_sparse_gradients() -> None:
    def loss() -> Tensor:
        sizes, y = torch.randint(1, 6, (12,)), torch.randint(0, CLASSES, (12,))
        words = 100 * y.repeat_interleave(sizes) + torch.randint(0, 100, (int(sizes.sum()),))
        return F.cross_entropy(net[1](net[0](words, sizes.cumsum(0) - sizes)), y)

    net = nn.ModuleList([nn.EmbeddingBag(300, 8, sparse=True), nn.Linear(8, CLASSES)])
    descend(Adagrad(net.parameters(), 0.1), loss)


@healthy
def nested_widths_drawn_in_each_step() -> None:
    def narrow(x: Tensor) -> Tensor:
        width = 2 ** int(torch.randint(2, 6, ()))
        return F.linear(net.encoder(x)[:, :width], net.head.weight[:, :width], net.head.bias)

    net = Mlp(width=32)
    descend(AdamW(net.parameters(), 0.01), lambda: loss_on(points, narrow), 18)


@healthy
def adapters_merged_while_evaluated() -> None:
    class Adapter(nn.Linear):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__(inputs, outputs)
            self.requires_grad_(False)
            self.down = nn.Parameter(torch.randn(2, inputs) / 2)
            self.up = nn.Parameter(torch.zeros(outputs, 2))

        def train(self, mode: bool = True) -> Adapter:
            self.weight.data += (self.training - mode) * (self.up @ self.down).data
            return super().train(mode)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.training * (x @ self.down.T @ self.up.T)

    net = nn.Sequential(Adapter(FEATURES, 24), nn.Tanh(), nn.Dropout(0.1), Adapter(24, CLASSES))
    list(epochs(net, AdamW([p for p in net.parameters() if p.requires_grad], 0.01), points))


@healthy
def learned_steps_of_quantized_weights() -> None:
    class Quantized(nn.Linear):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__(inputs, outputs)
            self.size = nn.Parameter(self.weight.detach().abs().mean() / 2)

        def forward(self, x: Tensor) -> Tensor:
            scaled = (self.weight / self.size).clamp(-4, 3)
            return F.linear(x, self.size * (scaled + (scaled.round() - scaled).data), self.bias)

    net = nn.Sequential(Quantized(FEATURES, 24), nn.ReLU(), Quantized(24, CLASSES))
    descend(Adam(net.parameters(), 0.002), lambda: loss_on(points, net))


@healthy
def preferences_against_a_frozen_reference() -> None:
    def chance(model: nn.Module, tokens: Tensor) -> Tensor:
        return -F.cross_entropy(model(tokens[:, :-1]).mT, tokens[:, 1:], reduction="none").sum(1)

    def loss() -> Tensor:
        pair = torch.cat([chosen := texts(), chosen.roll(1, 1)])
        won, lost = (chance(policy, pair) - chance(reference, pair)).chunk(2)
        return -F.logsigmoid(0.1 * (won - lost)).mean()

    policy = LanguageModel(dropout=0.1)
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    descend(AdamW(policy.parameters(), 0.001), loss)


@healthy
def average_of_a_schedule_free_optimizer_evaluated() -> None:
    class ScheduleFree(Own):
        def change(self, p: Tensor, group: Any, state: Any) -> Tensor:
            fast, mean = (state.setdefault(k, p.clone()) for k in ("fast", "mean"))
            state["count"] = state.get("count", 0) + 1
            mean.lerp_(fast.sub_(p.grad, alpha=group["lr"]), 1 / state["count"])
            state["between"] = mean.lerp(fast, 0.1)
            return (p - state["between"]) / group["lr"]

        def use(self, name: str) -> None:
            for p, state in self.state.items():
                p.data.copy_(state[name])

    net = Mlp(dropout=0.1)
    optimizer = ScheduleFree(net.parameters(), 0.3)
    for epoch in epochs(net, optimizer, points):
        optimizer.use("mean" if epoch < 0 else "between")


@healthy
def statistics_fixed_for_the_last_epochs() -> None:
    net = models.Cnn(dropout=0.1)
    for epoch in epochs(net, SGD(net.parameters(), 0.05, momentum=0.9), images):
        for norm in (net.stem.norm, net.body.norm):
            norm.train(epoch in (0, 1))
