"""`otel-torch show` says why a training does not train, and nothing of one that does."""

from __future__ import annotations

from pathlib import Path

import pytest

from otel_torch.laws.ranks import broken_rank_laws
from otel_torch.laws.series import TrainingSeries
from otel_torch.laws.table import broken_laws
from otel_torch.recording.metadata import read_metadata
from otel_torch.show.selection import Selection
from otel_torch.show.training.trouble import troubles
from tests.support import run_python

HEAD = """
import copy
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
SGD, AdamW = torch.optim.SGD, torch.optim.AdamW


class Net(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def batch():
    return torch.randn(10, 6), torch.randint(0, 3, (10,))


def train(net, optimizer, steps=6, before=lambda step: None, loss_of=F.cross_entropy):
    for step in range(steps):
        before(step)
        x, y = batch()
        optimizer.zero_grad()
        loss_of(net(x), y).backward()
        optimizer.step()
"""

# name: a program, and what its line has
BROKEN = {
    "frozen behind the optimizer": (
        "net = Net(); optimizer = SGD(net.head.parameters(), 0.1)\n"
        "net.head.requires_grad_(False); train(net, optimizer)",
        "all parameters that the optimizer holds are frozen",
    ),
    "an update that stops": (
        "net = Net(); optimizer = SGD(net.parameters(), 0.1)\n"
        "def stop(step):\n"
        "    if step == 3: optimizer.register_step_post_hook(lambda *_: net.load_state_dict(weights))\n"
        "    weights.update(copy.deepcopy(net.state_dict()))\n"
        "weights = {}; train(net, optimizer, 12, before=stop)",
        "no parameter changes any more after step 2",
    ),
    "a weight of which a copy is changed": (
        "class Copying(SGD):\n"
        "    def step(self):\n"
        "        for p in self.param_groups[0]['params']:\n"
        "            p.t().contiguous().sub_(p.grad.t()) if p.dim() == 2 else p.data.sub_(0.1 * p.grad)\n"
        "net = Net(); train(net, Copying(net.parameters(), 0.1))",
        "no change in `body.weight` and `head.weight` in any step looked at",
    ),
    "loss detached": (
        "net = Net()\n"
        "def loss_of(scores, y): return F.cross_entropy(scores.detach().requires_grad_(), y)\n"
        "train(net, AdamW(net.parameters()), loss_of=loss_of)",
        "no parameter has a gradient in any step",
    ),
    "gradients cleared before the step": (
        "net = Net(); optimizer = SGD(net.parameters(), 0.1)\n"
        "for _ in range(6):\n"
        "    x, y = batch(); F.cross_entropy(net(x), y).backward()\n"
        "    optimizer.zero_grad(); optimizer.step()",
        "no parameter has a gradient in any step",
    ),
    "a loss that is multiplied by 0": (
        "net = Net()\n"
        "def loss_of(scores, y): return 0 * F.cross_entropy(scores, y)\n"
        "train(net, SGD(net.parameters(), 0.1), loss_of=loss_of)",
        "the gradients of all parameters are 0 in every step",
    ),
    "a warm-up by whole numbers": (
        "net = Net(); optimizer = AdamW(net.parameters())\n"
        "schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step // 100)\n"
        "train(net, optimizer, before=lambda step: step and schedule.step())",
        "the learning rate is 0 in every step, all 6",
    ),
    "parameters replaced after the optimizer was made": (
        "net = Net(); optimizer = AdamW(net.parameters())\n"
        "for part in (net.body, net.head):\n"
        "    part.weight = nn.Parameter(part.weight.detach().clone())\n"
        "    part.bias = nn.Parameter(part.bias.detach().clone())\n"
        "train(net, optimizer)",
        "the optimizer (AdamW) holds other parameters than the model",
    ),
    "the optimizer of another instance": (
        "first = Net(); optimizer = SGD(first.parameters(), 0.1); net = Net()\ntrain(net, optimizer)",
        "the optimizer (SGD) holds other parameters than the model",
    ),
    "a head made after the optimizer": (
        "net = Net(); optimizer = SGD(net.parameters(), 0.1); net.head = nn.Linear(8, 3)\n"
        "train(net, optimizer)",
        "no optimizer holds `head`, although gradients reach it",
    ),
    "one parameter replaced": (
        "net = Net(); optimizer = SGD(net.parameters(), 0.1)\n"
        "net.head.weight = nn.Parameter(net.head.weight.detach().clone())\n"
        "train(net, optimizer)",
        "no optimizer holds `head`, although gradients reach it",
    ),
    "a parameter of the model itself": (
        "class Scaled(Net):\n"
        "    def forward(self, x): return super().forward(x) * self.gain\n"
        "net = Scaled(); optimizer = SGD(net.parameters(), 0.1)\n"
        "net.gain = nn.Parameter(torch.ones(1))\n"
        "train(net, optimizer)",
        "no optimizer holds `gain`, although gradients reach it",
    ),
    "a layer under no_grad": (
        "class Cut(Net):\n"
        "    def forward(self, x):\n"
        "        with torch.no_grad(): side = self.side(x)\n"
        "        return self.head(torch.tanh(self.body(x) + side))\n"
        "net = Cut(side=nn.Linear(6, 8)); train(net, AdamW(net.parameters()))",
        "no gradient reaches `side`, in any step",
    ),
    "adapters behind a reentrant checkpoint": (
        "class Adapted(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.base = nn.Linear(6, 6).requires_grad_(False)\n"
        "        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)\n"
        "    def forward(self, x): return self.base(x) + self.up(self.down(x))\n"
        "class Recomputed(Net):\n"
        "    def forward(self, x):\n"
        "        for block in self.blocks: x = checkpoint(block, x, use_reentrant=True)\n"
        "        return super().forward(x)\n"
        "net = Recomputed(blocks=nn.ModuleList(Adapted() for _ in range(2)))\n"
        "train(net, AdamW([p for p in net.parameters() if p.requires_grad]))",
        "no gradient reaches `blocks.0.down`, `blocks.0.up`, `blocks.1.down` and `blocks.1.up`",
    ),
    "a scaler that skips each step": (
        "net = Net(); optimizer = SGD(net.parameters(), 0.1)\n"
        "scaler = torch.amp.GradScaler('cpu', init_scale=2.0**127)\n"
        "for _ in range(5):\n"
        "    x, y = batch(); optimizer.zero_grad()\n"
        "    scaler.scale(F.cross_entropy(net(x), y) * 1e30).backward()\n"
        "    scaler.step(optimizer); scaler.update()",
        "the gradient scaler skips every step, all 5",
    ),
    "updates below the rounding of bfloat16": (
        "net = Net().bfloat16()\n"
        "def loss_of(scores, y): return F.cross_entropy(scores.float(), y)\n"
        "optimizer = SGD(net.parameters(), 1e-7)\n"
        "for _ in range(6):\n"
        "    x, y = batch(); optimizer.zero_grad(); loss_of(net(x.bfloat16()), y).backward()\n"
        "    optimizer.step()",
        "100 % of the parameters' elements do not change in a step",
    ),
}  # fmt: skip

