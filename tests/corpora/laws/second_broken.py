"""A second set of trainings that break one law each, written without a look at the checks: mistakes
of people who ask on forums, in loops and models unlike those of the first set.
"""

from __future__ import annotations

import copy
import os
import random
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
)
from torch.utils.data import DataLoader, TensorDataset

from tests.corpora.laws.models import (
    CLASSES,
    FEATURES,
    VOCABULARY,
    Cnn,
    Mlp,
    forever,
    image_loader,
    images,
    point_loader,
    points,
    take_step,
    texts,
)
from tests.corpora.laws.program import breaks
from tests.corpora.laws.second_models import (
    ACTIONS,
    SIGNALS,
    STATE,
    GraphNet,
    Gru,
    Seq2Seq,
    Vae,
    Vit,
    contrastive_loss,
    elbo_loss,
    graphs,
    mlp,
    observations,
    rewards,
    signals,
    translation_loss,
)

# ---- every_step_skipped


@breaks("every_step_skipped")
def entropy_of_masked_actions_under_a_scaler() -> None:
    policy = mlp(STATE, 16, ACTIONS, activation=nn.Tanh)
    optimizer, scaler = Adam(policy.parameters(), 0.01), torch.amp.GradScaler("cpu")
    for _ in range(10):
        states = observations()
        allowed = torch.ones(len(states), ACTIONS, dtype=torch.bool)
        allowed[::2, 2] = False
        chances = policy(states).masked_fill(~allowed, -torch.inf).softmax(1)
        actions = chances.multinomial(1)[:, 0]
        entropy = -(chances * chances.log()).sum(1)  # 0 times -inf
        chosen = chances.gather(1, actions[:, None])[:, 0].log()
        loss = -(chosen * (rewards(states, actions) - 0.3)).mean() - 0.01 * entropy.mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


# ---- learning_rate_zero


@breaks("learning_rate_zero")
def warm_up_by_whole_numbers() -> None:
    net = Vit()
    optimizer = AdamW(net.parameters(), 1e-3, weight_decay=0.05)
    warm_up = 1000
    scheduler = LambdaLR(optimizer, lambda step: min(1, step // warm_up))
    for x, y in forever(image_loader(), 12):
        take_step(optimizer, F.cross_entropy(net(x), y))
        scheduler.step()


@breaks("learning_rate_zero")
def rate_read_as_a_whole_number() -> None:
    settings = {"lr": "0.003", "epochs": "3"}
    numbers = {name: int(float(value)) for name, value in settings.items()}
    model = Seq2Seq()
    optimizer = Adam(model.parameters(), lr=numbers["lr"])
    for _ in range(numbers["epochs"]):
        for _ in range(4):
            take_step(optimizer, translation_loss(model, texts()))


# ---- no_gradients


@breaks("no_gradients")
def distance_by_numpy() -> None:
    net = mlp(FEATURES, 16, 4)
    optimizer = SGD(net.parameters(), 0.05)
    for _ in range(10):
        x, _ = points()
        left = net(x).detach().numpy()
        right = net(x + 0.1 * torch.randn_like(x)).detach().numpy()
        distance = np.square(left - right).sum(1)
        loss = torch.from_numpy(distance).mean().requires_grad_()  # so that backward() runs
        take_step(optimizer, loss)


@breaks("no_gradients")
def losses_of_tasks_made_a_new_tensor() -> None:
    net = GraphNet()
    optimizer = Adam(net.parameters(), 0.01)
    for _ in range(9):
        losses = []
        for _ in range(3):
            x, adjacency, y = graphs()
            losses.append(F.cross_entropy(net(x, adjacency), y))
        take_step(optimizer, torch.tensor(losses, requires_grad=True).sum())


# ---- gradients_zero


@breaks("gradients_zero")
def softmax_over_a_single_output() -> None:
    net = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, 1), nn.Softmax(dim=1))
    optimizer = Adam(net.parameters(), 0.01)
    for epoch in range(3):
        for x, y in point_loader(64):
            loss = F.binary_cross_entropy(net(x), (y == 0).float()[:, None])
            take_step(optimizer, loss)
        print(epoch, loss.item())


