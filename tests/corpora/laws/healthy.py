"""Healthy trainings whose loops are unusual: what a careless check would take for a mistake."""

from __future__ import annotations

import copy
import math
import os
import tempfile

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import LBFGS, SGD, Adam, AdamW, SparseAdam
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint

from tests.corpora.laws.models import (
    CLASSES,
    FEATURES,
    VOCABULARY,
    Cnn,
    LanguageModel,
    Mlp,
    accuracy,
    forever,
    image_loader,
    images,
    next_token_loss,
    point_loader,
    points,
    texts,
)
from tests.corpora.laws.program import healthy


def follow(slow: nn.Module, fast: nn.Module, rate: float) -> None:
    """Move the parameters of `slow` towards those of `fast`."""
    with torch.no_grad():
        for average, parameter in zip(slow.parameters(), fast.parameters(), strict=True):
            average.lerp_(parameter, rate)


# ---- epochs, schedules, accumulation


@healthy
def evaluation_between_epochs() -> None:
    net = Cnn(dropout=0.2)
    optimizer = AdamW(net.parameters(), 0.01)
    scheduler = StepLR(optimizer, 1, 0.5)
    training, validation = image_loader(32), image_loader(16)
    for epoch in range(3):
        net.train()
        for x, y in training:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
        scheduler.step()
        net.eval()
        print(epoch, accuracy(net, validation))


@healthy
def never_switched_to_eval_without_need() -> None:
    net = Mlp()
    optimizer = SGD(net.parameters(), 0.1)
    for epoch in range(2):
        for x, y in point_loader():
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
        print(epoch, accuracy(net, point_loader(32)))


@healthy
def accumulation_clipped_once() -> None:
    model = LanguageModel(dropout=0.1)
    optimizer = AdamW(model.parameters(), 0.003)
    for _ in range(6):
        for _ in range(4):
            (next_token_loss(model, texts()) / 4).backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


@healthy
def accumulation_with_a_remainder() -> None:
    net = Mlp(dropout=0.1)
    optimizer = SGD(net.parameters(), 0.1, momentum=0.9)
    batches = 5
    for _ in range(4):
        for index, (x, y) in enumerate(forever(point_loader(), batches)):
            (F.cross_entropy(net(x), y) / 2).backward()
            if index % 2 == 1 or index == batches - 1:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)


@healthy
def full_batch() -> None:
    net = Mlp()
    x, y = points(80)
    optimizer = Adam(net.parameters(), 0.02)
    for _ in range(15):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()


