"""Compute a NaN or Inf as the first argument says, as programs do by mistake or on purpose."""

import math
import sys

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Two layers with code in front, between and behind them."""

    def __init__(self, between=lambda h: h, behind=lambda h: h):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
        self.between, self.behind = between, behind

    def forward(self, x):
        return self.behind(self.down(self.between(self.act(self.up(x)))))


class Layer(nn.Module):
    """A module without parts, which computes a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


class Net(nn.Module):
    """Layers by name, with a head that gives two logits."""

    def __init__(self, **layers):
        super().__init__()
        self.inp = nn.Linear(8, 8)
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, x):
        for layer in self.children():
            x = layer(x)
        return x


class Attention(nn.Module):
    """Attention in plain operations, with a mask of 0 and -Inf."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(8) + mask
        return self.out(scores.softmax(-1) @ v)


class Reader(nn.Module):
    """Attention in a model that takes the mask as an input."""

    def __init__(self):
        super().__init__()
        self.attn, self.head = Attention(), nn.Linear(8, 2)

    def forward(self, x, mask):
        return self.head(self.attn(x, mask))


class Language(nn.Module):
    """An embedding and a head over 16 tokens."""

    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, tokens):
        return self.head(self.emb(tokens))


class DividedGradient(torch.autograd.Function):
    """The identity, whose backward divides by zero."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 0


def batches(number=6):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 8, generator=generator) for _ in range(number)]


def mean_square(output):
    return output.square().mean()


def train(model, loss_of=mean_square, data=None, optimizer=None, steps=6, max_norm=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    for x in (data or batches())[:steps]:
        optimizer.zero_grad()
        loss_of(model(x)).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()


@torch.no_grad()
def infer(model, data=None):
    return [model(x) for x in data or batches()]


def scaled(width):
    """A layer whose outputs are about `width` large."""
    layer = nn.Linear(8, 8)
    nn.init.constant_(layer.weight, width)
    return layer


# -- mistakes in the forward


def fp16_overflow():
    model = Net(big=scaled(3e4)).half()
    infer(model, [x.half() for x in batches()])


def bf16_overflow():
    model = Net(big=scaled(1e38), bigger=scaled(1e38)).bfloat16()
    infer(model, [x.bfloat16() for x in batches()])


def exp_in_glue():
    train(Net(block=Block(between=lambda h: (h * 1e4).exp())))


def behind_modules():
    train(Net(block=Block(behind=lambda h: h / h.detach().mul(0))))


def inplace_division():
    train(Net(divide=Layer(lambda h: h.mul(1).div_(torch.zeros(())))))


def inplace_input():
    infer(Net(divide=Layer(lambda h: h.sub_(h).div_(torch.zeros(())))))


def leaf():
    train(Net(log=Layer(lambda h: h.sub(100).log())))


def no_key():
    mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -math.inf)
    mask[2] = -math.inf
    model = Reader()
    infer(lambda x: model(x, mask))


def nan_in_data():
    data = batches()
    data[3][1, 2] = math.nan
    train(Net(block=Block()), data=data)


def checkpoint():
    model = Net(block=Block())
    state = model.state_dict()
    state["block.down.weight"][0, 0] = math.nan
    model.load_state_dict(state)
    train(model)


def unseen_row():
    model = Language()
    model.emb.weight.data[13] = math.nan
    tokens = [torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5]]), torch.tensor([[6, 13]])]
    train(model, lambda logits: logits.logsumexp(-1).mean(), tokens)


def rate_explodes():
    model = Net(block=Block())
    train(model, optimizer=torch.optim.SGD(model.parameters(), lr=1e30))


def raises():
    model = Net(check=Layer(lambda h: h if h.isfinite().all() else 1 / 0), log=Layer(torch.log))
    model.check, model.log = model.log, model.check
    infer(model)


def checkpointed():
    from torch.utils.checkpoint import checkpoint as again

    block = Block(between=lambda h: (h * 1e4).exp())
    train(Net(block=Layer(lambda h: again(block, h, use_reentrant=False)), inner=nn.Identity()))


def compiled():
    model = torch.compile(Net(block=Block(between=lambda h: (h * 1e4).exp())), backend="eager")
    infer(model)


def anomaly():
    with torch.autograd.detect_anomaly(check_nan=True):
        train(Net(custom=Layer(DividedGradient.apply)))


def autocast():
    model = Net(big=scaled(3e4))
    with torch.autocast("cpu", torch.float16):
        infer(model)