HEALTHY = {
    "plain": "net = Net(); train(net, AdamW(net.parameters()))",
    "frozen on purpose": (
        "net = Net(); net.body.requires_grad_(False); train(net, AdamW(net.parameters()))"
    ),
    "a warm-up from 0": (
        "net = Net(); optimizer = AdamW(net.parameters())\n"
        "schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)\n"
        "train(net, optimizer, before=lambda step: step and schedule.step())"
    ),
    "a schedule that ends at 0": (
        "net = Net(); optimizer = AdamW(net.parameters())\n"
        "schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0, 2 - step))\n"
        "train(net, optimizer, before=lambda step: step and schedule.step())"
    ),
    "accumulated batches": (
        "net = Net(); optimizer = AdamW(net.parameters())\n"
        "for index in range(16):\n"
        "    x, y = batch(); (F.cross_entropy(net(x), y) / 4).backward()\n"
        "    if index % 4 == 3: optimizer.step(); optimizer.zero_grad()"
    ),
    "the first steps of a scaler": (
        "net = Net(); optimizer = SGD(net.parameters(), 1e-6)\n"
        "scaler = torch.amp.GradScaler('cpu', init_scale=2.0**120, backoff_factor=2.0**-10)\n"
        "for _ in range(8):\n"
        "    x, y = batch(); optimizer.zero_grad()\n"
        "    scaler.scale(F.cross_entropy(net(x), y) * 1e5).backward()\n"
        "    scaler.step(optimizer); scaler.update()"
    ),
    "a teacher beside the model": (
        "net = Net(); teacher = copy.deepcopy(net); optimizer = AdamW(net.parameters())\n"
        "for _ in range(6):\n"
        "    x, y = batch(); optimizer.zero_grad()\n"
        "    with torch.no_grad(): target = teacher(x)\n"
        "    (F.cross_entropy(net(x), y) + (net(x) - target).square().mean()).backward()\n"
        "    optimizer.step()\n"
        "    for mean, live in zip(teacher.parameters(), net.parameters()):\n"
        "        mean.data.lerp_(live.data, 0.1)"
    ),
    "a moving average inside of the model, held by the optimizer": (
        "class Taught(Net):\n"
        "    def forward(self, x):\n"
        "        with torch.no_grad(): target = self.teacher(x)\n"
        "        return super().forward(x) + (self.body(x) - target).mean()\n"
        "net = Taught(teacher=nn.Linear(6, 8))\n"
        "def follow(step):\n"
        "    for mean, live in zip(net.teacher.parameters(), net.body.parameters()):\n"
        "        mean.data.lerp_(live.data, 0.1)\n"
        "train(net, AdamW(net.parameters()), before=follow)"
    ),
    "evaluation between": (
        "net = Net()\n"
        "def evaluate(step):\n"
        "    net.eval()\n"
        "    with torch.no_grad(): net(batch()[0])\n"
        "    net.train()\n"
        "train(net, AdamW(net.parameters()), before=evaluate)"
    ),
    "two optimizers of a generator and a critic": (
        "maker, critic = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))\n"
        "optimizers = AdamW(maker.parameters()), AdamW(critic.parameters())\n"
        "for _ in range(6):\n"
        "    made = maker(torch.randn(10, 4))\n"
        "    optimizers[1].zero_grad()\n"
        "    (critic(made.detach()).mean() - critic(batch()[0]).mean()).backward()\n"
        "    optimizers[1].step(); optimizers[0].zero_grad()\n"
        "    (-critic(made).mean()).backward(); optimizers[0].step()"
    ),
    "two optimizers of one model": (
        "net = Net(); optimizers = SGD(net.body.parameters(), 0.1), AdamW(net.head.parameters())\n"
        "for _ in range(6):\n"
        "    x, y = batch()\n"
        "    for optimizer in optimizers: optimizer.zero_grad()\n"
        "    F.cross_entropy(net(x), y).backward()\n"
        "    for optimizer in optimizers: optimizer.step()"
    ),
    "fp32 masters of bf16 weights": (
        "net = Net().bfloat16(); live = list(net.parameters())\n"
        "masters = [p.detach().float().clone() for p in live]; optimizer = SGD(masters, 0.1)\n"
        "for _ in range(6):\n"
        "    x, y = batch(); net.zero_grad(); F.cross_entropy(net(x.bfloat16()).float(), y).backward()\n"
        "    for master, p in zip(masters, live): master.grad = p.grad.float()\n"
        "    optimizer.step()\n"
        "    for master, p in zip(masters, live): p.data.copy_(master)"
    ),
    "masters of the matrices alone": (
        "net = Net().bfloat16(); matrices = [net.body.weight, net.head.weight]\n"
        "masters = [p.detach().float().clone() for p in matrices]\n"
        "optimizer = SGD([*masters, net.body.bias, net.head.bias], 0.1)\n"
        "for _ in range(6):\n"
        "    x, y = batch(); net.zero_grad(); F.cross_entropy(net(x.bfloat16()).float(), y).backward()\n"
        "    for master, p in zip(masters, matrices): master.grad = p.grad.float()\n"
        "    optimizer.step()\n"
        "    for master, p in zip(masters, matrices): p.data.copy_(master)"
    ),
    "one part by hand": (
        "net = Net(); optimizer = SGD(net.body.parameters(), 0.1)\n"
        "def by_hand(step):\n"
        "    for p in net.head.parameters():\n"
        "        if p.grad is not None: p.data.sub_(0.1 * p.grad); p.grad = None\n"
        "train(net, optimizer, before=by_hand)"
    ),
    "a part that no forward calls": (
        "net = Net(pooler=nn.Linear(8, 8)); train(net, AdamW(net.parameters()))"
    ),
    "an adapter that begins at 0": (
        "class Adapted(Net):\n"
        "    def forward(self, x): return super().forward(x) + self.up(self.down(x))\n"
        "net = Adapted(down=nn.Linear(6, 2), up=nn.Linear(2, 3))\n"
        "nn.init.zeros_(net.up.weight); nn.init.zeros_(net.up.bias)\n"
        "net.body.requires_grad_(False); net.head.requires_grad_(False)\n"
        "train(net, AdamW([*net.down.parameters(), *net.up.parameters()]))"
    ),
    "a group added later": (
        "net = Net(); optimizer = SGD(net.head.parameters(), 0.1)\n"
        "def unfreeze(step):\n"
        "    if step == 3: optimizer.add_param_group({'params': list(net.body.parameters())})\n"
        "train(net, optimizer, before=unfreeze)"
    ),
    "biases before a norm": (
        "class Normed(Net):\n"
        "    def forward(self, x): return self.head(torch.tanh(self.norm(self.body(x))))\n"
        "net = Normed(norm=nn.BatchNorm1d(8)); train(net, SGD(net.parameters(), 1e-3), 12)"
    ),
    "what was trained goes on from its state in another optimizer": (
        "net = Net(); optimizer = AdamW(net.parameters()); train(net, optimizer)\n"
        "again = AdamW(net.parameters()); again.load_state_dict(optimizer.state_dict())\n"
        "train(net, again)"
    ),
    "a closure": (
        "net = Net(); optimizer = torch.optim.LBFGS(net.parameters(), 0.1, max_iter=3)\n"
        "def closure():\n"
        "    optimizer.zero_grad(); loss = F.cross_entropy(net(x), y); loss.backward(); return loss\n"
        "for _ in range(4): x, y = batch(); optimizer.step(closure)"
    ),
    "updates without an optimizer": (
        "net = Net()\n"
        "for _ in range(6):\n"
        "    x, y = batch(); F.cross_entropy(net(x), y).backward()\n"
        "    for p in net.parameters(): p.data.sub_(0.1 * p.grad); p.grad = None"
    ),
}  # fmt: skip