@healthy
def full_batch_by_lbfgs() -> None:
    net = Mlp(width=8)
    x, y = points(60)
    optimizer = LBFGS(net.parameters(), lr=0.5, max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        return loss

    for _ in range(6):
        optimizer.step(closure)


@healthy
def warm_up_from_zero() -> None:
    model = LanguageModel()
    optimizer = AdamW(model.parameters(), 0.005)
    scheduler = LambdaLR(optimizer, lambda step: min(step / 5, 1.0))
    for _ in range(12):
        loss = next_token_loss(model, texts())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()


@healthy
def cosine_schedule_down_to_zero() -> None:
    net = Cnn()
    optimizer = SGD(net.parameters(), 0.1, momentum=0.9, nesterov=True)
    scheduler = CosineAnnealingLR(optimizer, 8)
    for x, y in forever(image_loader(), 8):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        scheduler.step()


@healthy
def one_cycle_of_rate_and_momentum() -> None:
    net = Mlp(dropout=0.1)
    optimizer = SGD(net.parameters(), 0.01, momentum=0.9)
    scheduler = OneCycleLR(optimizer, 0.2, total_steps=12)
    for x, y in forever(point_loader(), 12):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        scheduler.step()


@healthy
def rate_reduced_on_a_plateau() -> None:
    net = Mlp(dropout=0.2)
    optimizer = Adam(net.parameters(), 0.02)
    scheduler = ReduceLROnPlateau(optimizer, patience=1)
    training, validation = point_loader(64), point_loader(32)
    for _ in range(4):
        net.train()
        for x, y in training:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
        net.eval()
        scheduler.step(1 - accuracy(net, validation))


@healthy
def gradients_kept_as_zeros() -> None:
    net = Mlp()
    optimizer = SGD(net.parameters(), 0.1, momentum=0.9)
    for x, y in forever(point_loader(), 10):
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(net(x), y).backward()
        optimizer.step()


@healthy
def descent_by_hand() -> None:
    net = Mlp()
    for step, (x, y) in enumerate(forever(point_loader(), 12)):
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.2 * 0.95**step * parameter.grad
                parameter.grad = None


@healthy
def sharpness_aware_steps() -> None:
    net = Cnn()
    optimizer = SGD(net.parameters(), 0.05, momentum=0.9)
    for x, y in forever(image_loader(), 8):
        F.cross_entropy(net(x), y).backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
            shifts = [0.05 * p.grad / (norm + 1e-12) for p in net.parameters()]
            for parameter, shift in zip(net.parameters(), shifts, strict=True):
                parameter += shift
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        with torch.no_grad():
            for parameter, shift in zip(net.parameters(), shifts, strict=True):
                parameter -= shift
        optimizer.step()
        optimizer.zero_grad()


# ---- precision and memory


@healthy
def autocast_in_bfloat16() -> None:
    model = LanguageModel(dropout=0.1)
    optimizer = AdamW(model.parameters(), 0.003)
    for _ in range(8):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = next_token_loss(model, texts())
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@healthy
def scaler_that_skips_the_first_steps() -> None:
    net = Cnn()
    optimizer = AdamW(net.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
    scheduler = CosineAnnealingLR(optimizer, 16)
    for x, y in forever(image_loader(), 16):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(net.parameters(), 1.0)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= scale:
            scheduler.step()


@healthy
def bfloat16_with_masters_in_float32() -> None:
    model = LanguageModel().bfloat16()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = AdamW(masters, 0.003)
    for _ in range(10):
        next_token_loss(model, texts()).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)


@healthy
def blocks_recomputed() -> None:
    class Recomputed(LanguageModel):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens) + self.position
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(self.norm(x))

    model = Recomputed(dropout=0.1)
    optimizer = Adam(model.parameters(), 0.003)
    for _ in range(8):
        loss = next_token_loss(model, texts())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ---- parts that differ on purpose


@healthy
def frozen_backbone_with_its_norms_in_eval() -> None:
    class Finetuned(Cnn):
        def train(self, mode: bool = True) -> Finetuned:
            super().train(mode)
            self.stem.eval()
            self.body.eval()
            return self

    net = Finetuned(dropout=0.2)
    net.requires_grad_(False)
    net.head.requires_grad_(True)
    optimizer = AdamW(net.head.parameters(), 0.02)
    for _ in range(2):
        net.train()
        for x, y in image_loader(40):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
        net.eval()
        print(accuracy(net, image_loader(16)))


@healthy
def adapters_of_low_rank_by_hand() -> None:
    class LowRank(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down = nn.Parameter(0.1 * torch.randn(2, base.in_features))
            self.up = nn.Parameter(torch.zeros(base.out_features, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + F.linear(F.linear(x, self.down), self.up)

    model = LanguageModel(dropout=0.1).requires_grad_(False)
    for block in model.blocks:
        block.attention.qkv = LowRank(block.attention.qkv)
        block.attention.out = LowRank(block.attention.out)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], 0.01)
    for _ in range(10):
        loss = next_token_loss(model, texts())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@healthy
def layers_unfrozen_later() -> None:
    net = Cnn()
    net.requires_grad_(False)
    net.head.requires_grad_(True)
    optimizer = SGD(net.head.parameters(), 0.05, momentum=0.9)
    for step, (x, y) in enumerate(forever(image_loader(), 12)):
        if step == 4:
            net.body.requires_grad_(True)
            optimizer.add_param_group({"params": net.body.parameters(), "lr": 0.01})
        if step == 8:
            net.stem.requires_grad_(True)
            optimizer.add_param_group({"params": net.stem.parameters(), "lr": 0.005})
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()


@healthy
def heads_that_train_in_turn() -> None:
    class TwoTasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(FEATURES, 24), nn.Tanh())
            self.classes, self.sums = nn.Linear(24, CLASSES), nn.Linear(24, 1)

        def forward(self, x: Tensor, task: str) -> Tensor:
            return getattr(self, task)(self.trunk(x))

    net = TwoTasks()
    optimizer = AdamW(net.parameters(), 0.01)
    for step, (x, y) in enumerate(forever(point_loader(), 12)):
        optimizer.zero_grad()
        if step % 2:
            F.mse_loss(net(x, "sums")[:, 0], x.sum(1)).backward()
        else:
            F.cross_entropy(net(x, "classes"), y).backward()
        optimizer.step()