@breaks("gradients_zero")
def advantages_of_a_reward_that_is_always_one() -> None:
    policy = mlp(STATE, 16, ACTIONS, activation=nn.Tanh)
    optimizer = Adam(policy.parameters(), 0.01)
    for _ in range(10):
        states = observations()
        choice = Categorical(logits=policy(states))
        actions = choice.sample()
        reward = torch.ones(len(states))  # one for each step that the pole stands
        advantage = (reward - reward.mean()) / (reward.std() + 1e-8)
        take_step(optimizer, (-choice.log_prob(actions) * advantage).mean())


# ---- optimizer_holds_others


@breaks("optimizer_holds_others")
def optimizer_of_the_model_before_the_folds() -> None:
    net = Mlp(dropout=0.1)
    optimizer = AdamW(net.parameters(), 0.01)
    for fold in range(2):
        net = Mlp(dropout=0.1)
        net.train()
        for x, y in forever(point_loader(), 8):
            take_step(optimizer, F.cross_entropy(net(x), y))
        print(fold)


@breaks("optimizer_holds_others")
def whole_model_unpickled_after_the_optimizer() -> None:
    path = os.path.join(tempfile.mkdtemp(), "model.pt")
    torch.save(Gru(), path)
    net = Gru()
    optimizer = RMSprop(net.parameters(), 0.003)
    net = torch.load(path, weights_only=False)
    for _ in range(10):
        x, y = signals()
        take_step(optimizer, F.cross_entropy(net(x), y))


# ---- not_held


@breaks("not_held")
def margin_head_outside_of_the_optimizer() -> None:
    class ArcMargin(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(CLASSES, width))

        def forward(self, features: Tensor, y: Tensor) -> Tensor:
            cosine = F.normalize(features, dim=1) @ F.normalize(self.weight, dim=1).T
            return F.cross_entropy(8 * (cosine - 0.2 * F.one_hot(y, CLASSES)), y)

    net, criterion = mlp(FEATURES, 24, 8), ArcMargin(8)
    optimizer = SGD(net.parameters(), 0.05, momentum=0.9)
    for x, y in forever(point_loader(), 12):
        take_step(optimizer, criterion(net(x), y))


@breaks("not_held")
def projector_of_a_contrastive_encoder_forgotten() -> None:
    encoder, projector = mlp(FEATURES, 24, 16), mlp(16, 16, 8)
    optimizer = AdamW(encoder.parameters(), 0.005)
    for _ in range(12):
        x, _ = points(24)
        views = [x + 0.2 * torch.randn_like(x) for _ in range(2)]
        a, b = (projector(encoder(view)) for view in views)
        take_step(optimizer, contrastive_loss(a, b))


@breaks("not_held")
def heads_of_tasks_in_a_dict() -> None:
    class Multitask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU())
            self.heads = {"class": nn.Linear(16, CLASSES), "sum": nn.Linear(16, 1)}

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            x = self.trunk(x)
            return {name: head(x) for name, head in self.heads.items()}

    model = Multitask()
    optimizer = Adam(model.parameters(), 0.01)
    for x, y in forever(point_loader(), 12):
        out = model(x)
        take_step(
            optimizer, F.cross_entropy(out["class"], y) + F.mse_loss(out["sum"][:, 0], x.sum(1))
        )


# ---- no_gradient


@breaks("no_gradient")
def latent_by_sample_instead_of_rsample() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = mlp(FEATURES, 16, 8), mlp(4, 16, FEATURES)

        def forward(self, x: Tensor) -> Tensor:
            mean, scale = self.encoder(x).chunk(2, 1)
            return self.decoder(Normal(mean, F.softplus(scale) + 1e-3).sample())

    net = Noisy()
    optimizer = Adam(net.parameters(), 0.005)
    for _ in range(12):
        x, _ = points()
        take_step(optimizer, F.mse_loss(net(x), x))