def skipped_by_a_budget():
    data = batches(40)
    for x in data[25:]:
        x[0] = math.nan
    infer(Net(block=Block()), data)


# -- mistakes behind the forward


def log_of_zero_in_loss():
    train(Net(block=Block()), lambda o: (o.softmax(-1) * 0).log().mean())


def custom_backward():
    train(Net(custom=Layer(DividedGradient.apply), block=Block()))


def root_of_zero():
    train(Net(norm2=Layer(lambda h: h + (h * 0).square().sum(-1, keepdim=True).sqrt())))


def clipped():
    train(Net(custom=Layer(DividedGradient.apply), block=Block()), max_norm=1.0)


def clipped_late():
    """In a step of which the norms of single gradients are not kept."""
    model = Net(custom=Layer(lambda h: h), block=Block())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, data=batches(12), optimizer=optimizer, steps=12, max_norm=1.0)
    model.custom.function = DividedGradient.apply
    train(model, optimizer=optimizer, max_norm=1.0)


def late():
    """In a step of which the rows of modules are not recorded."""
    model = Net(custom=Layer(lambda h: h), block=Block())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, data=batches(12), optimizer=optimizer, steps=12)
    model.custom.function = DividedGradient.apply
    train(model, optimizer=optimizer)


def late_and_tied():
    """The same, where a layer behind the mistake shares the weight of one before it."""
    model = Net(custom=Layer(lambda h: h), block=Block(), last=nn.Linear(8, 8))
    model.last.weight = model.inp.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, data=batches(12), optimizer=optimizer, steps=12)
    model.custom.function = DividedGradient.apply
    train(model, optimizer=optimizer)


def own_backward():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8))

        def forward(self, h):
            return h + self.weight.sqrt()

    train(Net(scale=Scale()))


def masked_label():
    model = Language()
    model.hide = Layer(lambda logits: logits.masked_fill(torch.arange(16) > 9, -math.inf))
    labels = torch.tensor([1, 2, 12])
    model.forward = lambda tokens: model.hide(model.head(model.emb(tokens)))
    train(model, lambda logits: F.cross_entropy(logits[0], labels), [torch.tensor([[1, 2, 3]])] * 6)


def adam_without_eps():
    model = Net(block=Block())
    unused = nn.Linear(8, 8)
    model.block.unused = unused
    model.block.behind = lambda h: h + unused(h * 0) * 0
    train(model, optimizer=torch.optim.Adam(model.parameters(), eps=0.0))


def scaler_at_its_limit():
    model = Net(custom=Layer(DividedGradient.apply))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    for x in batches(30):
        optimizer.zero_grad()
        scaler.scale(mean_square(model(x))).backward()
        scaler.step(optimizer)
        scaler.update()


# -- on purpose


def clean_scaler(dtype=torch.float16):
    model = Net(block=Block())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3)
    for x in batches(40):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = mean_square(model(x))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def clean_bf16():
    clean_scaler(torch.bfloat16)


def causal():
    mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -math.inf)
    model = Reader()
    model.register_buffer("mask", mask)
    train(lambda x: model(x, mask), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def masked_scores():
    mask = torch.ones(8, 8).triu(1).bool()
    scores = Layer(lambda h: (h.T @ h).masked_fill(mask, -math.inf))
    train(Net(attn=nn.Sequential(scores, nn.Softmax(-1), Layer(lambda p: p[:4]))))


def inf_on_purpose():
    distance = Layer(lambda h: torch.where(h > 0, h, math.inf))
    guarded = nn.Sequential(distance, Layer(lambda h: torch.where(h.isinf(), 0.0, h)))
    train(Net(distance=guarded))


def top_k():
    model = Language()
    tokens = torch.tensor([[1, 2, 3]])
    keep = Layer(lambda logits: logits.masked_fill(logits < logits.topk(3)[0][..., -1:], -math.inf))
    for _ in range(6):
        with torch.no_grad():
            logits = keep(model(tokens)[:, -1])
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], 1)


def masked_loss():
    """Logits of -Inf for tokens that no label has."""
    model = Language()
    hide = torch.zeros(16).masked_fill(torch.arange(16) > 9, -math.inf)
    labels = torch.tensor([1, 2, 3])
    train(
        model,
        lambda logits: F.cross_entropy((logits + hide)[0], labels),
        [torch.tensor([[1, 2, 3]])] * 6,
    )


torch.manual_seed(0)
globals()[sys.argv[1]]()