def lines(tmp_path: Path, program: str) -> list[str]:
    run_python(tmp_path, HEAD + program, OTEL_TORCH_ENABLED="1", OTEL_TORCH_JSONL="run.jsonl")
    selection = Selection(str(tmp_path / "run.jsonl"))
    for _ in selection.rows(warn=pytest.fail):
        pass
    metadata = read_metadata(tmp_path / "run.jsonl", warn=pytest.fail)
    assert selection.training.rows
    laws = broken_laws(selection.training, metadata, selection.seen_modules)
    return troubles(selection.training, laws)


@pytest.mark.parametrize("kind", BROKEN)
def test_what_does_not_train_is_said(tmp_path: Path, kind: str) -> None:
    program, expected = BROKEN[kind]
    said = [line for line in lines(tmp_path, program) if "became" not in line]
    assert len(said) == 1 and said[0].startswith(expected), said


@pytest.mark.parametrize("kind", HEALTHY)
def test_nothing_is_said_of_what_trains(tmp_path: Path, kind: str) -> None:
    assert lines(tmp_path, HEALTHY[kind]) == []
    metadata = read_metadata(tmp_path / "run.jsonl", warn=pytest.fail)
    assert metadata.get("broken_laws", []) == []  # nor while it ran


# the last lines of a training loop; the one that breaks a law
LINES = {
    "clipped_after_step": (
        "    loss(net(x), y).backward(); optimizer.step()\n"
        "    nn.utils.clip_grad_norm_(net.parameters(), 0.01)\n",
        "    nn.utils.clip",
    ),
    "scheduler_before_optimizer": (
        "    loss(net(x), y).backward()\n    schedule.step()\n    optimizer.step()\n",
        "    schedule.step()",
    ),
    "eval_while_training": (
        "    value = loss(net.eval()(x), y)\n    value.backward(); optimizer.step()\n",
        "    value = loss",
    ),
}


