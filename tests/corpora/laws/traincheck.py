"""The silent errors that TrainCheck (OSDI 2025) reproduced or found, rebuilt as trainings that a CPU
runs. A defect of a library is written here in plain torch, so that no old version is needed.

The law that each breaks was decided before the product had seen it: a law is broken where what it
says of a training is not true of all of it. The 20 that were reproduced (HW: faulty hardware):

    pytorch-forum-84911   all that the optimizer holds is frozen after it is made  nothing_changes
    stackoverflow-60335387  zero_grad() is missing                            gradients_not_cleared
    stackoverflow-67180955  workers of a loader draw the same numbers                    same_batch
    pytorch-115607        a compiled step without a guard does nothing any more     nothing_changes
    pytorch-84803, HW     copies between cards arrive as zeros                  loss_ignores_inputs
    baichuan2-86, HW      the same                                              loss_ignores_inputs
    pytorch-96600, HW     averaged gradients do not arrive on a rank         gradients_not_averaged
    pytorch-104336        a wrapper's hooks are lost in a move               gradients_not_averaged
    x-jxmnop              the wrapper is passed by in some steps             gradients_not_averaged
    deepspeed-1801        replicated weights are clipped on one rank only           replicas_differ
    mmpretrain-702        what should be frozen trains                                       no law
    pytorch-51800         a spectral norm that was never estimated is evaluated              no law
    transformers-33844    dropout of attention is on in eval mode                            no law
    transformers-34204    a processor makes one row of a whole batch                         no law
    transformers-33455    the trainer counts its steps wrong and stops early                 no law
    transformers-29903    what is saved is not what was trained                              no law
    lightning-thunder-725  autocast passes an operation by                                   no law
    transformers-17877    weights are initialised more than once; slow, and no more     not rebuilt
    transformers-23723    too many tokens are generated; nothing is trained             not rebuilt
    deepspeed-5794        a mixture of experts hangs; nothing is trained                not rebuilt

The 6 that were found:

    accelerate-2665       the optimizer is made before FSDP flattens         optimizer_holds_others
    deepspeed-6770        the optimizer does not hold what was replaced; ZeRO ends
                          with a KeyError, and without ZeRO the training goes on           not_held
    deepspeed-5489        a checkpoint lacks what is frozen                     state_not_continued
    deepspeed-6772        experts are put on the wrong cards; they compute the same     not rebuilt
    deepspeed-6714        ranks wait for each other for ever                            not rebuilt
    deepspeed-6089        ranks wait for each other for ever                            not rebuilt

And one that TrainCheck's pages tell of:

    "the bug that taught me more about PyTorch than years of using it": an update
                          is written to a copy of weights that are not contiguous     never_changes

Where it is cheap, `mended` takes the defect away.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset

from tests.corpora.laws.models import (
    CLASSES,
    FEATURES,
    VOCABULARY,
    Attention,
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
    take_step,
    texts,
)
from tests.corpora.laws.program import breaks, healthy
from tests.corpora.laws.second_models import Gru, Vit, mlp, signals

# ---- the optimizer and what it holds


@breaks("nothing_changes")
def all_but_the_norms_frozen_after_the_optimizer_was_made(mended: bool = False) -> None:
    """pytorch-forum-84911"""
    net = Cnn()
    net.head = nn.Linear(12, CLASSES)  # for the new classes
    optimizer = Adam(net.head.parameters(), 0.01)
    for name, parameter in net.named_parameters():
        if mended or "norm" not in name:
            parameter.requires_grad = False
    for parameter in net.head.parameters():
        parameter.requires_grad = mended
    loader, held_out = image_loader(48), image_loader(16)
    for epoch in range(2):
        net.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
        net.eval()
        print(epoch, loss.item(), accuracy(net, held_out))


@healthy
def head_trained_on_a_frozen_network() -> None:
    all_but_the_norms_frozen_after_the_optimizer_was_made(mended=True)


@breaks("optimizer_holds_others")
def optimizer_made_before_fsdp_flattens(mended: bool = False) -> None:
    """accelerate-2665"""
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    net = mlp(FEATURES, 24, CLASSES)
    optimizer = AdamW(net.parameters(), 0.01)
    cpu = torch.device("cpu")
    model = FullyShardedDataParallel(net, use_orig_params=False, device_id=cpu)
    if mended:
        optimizer = AdamW(model.parameters(), 0.01)
    for x, y in forever(point_loader(), 12):
        take_step(optimizer, F.cross_entropy(model(x), y))
    dist.destroy_process_group()


@healthy
def optimizer_made_behind_fsdp() -> None:
    optimizer_made_before_fsdp_flattens(mended=True)


@breaks("not_held")
def vocabulary_grown_after_the_optimizer_was_made(mended: bool = False) -> None:
    """deepspeed-6770"""

    def grow(model: LanguageModel, tokens: int) -> None:
        old, new = model.embedding, nn.Embedding(tokens, model.embedding.embedding_dim)
        with torch.no_grad():
            new.weight[: len(old.weight)] = old.weight
        model.embedding = new

    model = LanguageModel(depth=1)
    if mended:
        grow(model, VOCABULARY + 2)
    optimizer = AdamW(model.parameters(), 0.005)
    if not mended:
        grow(model, VOCABULARY + 2)
    for _ in range(12):
        take_step(optimizer, next_token_loss(model, texts()))


@healthy
def vocabulary_grown_before_the_optimizer_was_made() -> None:
    vocabulary_grown_after_the_optimizer_was_made(mended=True)


# ---- the step of the optimizer


class PlannedSgd(Optimizer):
    """SGD with momentum, as it is compiled: its step runs the plan made for the gradients it saw."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9, mended: bool = False) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.plan: list[Tensor] | None = None
        self.mended = mended

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        # the guard of a plan: all of its gradients are there
        if self.mended or self.plan is None or any(p.grad is None for p in self.plan):
            self.plan = [p for p in group["params"] if p.grad is not None]
        for p in self.plan:
            average = self.state[p].setdefault("average", torch.zeros_like(p))
            average.mul_(group["momentum"]).add_(p.grad)
            p.sub_(average, alpha=group["lr"])