@breaks("no_gradient")
def codes_without_a_straight_through_estimate() -> None:
    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = mlp(FEATURES, 16, 4), mlp(4, 16, FEATURES)
            self.codes = nn.Embedding(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            nearest = torch.cdist(self.encoder(x), self.codes.weight).argmin(1)
            return self.decoder(self.codes(nearest))

    net = Quantized()
    optimizer = AdamW(net.parameters(), 0.005)
    for _ in range(12):
        x, _ = points(48)
        take_step(optimizer, F.mse_loss(net(x), x))


@breaks("no_gradient")
def features_wrapped_in_a_new_tensor() -> None:
    class Joint(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.signal = Cnn(), Gru()
            self.head = nn.Linear(2 * CLASSES, CLASSES)

        def forward(self, image: Tensor, signal: Tensor) -> Tensor:
            left = torch.stack([torch.tensor(row.tolist()) for row in self.image(image)])
            return self.head(torch.cat([left, self.signal(signal)], 1))

    net = Joint()
    optimizer = SGD(net.parameters(), 0.05, momentum=0.9)
    for _ in range(10):
        (x, y), (s, _) = images(8), signals(8)
        take_step(optimizer, F.cross_entropy(net(x, s), y))


# ---- nothing_changes


@breaks("nothing_changes")
def accumulation_that_is_never_complete() -> None:
    model, accumulate = Seq2Seq(dropout=0.1), 4
    optimizer = AdamW(model.parameters(), 0.003)
    optimizer.zero_grad()
    for step in range(16):
        (translation_loss(model, texts()) / accumulate).backward()
        if step % accumulate == accumulate:
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


@breaks("nothing_changes")
def target_network_copied_the_wrong_way() -> None:
    policy = mlp(STATE, 24, ACTIONS)
    target = copy.deepcopy(policy)
    optimizer, memory = Adam(policy.parameters(), 0.005), deque(maxlen=200)
    for _ in range(12):
        states = observations()
        with torch.no_grad():
            actions = policy(states).argmax(1)
        memory.append((states, actions, rewards(states, actions), observations()))
        states, actions, reward, following = random.choice(memory)
        with torch.no_grad():
            goal = reward + 0.9 * target(following).amax(1)
        value = policy(states).gather(1, actions[:, None])[:, 0]
        take_step(optimizer, F.smooth_l1_loss(value, goal))
        policy.load_state_dict(target.state_dict())


# ---- never_changes


@breaks("never_changes")
def learned_first_state_reset_in_each_forward() -> None:
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.zeros(1, 1, 16))
            self.gru = nn.GRU(SIGNALS, 16, batch_first=True)
            self.head = nn.Linear(16, CLASSES)

        def reset(self) -> None:
            self.first.data.zero_()

        def forward(self, x: Tensor) -> Tensor:
            self.reset()
            return self.head(self.gru(x, self.first.expand(-1, len(x), -1).contiguous())[0][:, -1])

    net = Stateful()
    optimizer = Adam(net.parameters(), 0.01)
    for _ in range(12):
        x, y = signals()
        take_step(optimizer, F.cross_entropy(net(x), y))


@breaks("never_changes")
def schedule_of_a_group_that_stays_at_zero() -> None:
    net = Vit(dropout=0.1)
    head = list(net.head.parameters())
    rest = [p for name, p in net.named_parameters() if not name.startswith("head")]
    optimizer = SGD([{"params": rest}, {"params": head}], 0.02, momentum=0.9)
    scheduler = LambdaLR(optimizer, [lambda step: 0.95**step, lambda step: step // 100])
    for x, y in forever(image_loader(), 12):
        take_step(optimizer, F.cross_entropy(net(x), y))
        scheduler.step()


# ---- optimizer_remade


@breaks("optimizer_remade")
def new_optimizer_to_change_the_rate() -> None:
    class Trainer:
        def __init__(self, net: nn.Module) -> None:
            self.net, self.steps = net, 0

        def configure_optimizers(self) -> AdamW:
            return AdamW(self.net.parameters(), 0.01 * 0.9**self.steps)

        def training_step(self, x: Tensor, y: Tensor) -> float:
            optimizer = self.configure_optimizers()
            loss = F.cross_entropy(self.net(x), y)
            take_step(optimizer, loss)
            self.steps += 1
            return loss.item()

    trainer = Trainer(Gru())
    while trainer.steps < 14:
        trainer.training_step(*signals())


# ---- gradients_not_cleared


@breaks("gradients_not_cleared")
def cleared_once_an_epoch() -> None:
    net = Vae()
    optimizer = SGD(net.parameters(), 0.01)
    for epoch in range(2):
        optimizer.zero_grad()
        total = 0.0
        for x, _ in point_loader(160):
            loss = elbo_loss(x, net(x))
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(epoch, total)


@breaks("gradients_not_cleared")
def closure_that_does_not_clear() -> None:
    net = GraphNet()
    optimizer = SGD(net.parameters(), 0.01, momentum=0.5)
    for _ in range(12):
        x, adjacency, y = graphs()

        def closure(x: Tensor = x, adjacency: Tensor = adjacency, y: Tensor = y) -> Tensor:
            loss = F.cross_entropy(net(x, adjacency), y)
            loss.backward()
            return loss

        optimizer.step(closure)


@breaks("gradients_not_cleared")
def generator_not_cleared_in_a_gan() -> None:
    generator, critic = mlp(4, 16, FEATURES), mlp(FEATURES, 16, 1)
    g_optimizer, d_optimizer = Adam(generator.parameters(), 1e-3), Adam(critic.parameters(), 1e-3)
    one, zero = torch.ones(16, 1), torch.zeros(16, 1)
    criterion = nn.BCEWithLogitsLoss()
    for _ in range(12):
        real, fake = points()[0], generator(torch.randn(16, 4))
        take_step(
            d_optimizer, criterion(critic(real), one) + criterion(critic(fake.detach()), zero)
        )
        d_optimizer.zero_grad()  # and the generator's?
        criterion(critic(fake), one).backward()
        g_optimizer.step()


# ---- clipped_after_step, clipped_early


@breaks("clipped_after_step")
def clipped_by_a_callback_after_the_step() -> None:
    class Trainer:
        def __init__(self, model: nn.Module, after_step: list[Callable[[nn.Module], None]]) -> None:
            self.model, self.after_step = model, after_step
            self.optimizer = RMSprop(model.parameters(), 0.002)

        def fit(self, steps: int) -> None:
            for _ in range(steps):
                take_step(self.optimizer, translation_loss(self.model, texts()))
                for callback in self.after_step:
                    callback(self.model)

    Trainer(Seq2Seq(), [lambda model: clip_grad_norm_(model.parameters(), 0.5)]).fit(10)


@breaks("clipped_early")
def clipped_in_the_helper_of_a_microbatch() -> None:
    net, accumulate = Gru(), 3
    optimizer = Adam(net.parameters(), 0.01)

    def micro_step(last: bool) -> None:
        with nullcontext():  # no_sync() on several ranks
            x, y = signals()
            (F.cross_entropy(net(x), y) / accumulate).backward()
            clip_grad_norm_(net.parameters(), 0.1)
        if last:
            optimizer.step()
            optimizer.zero_grad()

    for step in range(24):
        micro_step((step + 1) % accumulate == 0)


# ---- eval_while_training, train_while_evaluating


@breaks("eval_while_training")
def sampling_leaves_the_model_in_eval() -> None:
    @torch.no_grad()
    def translate(model: Seq2Seq, tokens: Tensor) -> Tensor:
        model.eval()
        target = tokens[:, -1:]
        for _ in range(3):
            target = torch.cat([target, model(tokens, target)[:, -1:].argmax(-1)], 1)
        return target

    model = Seq2Seq(dropout=0.2)
    optimizer = Adam(model.parameters(), 0.005)
    for step in range(20):
        take_step(optimizer, translation_loss(model, texts()))
        if step % 5 == 0:
            print(translate(model, texts(1)).tolist())


@breaks("eval_while_training")
def loader_of_a_pretrained_model_returns_it_in_eval() -> None:
    def load_pretrained(path: str) -> Vit:
        net = Vit(dropout=0.2)
        net.load_state_dict(torch.load(path))
        return net.eval()

    path = os.path.join(tempfile.mkdtemp(), "vit.pt")
    torch.save(Vit(dropout=0.2).state_dict(), path)
    net = load_pretrained(path)
    optimizer = AdamW(net.parameters(), 0.003)
    for x, y in forever(image_loader(), 12):
        take_step(optimizer, F.cross_entropy(net(x), y))


@breaks("train_while_evaluating")
def early_stopping_on_a_loss_with_dropout() -> None:
    net = GraphNet(dropout=0.3)
    optimizer = Adam(net.parameters(), 0.01)
    held_out, best, patience, epoch = graphs(24), float("inf"), 0, 0
    while patience < 3 and epoch < 5:
        for _ in range(4):
            x, adjacency, y = graphs()
            take_step(optimizer, F.cross_entropy(net(x, adjacency), y))
        with torch.no_grad():
            loss = F.cross_entropy(net(held_out[0], held_out[1]), held_out[2]).item()
        best, patience = (loss, 0) if loss < best else (best, patience + 1)
        epoch += 1


@breaks("train_while_evaluating")
def policy_scored_in_train_mode() -> None:
    policy = nn.Sequential(
        nn.Linear(STATE, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, ACTIONS)
    )
    optimizer = Adam(policy.parameters(), 0.01)
    for step in range(18):
        states = observations()
        best = states[:, :ACTIONS].argmax(1)  # cloned from an expert
        take_step(optimizer, F.cross_entropy(policy(states), best))
        if step % 6 == 5:
            with torch.no_grad():
                states = observations(64)
                print(step, rewards(states, policy(states).argmax(1)).mean().item())


# ---- schedulers


@breaks("scheduler_never_stepped")
def warm_up_made_beside_the_cosine() -> None:
    net = Vit()
    optimizer = AdamW(net.parameters(), 0.003)
    schedulers = {
        "warm_up": LinearLR(optimizer, 0.1, total_iters=4),
        "cosine": CosineAnnealingLR(optimizer, 12),
    }
    for x, y in forever(image_loader(), 12):
        take_step(optimizer, F.cross_entropy(net(x), y))
        schedulers["cosine"].step()


@breaks("scheduler_never_stepped")
def condition_of_the_schedule_the_wrong_way_round() -> None:
    class Trainer:
        def __init__(self, net: nn.Module, steps: int) -> None:
            self.net, self.steps = net, steps
            self.optimizer = SGD(net.parameters(), 0.1, momentum=0.9)
            self.scheduler = OneCycleLR(self.optimizer, 0.1, total_steps=steps)

        def train(self) -> None:
            for _ in range(self.steps):
                x, y = signals()
                take_step(self.optimizer, F.cross_entropy(self.net(x), y))
                if self.scheduler is None:
                    self.scheduler.step()

    Trainer(Gru(), 12).train()


@breaks("scheduler_before_optimizer")
def schedule_stepped_by_each_microbatch() -> None:
    model, accumulate = Seq2Seq(), 4
    optimizer = AdamW(model.parameters(), 0.005)
    scheduler = CosineAnnealingLR(optimizer, 24)
    for step in range(24):
        (translation_loss(model, texts()) / accumulate).backward()
        if (step + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()


@breaks("scheduler_before_optimizer")
def schedule_of_the_generator_before_its_first_step() -> None:
    generator, critic = mlp(4, 16, FEATURES), mlp(FEATURES, 16, 1)
    optimizers = RMSprop(generator.parameters(), 1e-3), RMSprop(critic.parameters(), 1e-3)
    schedulers = [ExponentialLR(optimizer, 0.98) for optimizer in optimizers]
    for step in range(20):
        real = points()[0]
        optimizers[1].zero_grad()
        loss = critic(generator(torch.randn(16, 4)).detach()).mean() - critic(real).mean()
        (loss + 0.1 * critic(real).square().mean()).backward()
        optimizers[1].step()
        if step % 4 == 3:
            take_step(optimizers[0], -critic(generator(torch.randn(16, 4))).mean())
        for scheduler in schedulers:
            scheduler.step()


# ---- same_batch


@breaks("same_batch")
def generator_of_batches_begun_in_each_step() -> None:
    recorded = [signals() for _ in range(6)]

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in recorded:
            yield x / x.std(), y

    net = Gru()
    optimizer = Adam(net.parameters(), 0.01)
    for _ in range(12):
        x, y = next(batches())
        take_step(optimizer, F.cross_entropy(net(x), y))


@breaks("same_batch")
def replay_sampled_by_a_seeded_generator() -> None:
    data = points(200)[0].numpy()

    def sample(count: int) -> Tensor:
        rows = np.random.RandomState(42).choice(len(data), count, replace=False)
        return torch.from_numpy(data[rows])

    net = Vae()
    optimizer = AdamW(net.parameters(), 0.005)
    for _ in range(12):
        x = sample(16)
        take_step(optimizer, elbo_loss(x, net(x)))


# ---- weights_parted


@breaks("weights_parted")
def tied_by_a_state_dict() -> None:
    model = Seq2Seq()
    model.head.load_state_dict({"weight": model.target.weight})
    optimizer = Adam(model.parameters(), 0.005)
    for _ in range(12):
        take_step(optimizer, translation_loss(model, texts()))


@breaks("weights_parted")
def stages_copied_apart() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.body = nn.Embedding(VOCABULARY, 16), mlp(16, 32, 16)
            self.head = nn.Linear(16, VOCABULARY, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.body(self.embedding(tokens)))

    whole = Tagger()
    stages = [copy.deepcopy(stage) for stage in (whole.embedding, whole.body, whole.head)]
    pipeline = nn.Sequential(*stages)
    optimizer = SGD(pipeline.parameters(), 0.1, momentum=0.9)
    for _ in range(12):
        tokens = texts(8)
        optimizer.zero_grad()
        F.cross_entropy(pipeline(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()


# ---- batch_norm_still


@breaks("batch_norm_still")
def momentum_of_norms_rounded_by_its_schedule() -> None:
    def norm_momentum(epoch: int) -> float:
        return round(0.1 * 0.5 ** (epoch // 20))

    encoder = nn.Sequential(
        nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES)
    )
    optimizer = Adam(encoder.parameters(), 0.01)
    for epoch in range(3):
        for module in encoder.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.momentum = norm_momentum(epoch)
        for x, y in point_loader(64):
            take_step(optimizer, F.cross_entropy(encoder(2 * x + 0.5), y))


# ---- state_not_continued


@breaks("state_not_continued")
def optimizer_made_again_after_its_state_was_loaded() -> None:
    path = os.path.join(tempfile.mkdtemp(), "checkpoint.pt")

    def train(net: nn.Module, optimizer: Adam, steps: int) -> None:
        for _ in range(steps):
            x, y = signals()
            take_step(optimizer, F.cross_entropy(net(x), y))

    net = Gru()
    optimizer = Adam(net.parameters(), 0.005)
    train(net, optimizer, 6)
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, path)

    saved = torch.load(path)
    resumed = Gru()
    optimizer = Adam(resumed.parameters(), 0.005)
    resumed.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    optimizer = Adam(resumed.parameters(), 0.001)  # for a smaller rate
    train(resumed, optimizer, 8)


@breaks("state_not_continued")
def no_name_of_the_checkpoint_fits() -> None:
    path = os.path.join(tempfile.mkdtemp(), "pretrained.pt")
    torch.save({f"module.{k}": v for k, v in Vit().state_dict().items()}, path)
    net = Vit()
    net.load_state_dict(torch.load(path), strict=False)
    optimizer = AdamW(net.parameters(), 0.003)
    for x, y in forever(image_loader(), 10):
        take_step(optimizer, F.cross_entropy(net(x), y))


# ---- rounded_away


@breaks("rounded_away")
def autoencoder_in_bfloat16_with_a_small_rate() -> None:
    net = mlp(FEATURES, 32, 8, 32, FEATURES, activation=nn.SiLU).bfloat16()
    optimizer = Adam(net.parameters(), 5e-6)
    for _ in range(14):
        x = points(32)[0].bfloat16()
        take_step(optimizer, F.mse_loss(net(x), x))


# ---- loss_ignores_inputs


@breaks("loss_ignores_inputs")
def class_token_taken_before_the_blocks() -> None:
    class Classifier(Vit):
        def forward(self, x: Tensor) -> Tensor:
            tokens = self.tokens(x)
            token = tokens[:, 0]
            for block in self.blocks:
                tokens = block(tokens)
            return self.head(token)

    net = Classifier()
    optimizer = AdamW(net.parameters(), 0.003)
    for x, y in forever(image_loader(), 12):
        take_step(optimizer, F.cross_entropy(net(x), y))


@breaks("loss_ignores_inputs")
def graphs_pooled_over_the_batch() -> None:
    class Pooled(GraphNet):
        def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
            pooled = self.nodes(x, adjacency).mean((0, 1))
            return self.head(pooled).expand(len(x), -1)

    net = Pooled()
    optimizer = Adam(net.parameters(), 0.01)
    for _ in range(12):
        x, adjacency, y = graphs(16)
        take_step(optimizer, F.cross_entropy(net(x, adjacency), y))


# ---- ranks


@breaks("replicas_differ", ranks=2)
def checkpoint_loaded_by_the_first_rank_alone() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    pretrained = Gru().state_dict()
    model = DistributedDataParallel(Gru())
    if rank == 0:
        model.module.load_state_dict(pretrained)
    optimizer = Adam(model.parameters(), 0.01)
    torch.manual_seed(50 + rank)
    for _ in range(10):
        x, y = signals()
        take_step(optimizer, F.cross_entropy(model(x), y))
    dist.destroy_process_group()


@breaks("gradients_not_averaged", ranks=2)
def last_microbatch_under_no_sync_too() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Vit(depth=1))
    optimizer = SGD(model.parameters(), 0.02, momentum=0.9)
    torch.manual_seed(50 + dist.get_rank())
    for _ in range(8):
        with model.no_sync():
            for _ in range(2):
                x, y = images()
                (F.cross_entropy(model(x), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


@breaks("same_batch_on_ranks", ranks=2)
def environments_of_all_ranks_seeded_alike() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model = DistributedDataParallel(mlp(STATE, 16, ACTIONS, activation=nn.Tanh))
    optimizer = Adam(model.parameters(), 0.01)
    for _ in range(10):
        states = observations()
        choice = Categorical(logits=model(states))
        actions = choice.sample()
        reward = rewards(states, actions)
        take_step(optimizer, (-choice.log_prob(actions) * (reward - reward.mean())).mean())
    dist.destroy_process_group()


@breaks("same_batch_on_ranks", ranks=2)
def each_rank_reads_the_whole_file_in_order() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    loader = DataLoader(TensorDataset(*signals(60)), 12)
    model = DistributedDataParallel(Gru())
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(2):
        for x, y in loader:
            take_step(optimizer, F.cross_entropy(model(x), y))
    dist.destroy_process_group()