@pytest.mark.parametrize("law", LINES)
def test_a_broken_law_names_its_line(tmp_path: Path, law: str) -> None:
    end, start = LINES[law]
    program = (
        "net = Net(drop=nn.Dropout(0.5)); optimizer = SGD(net.parameters(), 0.1)\n"
        "loss = F.cross_entropy\n"
        + "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)\n" * ("schedule" in end)
        + f"for _ in range(6):\n    x, y = batch(); optimizer.zero_grad()\n{end}"
    )
    (said,) = lines(tmp_path, program)
    (broken,) = read_metadata(tmp_path / "run.jsonl", warn=pytest.fail)["broken_laws"]
    assert broken["law"] == law and f"({broken['line']})" in said
    number = int(broken["line"].rpartition(":")[2])
    assert (HEAD + program).splitlines()[number - 1].startswith(start)


def rank(*, norms: list[float], parameters: list[float], **shared: list[float]) -> TrainingSeries:
    """A rank's norms of the whole model; shared: of one module, likewise."""
    training = TrainingSeries()
    module = {"norms": norms, "parameters": parameters, **shared}
    for name, label in (("norms", "grad_norm"), ("parameters", "param_norm")):
        for owner, numbers in (("", module[name]), ("head", module.get(f"head_{name}", []))):
            for step, number in enumerate(numbers):
                where = {"module": owner, "tensor": label, "step": step, "model": "Net", "loop": 0}
                training.add({**where, "mean": number})
    return training