@breaks("nothing_changes")
def step_compiled_anew_in_a_batch_without_gradients(mended: bool = False) -> None:
    """pytorch-115607"""
    net = Gru()
    optimizer = PlannedSgd(net.parameters(), 0.05, mended=mended)
    for step in range(16):
        optimizer.zero_grad()
        if step != 3:  # its batch was padding alone
            x, y = signals()
            F.cross_entropy(net(x), y).backward()
        optimizer.step()


@healthy
def batch_without_gradients_and_a_guard() -> None:
    step_compiled_anew_in_a_batch_without_gradients(mended=True)


class KernelAdam(Optimizer):
    """Adam by kernels of which those that add a product write contiguous memory only."""

    def __init__(self, params: Any, lr: float, mended: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        self.mended = mended

    def output(self, x: Tensor) -> Tensor:
        return x if self.mended else x.contiguous()  # which is a copy, unless x is contiguous

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"mean": torch.zeros_like(p), "square": torch.zeros_like(p), "t": 0}
                state["t"] += 1
                state["mean"].lerp_(p.grad, 0.1)
                self.output(state["square"].mul_(0.999)).addcmul_(p.grad, p.grad, value=0.001)
                root = (state["square"] / (1 - 0.999 ** state["t"])).sqrt() + 1e-8
                rate = group["lr"] / (1 - 0.9 ** state["t"])
                self.output(p).addcdiv_(state["mean"], root, value=-rate)


@breaks("never_changes")
def update_written_to_a_contiguous_copy(mended: bool = False) -> None:
    """The bug that taught me more about PyTorch than years of using it"""

    class SparseAutoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(FEATURES, 32), nn.Linear(32, FEATURES)
            self.encoder.weight.data = self.decoder.weight.data.T.clone()  # keeps its strides

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            codes = F.relu(self.encoder(x - self.decoder.bias))
            return self.decoder(codes), codes

    net = SparseAutoencoder()
    optimizer = KernelAdam(net.parameters(), 0.003, mended)
    for _ in range(14):
        x, _ = points(32)
        rebuilt, codes = net(x)
        take_step(optimizer, F.mse_loss(rebuilt, x) + 1e-3 * codes.abs().mean())