@healthy
def tied_embeddings() -> None:
    model = LanguageModel()
    model.head.weight = model.embedding.weight
    optimizer = AdamW(model.parameters(), 0.003)
    for _ in range(8):
        loss = next_token_loss(model, texts())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@healthy
def sparse_embeddings_with_an_optimizer_of_their_own() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.EmbeddingBag(VOCABULARY, 16, sparse=True)
            self.head = nn.Linear(16, VOCABULARY)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embedding(tokens))

    net = Bag()
    optimizers = [
        SparseAdam(list(net.embedding.parameters()), 0.01),
        SGD(net.head.parameters(), 0.1),
    ]
    for _ in range(10):
        tokens = texts(16)
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(net(tokens[:, :-1]), tokens[:, -1]).backward()
        for optimizer in optimizers:
            optimizer.step()


@healthy
def embedding_by_sgd_and_the_rest_by_adam() -> None:
    model = LanguageModel()
    tables = SGD(model.embedding.parameters(), 0.5)
    rest = Adam([p for n, p in model.named_parameters() if "embedding" not in n], 0.003)
    for _ in range(10):
        loss = next_token_loss(model, texts())
        tables.zero_grad()
        rest.zero_grad()
        loss.backward()
        tables.step()
        rest.step()


@healthy
def unused_head_that_is_frozen() -> None:
    net = Mlp(dropout=0.1)
    net.pretraining_head = nn.Linear(24, 100).requires_grad_(False)
    optimizer = AdamW(filter(lambda p: p.requires_grad, net.parameters()), 0.01)
    for x, y in forever(point_loader(), 10):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()


# ---- averages, teachers, targets


@healthy
def average_of_the_weights() -> None:
    net = Cnn(dropout=0.1)
    average = copy.deepcopy(net).requires_grad_(False).eval()
    optimizer = AdamW(net.parameters(), 0.01)
    for x, y in forever(image_loader(), 10):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        follow(average, net, 0.05)
        for mine, theirs in zip(average.buffers(), net.buffers(), strict=True):
            mine.copy_(theirs)
    print(accuracy(average, image_loader(16)))


@healthy
def stochastic_weight_averaging() -> None:
    net = Cnn()
    average = AveragedModel(net)
    optimizer = SGD(net.parameters(), 0.05, momentum=0.9)
    scheduler, late = CosineAnnealingLR(optimizer, 4), SWALR(optimizer, 0.02, anneal_epochs=1)
    loader = image_loader(32)
    for epoch in range(4):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
        if epoch >= 2:
            average.update_parameters(net)
            late.step()
        else:
            scheduler.step()
    update_bn(loader, average)
    average.eval()
    print(accuracy(average, image_loader(16)))


@healthy
def mean_teacher() -> None:
    student = Mlp(dropout=0.2)
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = Adam(student.parameters(), 0.01)
    for x, y in forever(point_loader(), 12):
        unlabelled, _ = points()
        with torch.no_grad():  # the teacher's dropout is meant: it sees noise of its own
            target = teacher(unlabelled).softmax(1)
        consistency = F.mse_loss(student(unlabelled).softmax(1), target)
        loss = F.cross_entropy(student(x), y) + 0.5 * consistency
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        follow(teacher, student, 0.05)