def test_ranks_that_do_not_average_their_gradients_are_said() -> None:
    first = rank(norms=[0.42, 0.41], parameters=[3.0, 2.9])
    other = rank(norms=[0.43, 0.40], parameters=[3.0, 2.8])
    (broken,) = broken_rank_laws([first, other])
    assert broken[:2] == ("gradients_not_averaged", "Net")
    assert "0.42, 0.43 at step 0" in broken.text
    assert "From step 1 on the parameters differ" in broken.text


def part(factor: float, first: float) -> TrainingSeries:
    """A rank of a split model, with the gradients of its head times a factor."""
    return rank(
        norms=[0.42, factor], parameters=[factor, 2.0],
        head_norms=[0.1 * factor, 0.1], head_parameters=[first, first + 0.01 * factor],
    )  # fmt: skip


def test_what_all_ranks_of_a_split_model_hold_is_updated_alike() -> None:
    (broken,) = broken_rank_laws([part(1.0, 1.7), part(3.0, 1.7)])
    assert broken[:2] == ("replicas_differ", "Net")
    assert "the same parameters of `head`, which differ from step 1 on" in broken.text
    assert "gradient norms of head are 0.1, 0.3 at step 0" in broken.text
    # a norm of ones is one also where each rank has its own part of it
    assert not broken_rank_laws([part(1.0, 2.0), part(3.0, 2.0)])


@pytest.mark.parametrize("rewritten", [(1, 3), ()])
def test_weights_that_one_rank_sends_are_no_average(rewritten: tuple[int, ...]) -> None:
    first = rank(norms=[0.42, 0.41, 0.4, 0.39], parameters=[3.0, 2.9, 2.8, 2.7])
    other = rank(norms=[0.43, 0.40, 0.3, 0.29], parameters=[3.0, 2.9, 2.7, 2.7])
    for step in rewritten:
        where = {"module": "", "tensor": "rewritten", "step": step, "model": "Net", "loop": 0}
        other.add({**where, "mean": 1.0})
    laws = [law.law for law in broken_rank_laws([first, other])]
    assert laws == ["gradients_not_averaged"] * bool(rewritten)


@pytest.mark.parametrize(
    "other",
    [
        rank(norms=[0.42, 0.41], parameters=[3.0, 2.9]),
        rank(norms=[0.50, 0.60], parameters=[3.0, 2.9]),  # averaged inside of the step
        rank(norms=[0.50, 0.60], parameters=[4.0, 4.1]),  # another part of the model
        rank(norms=[], parameters=[3.0, 2.8]),
        TrainingSeries(),
    ],
)
def test_ranks_of_a_healthy_training_are_silent(other: TrainingSeries) -> None:
    assert not list(broken_rank_laws([rank(norms=[0.42, 0.41], parameters=[3.0, 2.9]), other]))