@healthy
def update_of_transposed_weights() -> None:
    update_written_to_a_contiguous_copy(mended=True)


@breaks("gradients_not_cleared")
def digits_without_zero_grad(mended: bool = False) -> None:
    """stackoverflow-60335387"""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3)
            self.fc1, self.fc2 = nn.Linear(64, 32), nn.Linear(32, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = F.max_pool2d(self.conv2(F.relu(self.conv1(x))), 2)
            return self.fc2(F.relu(self.fc1(torch.flatten(x, 1))))

    model, criterion = Net(), nn.CrossEntropyLoss()
    optimizer = Adam(model.parameters(), 1e-3)
    train_loader, test_loader = image_loader(48), image_loader(16, shuffle=False)
    for epoch in range(2):
        model.train()
        for data, label in train_loader:
            if mended:
                optimizer.zero_grad()
            loss = criterion(model(data), label)
            loss.backward()
            optimizer.step()
        model.eval()
        print(epoch, loss.item(), accuracy(model, test_loader))


@healthy
def digits_with_zero_grad() -> None:
    digits_without_zero_grad(mended=True)


# ---- the data


class Drawn(Dataset):
    """Samples that NumPy draws when they are asked for."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.from_numpy(np.random.randn(FEATURES)).float()
        return x, x[:CLASSES].argmax()


@breaks("same_batch")
def workers_that_draw_the_same_numbers(mended: bool = False) -> None:
    """stackoverflow-67180955"""
    state = np.random.get_state()

    def begin(worker: int) -> None:  # what a fork did before torch seeded NumPy, too
        np.random.set_state(state)

    loader = DataLoader(Drawn(), 8, num_workers=2, worker_init_fn=None if mended else begin)
    net = Mlp()
    optimizer = SGD(net.parameters(), 0.1, momentum=0.9)
    for x, y in forever(loader, 16):
        take_step(optimizer, F.cross_entropy(net(x), y))


@healthy
def workers_that_draw_their_own_numbers() -> None:
    workers_that_draw_the_same_numbers(mended=True)


class Lost(torch.autograd.Function):
    """A copy to another card, which arrives as zeros; so does the gradient on its way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient)