@healthy
def distillation_from_a_frozen_teacher() -> None:
    teacher = Cnn(dropout=0.1).requires_grad_(False).eval()
    student = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, CLASSES))
    optimizer = AdamW(student.parameters(), 0.005)
    for x, y in forever(image_loader(), 10):
        with torch.no_grad():
            soft = (teacher(x) / 2).softmax(1)
        scores = student(x)
        loss = F.cross_entropy(scores, y) + F.kl_div(
            (scores / 2).log_softmax(1), soft, reduction="batchmean"
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@healthy
def momentum_encoder_with_a_queue() -> None:
    query = Mlp(classes=8)
    key = copy.deepcopy(query).requires_grad_(False)
    queue = F.normalize(torch.randn(64, 8), dim=1)
    optimizer = SGD(query.parameters(), 0.05, momentum=0.9)
    for _ in range(12):
        x, _ = points()
        q = F.normalize(query(x + 0.1 * torch.randn_like(x)), dim=1)
        with torch.no_grad():
            follow(key, query, 0.1)
            k = F.normalize(key(x + 0.1 * torch.randn_like(x)), dim=1)
        scores = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], 1) / 0.2
        loss = F.cross_entropy(scores, torch.zeros(len(x), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        queue = torch.cat([k, queue])[:64]


def q_learning(update_target: object) -> None:
    """Train action values against a target network."""
    online = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = Adam(online.parameters(), 0.005)
    state, replay = torch.randn(4), []
    for step in range(28):
        with torch.no_grad():
            action = online(state).argmax() if step % 3 else torch.randint(0, 2, ())
        following = 0.9 * state + 0.3 * torch.randn(4) + 0.1 * action
        replay.append((state, action, following.sum(), following))
        state = following
        if step < 12:
            continue
        drawn = [replay[index] for index in torch.randint(0, len(replay), (8,)).tolist()]
        states, actions, rewards, followings = map(torch.stack, zip(*drawn, strict=True))
        with torch.no_grad():
            goal = rewards + 0.9 * target(followings).max(1).values
        value = online(states).gather(1, actions[:, None])[:, 0]
        loss = F.smooth_l1_loss(value, goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_target(target, online, step)


@healthy
def target_network_updated_hard() -> None:
    def update(target: nn.Module, online: nn.Module, step: int) -> None:
        if step % 5 == 0:
            target.load_state_dict(online.state_dict())

    q_learning(update)


@healthy
def target_network_updated_softly() -> None:
    q_learning(lambda target, online, step: follow(target, online, 0.1))


@healthy
def policy_gradient_with_rollouts() -> None:
    class ActorCritic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(4, 16), nn.Tanh())
            self.actor, self.critic = nn.Linear(16, 2), nn.Linear(16, 1)

        def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
            x = self.trunk(states)
            return self.actor(x).log_softmax(-1), self.critic(x)[..., 0]

    net = ActorCritic()
    optimizer = Adam(net.parameters(), 0.01)
    for _ in range(5):
        state, rows = torch.randn(8, 4), []
        with torch.no_grad():
            for _ in range(6):
                logs, _ = net(state)
                action = torch.distributions.Categorical(logits=logs).sample()
                reward = torch.where(state[:, 0] > 0, action == 1, action == 0).float()
                rows.append((state, action, reward, logs.gather(1, action[:, None])[:, 0]))
                state = torch.randn(8, 4)
        states, actions, rewards, old = map(torch.cat, zip(*rows, strict=True))
        for _ in range(2):  # two passes over the same rollouts
            logs, values = net(states)
            ratio = (logs.gather(1, actions[:, None])[:, 0] - old).exp()
            advantage = rewards - values.detach()
            gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            entropy = -(logs.exp() * logs).sum(1).mean()
            loss = F.mse_loss(values, rewards) - gain - 0.01 * entropy
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()


# ---- generators


def make_gan() -> tuple[nn.Module, nn.Module]:
    generator = nn.Sequential(
        nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, FEATURES)
    )
    discriminator = nn.Sequential(
        nn.Linear(FEATURES, 24), nn.LeakyReLU(0.2), nn.Linear(24, 24), nn.BatchNorm1d(24),
        nn.LeakyReLU(0.2), nn.Linear(24, 1),
    )  # fmt: skip
    return generator, discriminator


@healthy
def gan_discriminator_first() -> None:
    generator, discriminator = make_gan()
    opt_g = Adam(generator.parameters(), 0.001, betas=(0.5, 0.999))
    opt_d = Adam(discriminator.parameters(), 0.001, betas=(0.5, 0.999))
    ones, zeros = torch.ones(16, 1), torch.zeros(16, 1)
    for real, _ in forever(point_loader(), 10):
        fake = generator(torch.randn(16, 6))
        opt_d.zero_grad()
        loss_real = F.binary_cross_entropy_with_logits(discriminator(real), ones)
        loss_fake = F.binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros)
        (loss_real + loss_fake).backward()
        opt_d.step()
        opt_g.zero_grad()
        F.binary_cross_entropy_with_logits(discriminator(fake), ones).backward()
        opt_g.step()


@healthy
def gan_generator_first() -> None:
    generator, discriminator = make_gan()
    opt_g, opt_d = Adam(generator.parameters(), 0.001), Adam(discriminator.parameters(), 0.001)
    ones, zeros = torch.ones(16, 1), torch.zeros(16, 1)
    for real, _ in forever(point_loader(), 10):
        opt_g.zero_grad()
        fake = generator(torch.randn(16, 6))
        F.binary_cross_entropy_with_logits(discriminator(fake), ones).backward()
        opt_g.step()
        opt_d.zero_grad()  # also what the generator's loss has left here
        loss_real = F.binary_cross_entropy_with_logits(discriminator(real), ones)
        loss_fake = F.binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros)
        ((loss_real + loss_fake) / 2).backward()
        opt_d.step()


@healthy
def diffusion_with_samples_in_between() -> None:
    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time = nn.Embedding(20, 24)
            self.first, self.last = nn.Linear(FEATURES, 24), nn.Linear(24, FEATURES)
            self.norm, self.dropout = nn.LayerNorm(24), nn.Dropout(0.1)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return self.last(self.dropout(F.silu(self.norm(self.first(x) + self.time(t)))))

    net = Denoiser()
    optimizer = AdamW(net.parameters(), 0.005)
    kept = torch.cos(torch.linspace(0, math.pi / 2, 21)[1:-1])
    for step, (x, _) in enumerate(forever(point_loader(), 12)):
        t = torch.randint(0, len(kept), (len(x),))
        noise = torch.randn_like(x)
        signal = kept[t][:, None]
        noisy = signal * x + (1 - signal**2).sqrt() * noise
        optimizer.zero_grad()
        F.mse_loss(net(noisy, t), noise).backward()
        optimizer.step()
        if step % 4 == 3:
            net.eval()
            with torch.no_grad():
                sample = torch.randn(4, FEATURES)
                for index in reversed(range(len(kept))):
                    sample = sample - 0.05 * net(sample, torch.full((4,), index))
            net.train()


@healthy
def dropout_kept_at_evaluation_on_purpose() -> None:
    net = Cnn(dropout=0.3)
    optimizer = Adam(net.parameters(), 0.01)
    for _ in range(2):
        net.train()
        for x, y in image_loader(32):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
        net.eval()
        for module in net.modules():
            if isinstance(module, nn.Dropout):
                module.train()  # the spread of several answers is the uncertainty
        with torch.no_grad():
            x, _ = images()
            print(torch.stack([net(x).softmax(1) for _ in range(5)]).std(0).mean())


# ---- resuming


@healthy
def resumed_from_a_checkpoint() -> None:
    path = os.path.join(tempfile.mkdtemp(), "last.pt")
    for _ in range(2):
        net = Cnn(dropout=0.1)
        optimizer = AdamW(net.parameters(), 0.01)
        scheduler = CosineAnnealingLR(optimizer, 20)
        if os.path.exists(path):
            saved = torch.load(path)
            net.load_state_dict(saved["net"])
            optimizer.load_state_dict(saved["optimizer"])
            scheduler.load_state_dict(saved["scheduler"])
        for x, y in forever(image_loader(), 6):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            scheduler.step()
        states = {"net": net, "optimizer": optimizer, "scheduler": scheduler}
        torch.save({name: holder.state_dict() for name, holder in states.items()}, path)


@healthy
def new_head_on_pretrained_weights() -> None:
    path = os.path.join(tempfile.mkdtemp(), "pretrained.pt")
    torch.save(Mlp(classes=9).state_dict(), path)
    net = Mlp()
    pretrained = {n: v for n, v in torch.load(path).items() if not n.startswith("head")}
    net.load_state_dict(pretrained, strict=False)
    groups = [
        {"params": net.encoder.parameters(), "lr": 0.002},
        {"params": net.head.parameters(), "lr": 0.02},
    ]
    optimizer = AdamW(groups)
    for x, y in forever(point_loader(), 10):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