@breaks("loss_ignores_inputs")
def hidden_states_lost_between_two_cards(mended: bool = False) -> None:
    """pytorch-84803, baichuan2-86"""

    class OnTwoCards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = mlp(FEATURES, 24, 16), mlp(16, 24, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.second(x.clone() if mended else Lost.apply(x))

    net = OnTwoCards()
    optimizer = AdamW(net.parameters(), 0.01)
    for x, y in forever(point_loader(), 14):
        take_step(optimizer, F.cross_entropy(net(x), y))


@healthy
def hidden_states_copied_between_two_cards() -> None:
    hidden_states_lost_between_two_cards(mended=True)


@breaks("state_not_continued")
def checkpoint_without_what_is_frozen(mended: bool = False) -> None:
    """deepspeed-5489"""

    def train(net: nn.Module, optimizer: Optimizer, steps: int) -> None:
        for x, y in forever(point_loader(), steps):
            take_step(optimizer, F.cross_entropy(net(x), y))

    path = os.path.join(tempfile.mkdtemp(), "checkpoint.pt")
    net = Mlp()
    train(net, Adam(net.parameters(), 0.01), 6)
    net.encoder.requires_grad_(False)
    optimizer = Adam(net.head.parameters(), 0.01)
    train(net, optimizer, 6)
    trained = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    weights = {name: value for name, value in net.state_dict().items() if mended or name in trained}
    torch.save({"net": weights, "optimizer": optimizer.state_dict()}, path)

    saved = torch.load(path)
    net = Mlp()
    net.encoder.requires_grad_(False)
    net.load_state_dict(saved["net"], strict=False)
    optimizer = Adam(net.head.parameters(), 0.01)
    optimizer.load_state_dict(saved["optimizer"])
    train(net, optimizer, 8)


@healthy
def checkpoint_with_what_is_frozen() -> None:
    checkpoint_without_what_is_frozen(mended=True)


# ---- ranks


@breaks("gradients_not_averaged", ranks=2)
def averaged_gradients_that_do_not_arrive(mended: bool = False) -> None:
    """pytorch-96600; one transfer in five is lost on the way to rank 1"""
    dist.init_process_group("gloo")
    rank, chance = dist.get_rank(), torch.Generator().manual_seed(3)

    def average(state, bucket):  # type: ignore[no-untyped-def]  # torch takes no text as a type
        sent = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        is_lost = bool(torch.rand((), generator=chance) < 0.2) and rank == 1 and not mended
        return sent.then(lambda got: got.value()[0] * (0 if is_lost else 0.5))

    model = DistributedDataParallel(Vit(depth=1))
    model.register_comm_hook(None, average)
    optimizer = SGD(model.parameters(), 0.02, momentum=0.9)
    torch.manual_seed(50 + rank)
    for _ in range(16):
        x, y = images()
        take_step(optimizer, F.cross_entropy(model(x), y))
    dist.destroy_process_group()


@breaks(None, ranks=2)
def averaged_gradients_that_arrive() -> None:
    averaged_gradients_that_do_not_arrive(mended=True)


@breaks("gradients_not_averaged", ranks=2)
def wrapped_model_moved_to_doubles_and_back(mended: bool = False) -> None:
    """pytorch-104336; on a CPU a change of type loses the hooks as a change of the card does"""
    dist.init_process_group("gloo")
    torch.manual_seed(2)
    net = Mlp()
    optimizer = SGD(net.parameters(), 0.05)
    model = DistributedDataParallel(net)
    x, y = points(64)
    with torch.no_grad():
        print("exact loss before", F.cross_entropy(model.double()(x.double()), y).item())
    model.float()
    if mended:
        model = DistributedDataParallel(net)
    torch.manual_seed(50 + dist.get_rank())
    for _ in range(10):
        x, y = points()
        take_step(optimizer, F.cross_entropy(model(x), y))
    dist.destroy_process_group()


@breaks(None, ranks=2)
def model_wrapped_again_behind_its_move() -> None:
    wrapped_model_moved_to_doubles_and_back(mended=True)


@breaks("gradients_not_averaged", ranks=2)
def wrapper_passed_by_in_every_second_step(mended: bool = False) -> None:
    """x-jxmnop: the trainer keeps the model now as it is, now wrapped"""

    class Trainer:
        def __init__(self) -> None:
            self.model = LanguageModel(depth=1)
            self.wrapped = DistributedDataParallel(self.model)
            self.optimizer = AdamW(self.model.parameters(), 0.003)

        def train(self, steps: int) -> None:
            for step in range(steps):
                model = self.wrapped if mended or step % 2 else self.model
                take_step(self.optimizer, next_token_loss(model, texts()))

    dist.init_process_group("gloo")
    trainer = Trainer()
    torch.manual_seed(50 + dist.get_rank())
    trainer.train(12)
    dist.destroy_process_group()


@breaks(None, ranks=2)
def wrapper_used_in_every_step() -> None:
    wrapper_passed_by_in_every_second_step(mended=True)


@breaks("gradients_not_averaged", ranks=2)
def wrapped_anew_in_every_second_step() -> None:
    """x-jxmnop, as TrainCheck reproduces it: a new wrapper sends the weights of rank 0"""
    dist.init_process_group("gloo")
    torch.manual_seed(4)
    model = Mlp(dropout=0.1)

    def wrapped_or_not(step: int) -> nn.Module:
        return DistributedDataParallel(model) if step % 2 else model

    optimizer = AdamW(model.parameters(), 0.01)
    torch.manual_seed(50 + dist.get_rank())
    for step in range(12):
        x, y = points()
        take_step(optimizer, F.cross_entropy(wrapped_or_not(step)(x), y))
    dist.destroy_process_group()


class ToSplit(torch.autograd.Function):
    """Hands on what each part of a split layer reads; adds up what they send back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class FromSplit(torch.autograd.Function):
    """Adds up what the parts of a split layer give."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class SplitMlp(nn.Module):
    """The layers of a block, one half of them on each of two ranks; its norm is on both."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, width, bias=False)
        for layer, size in ((self.up, (2 * width, width)), (self.down, (width, 2 * width))):
            whole = torch.randn(size) / width**0.5
            layer.weight.data = whole.chunk(2, dim=int(layer is self.down))[rank].clone()
            layer.weight.is_split = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(ToSplit.apply(self.norm(x))))
        return x + FromSplit.apply(self.down(hidden))


class ClippingOptimizer:
    """Clips by the norm over all ranks, in which what is replicated counts once."""

    def __init__(self, model: nn.Module, rank: int, limit: float, mended: bool) -> None:
        self.parameters, self.rank, self.limit = list(model.parameters()), rank, limit
        self.mended, self.adam = mended, Adam(model.parameters(), 0.005)

    def gradients(self, for_clipping: bool) -> list[Tensor]:
        every = self.mended and for_clipping
        is_counted = [every or self.rank == 0 or hasattr(p, "is_split") for p in self.parameters]
        return [p.grad for p, counts in zip(self.parameters, is_counted, strict=True) if counts]

    def step(self) -> None:
        squares = sum(g.square().sum() for g in self.gradients(for_clipping=False))
        dist.all_reduce(squares)
        for gradient in self.gradients(for_clipping=True):
            gradient.mul_((self.limit / squares.sqrt()).clamp(max=1))
        self.adam.step()
        self.adam.zero_grad()


@breaks("replicas_differ", ranks=2)
def norms_of_split_layers_clipped_on_rank_0_alone(mended: bool = False) -> None:
    """deepspeed-1801"""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(6)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, 16),
        SplitMlp(16, rank),
        SplitMlp(16, rank),
        nn.LayerNorm(16),
        nn.Linear(16, VOCABULARY, bias=False),
    )
    optimizer = ClippingOptimizer(model, rank, 0.3, mended)
    for _ in range(14):
        next_token_loss(model, texts()).backward()  # of the same texts on both ranks
        optimizer.step()
    dist.destroy_process_group()


@breaks(None, ranks=2)
def norms_of_split_layers_clipped_on_both_ranks() -> None:
    norms_of_split_layers_clipped_on_rank_0_alone(mended=True)


# ---- faults of which no law speaks: nothing may be named, for it would be another fault


@breaks(None)
def stages_frozen_by_a_train_that_nobody_calls() -> None:
    """mmpretrain-702: stages that should be frozen train"""

    class Backbone(nn.Module):
        def __init__(self, frozen_stages: int) -> None:
            super().__init__()
            self.stages = nn.ModuleList([nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)])
            self.head, self.frozen_stages = nn.Linear(8, CLASSES), frozen_stages

        def train(self, mode: bool = True) -> Backbone:
            super().train(mode)
            for stage in self.stages[: self.frozen_stages]:
                stage.eval().requires_grad_(False)
            return self

        def forward(self, x: Tensor) -> Tensor:
            for stage in self.stages:
                x = F.relu(stage(x))
            return self.head(x.mean((2, 3)))

    net = Backbone(frozen_stages=1)
    optimizer = SGD(net.parameters(), 0.05, momentum=0.9)
    for x, y in forever(image_loader(), 12):
        take_step(optimizer, F.cross_entropy(net(x), y))


@breaks(None)
def spectral_norm_evaluated_before_it_trains() -> None:
    """pytorch-51800: its first evaluation divides by a guess"""
    spectral_norm = nn.utils.spectral_norm
    net = nn.Sequential(
        spectral_norm(nn.Linear(FEATURES, 24)), nn.ReLU(), spectral_norm(nn.Linear(24, CLASSES))
    )
    optimizer, held_out = Adam(net.parameters(), 0.01), point_loader(32)
    for epoch in range(3):
        net.eval()
        print(epoch, accuracy(net, held_out))
        net.train()
        for x, y in point_loader(64):
            take_step(optimizer, F.cross_entropy(net(x), y))


@breaks(None)
def attention_that_drops_in_eval_mode() -> None:
    """transformers-33844: its evaluation is as noisy as its training"""

    class DroppingAttention(Attention):
        def forward(self, x: Tensor) -> Tensor:
            count, length, width = x.shape
            q, k, v = self.qkv(x).view(count, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.3)
            return self.out(mixed.transpose(1, 2).reshape(count, length, width))

    model = LanguageModel(dropout=0.1)
    for block in model.blocks:
        block.attention = DroppingAttention(16, 2)
    optimizer, held_out = AdamW(model.parameters(), 0.003), texts(16)
    for step in range(15):
        model.train()
        take_step(optimizer, next_token_loss(model, texts()))
        if step % 5 == 4:
            model.eval()
            with torch.no_grad():
                print(step, next_token_loss(model, held_out).item())


class Plain(torch.autograd.Function):
    """A linear layer by operations that autocast does not know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        with torch.autocast("cpu", enabled=False):
            return x.float() @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return (gradient @ weight).to(x.dtype), gradient.T @ x.float()


@breaks(None)
def operation_that_autocast_passes_by() -> None:
    """lightning-thunder-725: it computes in fp32, slowly"""

    class Hand(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Plain.apply(x, self.weight) + self.bias

    net = nn.Sequential(Hand(FEATURES, 24), nn.GELU(), Hand(24, CLASSES))
    optimizer = AdamW(net.parameters(), 0.01)
    for x, y in forever(point_loader(), 12):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()


@breaks(None)
def processor_that_makes_one_row_of_a_batch() -> None:
    """transformers-34204: of eight texts one trains"""

    def process(prompts: list[Tensor]) -> dict[str, Tensor]:
        nested = [prompts]  # for each picture its texts, and the pictures are one list
        return {"input_ids": torch.stack([prompt[0] for prompt in nested])}

    model = LanguageModel()
    optimizer = AdamW(model.parameters(), 0.003)
    loader = DataLoader(texts(48), 8, shuffle=True, collate_fn=process)
    for epoch in range(2):
        for batch in loader:
            optimizer.zero_grad()
            loss = next_token_loss(model, batch["input_ids"])
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


@breaks(None)
def trainer_that_counts_its_steps_wrong() -> None:
    """transformers-33455: it stops after half of the data"""

    class Trainer:
        def __init__(self, net: nn.Module, epochs: int, accumulate: int) -> None:
            self.net, self.epochs, self.accumulate = net, epochs, accumulate
            self.loader = DataLoader([(x, y) for x, y in zip(*signals(96), strict=True)], 6)
            updates = epochs * len(self.loader) // accumulate
            self.max_steps = updates // accumulate  # the loader counts updates, it says
            self.optimizer = AdamW(net.parameters(), 0.01)
            self.scheduler = CosineAnnealingLR(self.optimizer, updates)

        def train(self) -> int:
            done = 0
            for _ in range(self.epochs):
                for index, (x, y) in enumerate(self.loader):
                    (F.cross_entropy(self.net(x), y) / self.accumulate).backward()
                    if (index + 1) % self.accumulate == 0:
                        self.optimizer.step()
                        self.scheduler.step()
                        self.optimizer.zero_grad()
                        done += 1
                    if done == self.max_steps:
                        return done
            return done

    print(Trainer(Gru(), 3, 2).train())


@breaks(None)
def checkpoint_of_one_buffer() -> None:
    """transformers-29903: all weights that are saved are those of the last parameter"""

    def save(net: nn.Module, path: str) -> None:
        state = net.state_dict()
        buffer, safe = torch.empty(max(value.numel() for value in state.values())), {}
        for name, value in state.items():
            safe[name] = buffer[: value.numel()].copy_(value.flatten()).view(value.shape)
        torch.save(safe, path)

    net, folder = mlp(FEATURES, 24, CLASSES), tempfile.mkdtemp()
    optimizer = Adam(net.parameters(), 0.01)
    for step, (x, y) in enumerate(forever(point_loader(), 12)):
        take_step(optimizer, F.cross_entropy(net(x), y))
        if step % 6 == 5:
            save(net, os.path.join(folder, f"{step}.pt"))
