"""`diff` of weights: those that code reads without calling their module, those that a legal fold
changed, and those that are rounded on purpose. And what a fault beside them is called.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils.checkpoint import checkpoint

import otel_torch
from otel_torch.parity.finding import Report
from tests.support import recording_to

Program = Callable[[], object]


def compare(folder: Path, reference: Program, port: Program, capture: str = "parity") -> Report:
    """Record two programs in this process, with whole tensors, and compare them."""
    paths = []
    for side, program in (("reference", reference), ("port", port)):
        path = folder / f"{side}.jsonl"
        tensors = str(folder / f"{side}-tensors")
        with recording_to(path, capture=capture, tensors=tensors, grad=True):
            program()
        paths.append(path)
    return otel_torch.diff(*paths)


def forward(model: nn.Module, x: Tensor) -> Program:
    def run() -> Tensor:
        with torch.no_grad():
            return model(x)

    return run


# -- weights of modules that are never called


class Attending(nn.Module):
    """Two blocks with `nn.MultiheadAttention`, which reads the weights of its `out_proj`."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.attns = nn.ModuleList(nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for norm, attn in zip(self.norms, self.attns, strict=True):
            h = norm(x)
            x = x + attn(h, h, h, need_weights=False)[0]
        return x


class Tagger(nn.Module):
    """A transformer without attention; `embed` and `top` may read weights instead of calling."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, 12), nn.Embedding(16, 12)
        self.types = nn.Embedding(2, 12)
        self.up, self.down, self.norm = nn.Linear(12, 24), nn.Linear(24, 12), nn.LayerNorm(12)
        self.head = nn.Linear(12, 20, bias=False)

    def embed(self, ids: Tensor) -> Tensor:
        return self.words(ids) * self.scale + self.places(torch.arange(ids.shape[1]))

    def top(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(torch.relu(self.up(x)))
        return self.top(x)


class HeadRead(Tagger):
    def top(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.head.weight)


class WordsRead(Tagger):
    """Its head is the table of the words."""

    def top(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.words.weight)


class PlacesRead(Tagger):
    first = 0

    def embed(self, ids: Tensor) -> Tensor:
        return self.words(ids) + self.places.weight[self.first : self.first + ids.shape[1]]


class PlacesReadLater(PlacesRead):
    first = 2


class NormRead(Tagger):
    def top(self, x: Tensor) -> Tensor:
        return self.head(F.layer_norm(x, (12,), self.norm.weight, self.norm.bias, 1e-2))


class NoPlaces(Tagger):
    def embed(self, ids: Tensor) -> Tensor:
        return self.words(ids)


class NoNorm(Tagger):
    def top(self, x: Tensor) -> Tensor:
        return self.head(x)


class WithTypes(Tagger):
    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids) + self.types(ids % 2)


class WithTypesOnly(Tagger):
    def embed(self, ids: Tensor) -> Tensor:
        return self.words(ids) + self.types(ids % 2)


def taggers(reference: type[Tagger], port: type[Tagger]) -> tuple[Tagger, Tagger]:
    torch.manual_seed(0)
    model, other = reference(), port()
    other.load_state_dict(model.state_dict())
    return model, other


# -- folds


class Adapted(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.base, self.scale = nn.Linear(width, out), 2.0
        self.down, self.up = nn.Linear(width, 3, bias=False), nn.Linear(3, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x)) * self.scale

    def merged(self, scale: float) -> nn.Linear:
        linear = deepcopy(self.base)
        linear.weight.data = self.base.weight + scale * self.up.weight @ self.down.weight
        return linear


class Block(nn.Module):
    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.fc1: nn.Module = nn.Linear(16, 24)
        self.fc2: nn.Module = nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.fc2(torch.relu(self.fc1(self.norm(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


TOKENS = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))


def merged(wrong: tuple[int, str] | None) -> tuple[Stack, Stack]:
    """Return a model with adapters and one that has them merged, but for one with another scale."""
    torch.manual_seed(0)
    model = Stack()
    for block in model.blocks:
        block.fc1, block.fc2 = Adapted(16, 24), Adapted(24, 16)
    port = deepcopy(model)
    for index, block in enumerate(port.blocks):
        for name in ("fc1", "fc2"):
            scale = 0.5 if (index, name) == wrong else 2.0
            setattr(block, name, getattr(block, name).merged(scale))
    return model, port


def folded_norms() -> tuple[Stack, Stack]:
    """Return a model, and one in which each norm's weights are in the next layer."""
    torch.manual_seed(0)
    model = Stack()
    for block in model.blocks:
        nn.init.uniform_(block.norm.weight, 0.5, 1.5)
        nn.init.normal_(block.norm.bias)
    port = deepcopy(model)
    for block in port.blocks:
        block.fc1.bias.data += block.fc1.weight.data @ block.norm.bias.data
        block.fc1.weight.data *= block.norm.weight.data
        nn.init.ones_(block.norm.weight)
        nn.init.zeros_(block.norm.bias)
    return model, port


class Stage(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 6, 3, padding=1, bias=False)
        self.bn: nn.Module = nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


class Staged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(*(Stage(channels) for channels in (3, 6, 6)))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(x).mean((2, 3)))


class Plain(nn.Module):
    """The same with convolutions alone."""

    def __init__(self, model: Staged) -> None:
        super().__init__()
        self.convs = nn.ModuleList(fuse_conv_bn_eval(s.conv, s.bn) for s in model.stages)
        self.last = model.head

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = F.relu(conv(x))
        return self.last(x.mean((2, 3)))


# -- rounded weights


def rounded(model: Stack, wrong: str, factor: float) -> Stack:
    """Return the model with all matrices rounded to 8 bits a row, one with too small scales."""
    port = deepcopy(model)
    for name, module in port.named_modules():
        if isinstance(module, nn.Linear):
            scale = module.weight.detach().abs().amax(1, keepdim=True) / 127
            scale = scale * factor if name == wrong else scale
            steps = (module.weight.detach() / scale).round().clamp(-127, 127)
            module.weight.data = steps * scale
    return port


class WithSpare(Stack):
    """A model with a layer that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(16, 16)


# -- what differs by right nowhere


class Rms(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(width))

    def normalized(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.normalized(x) * self.weight


class HalfRms(Rms):
    def normalized(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.half().square().mean(-1, keepdim=True) + 1e-6).float()


def with_norms(norm: type[Rms]) -> Stack:
    torch.manual_seed(0)
    model = Stack()
    for block in model.blocks:
        block.norm = norm(16)
    return model


class Recurrent(nn.Module):
    """A GRU in code that adds the bias of its new gate outside of the reset gate."""

    def __init__(self, gru: nn.GRU) -> None:
        super().__init__()
        self.w, self.u = nn.Parameter(gru.weight_ih_l0.data), nn.Parameter(gru.weight_hh_l0.data)
        self.b = nn.Parameter(gru.bias_ih_l0.data + gru.bias_hh_l0.data)

    def forward(self, x: Tensor) -> Tensor:
        h, outputs = x.new_zeros(len(x), 16), []
        for step in x.unbind(1):
            r, z, n = (step @ self.w.T + self.b).chunk(3, -1)
            hr, hz, hn = (h @ self.u.T).chunk(3, -1)
            z = (z + hz).sigmoid()
            h = (1 - z) * (n + (r + hr).sigmoid() * hn).tanh() + z * h
            outputs.append(h)
        return torch.stack(outputs, 1)


class Recurrence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.rnn = nn.Linear(16, 8), nn.GRU(8, 16, batch_first=True)
        self.after = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.rnn(torch.tanh(self.before(x)))
        return self.after(x[0] if isinstance(x, tuple) else x)


class Strided(nn.Module):
    def __init__(self, pads: tuple[int, int], mode: str = "constant") -> None:
        super().__init__()
        self.pads, self.mode = pads, mode
        self.weight = nn.Parameter(torch.randn(6, 2, 3, 3))
        self.bias = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, self.pads * 2, mode=self.mode)
        return F.conv2d(x, self.weight, self.bias, stride=2, groups=2)


# -- recomputation


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(12, 24), nn.Dropout(0.2), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.relu(self.up(x))))


class DroppingInCode(Dropping):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(torch.relu(self.up(x)), 0.2))


class Checkpointed(nn.Module):
    def __init__(self, block: type[nn.Module], keeps: bool) -> None:
        super().__init__()
        self.blocks, self.keeps = nn.ModuleList(block() for _ in range(2)), keeps

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=self.keeps)
        return x


def training(block: type[nn.Module], keeps: bool) -> Program:
    def run() -> None:
        torch.manual_seed(0)
        model = Checkpointed(block, keeps)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.randn(8, 12)).square().mean().backward()
        optimizer.step()

    return run


# -- pairs, and what is said of them

Pair = tuple[nn.Module, nn.Module, Tensor]


def changed(
    make: Callable[[], nn.Module], change: Callable[[nn.Module], object], x: Tensor
) -> Pair:
    """Return a model, the same one changed, and an input."""
    torch.manual_seed(0)
    model = make().eval()
    port = deepcopy(model)
    with torch.no_grad():
        change(port)
    return model, port, x


def tagged(
    reference: type[Tagger], port: type[Tagger], change: Callable[[Tagger], object] = id
) -> Pair:
    model, other = taggers(reference, port)
    with torch.no_grad():
        change(other)
    return model, other, torch.arange(12).reshape(2, 6) % 10


def roll(name: str) -> Callable[[nn.Module], object]:
    def change(model: nn.Module) -> None:
        weight = model.get_submodule(name).weight
        weight.data = weight.data.roll(1, 0)

    return change


def set_weight(name: str, of: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], object]:
    def change(model: nn.Module) -> None:
        parameter = model.get_parameter(name)
        parameter.data = of(parameter.data.clone())

    return change


def scale_unasked(weight: Tensor) -> Tensor:
    weight[12:] *= 1.5  # rows that no token asks for
    return weight


def replace_unused_and_scale(model: Tagger) -> None:
    model.scale = 3.0
    model.head.weight.data = torch.randn(20, 12)


def folded(change: Callable[[Block], object]) -> Pair:
    model, port = folded_norms()
    with torch.no_grad():
        change(port.blocks[1])
    return model, port, TOKENS


def halve(block: Block) -> None:
    block.gain = 0.5


def folded_batch_norms(are_named_alike: bool, wrong: int | None) -> Pair:
    torch.manual_seed(0)
    model = Staged().eval()
    for stage in model.stages:
        stage.bn.running_mean.normal_()
        stage.bn.running_var.uniform_(0.5, 2)
        nn.init.normal_(stage.bn.bias)
    if are_named_alike:
        port: nn.Module = deepcopy(model)
        for stage in port.stages:
            stage.conv, stage.bn = fuse_conv_bn_eval(stage.conv, stage.bn), nn.Identity()
        convs = [stage.conv for stage in port.stages]
    else:
        port = Plain(model)
        convs = list(port.convs)
    if wrong is not None:
        convs[wrong].bias.data *= 0.5
    return model, port, torch.randn(2, 3, 8, 8)


def rounded_pair(kind: type[Stack], wrong: str, factor: float) -> Pair:
    torch.manual_seed(0)
    model = kind()
    return model, rounded(model, wrong, factor), TOKENS


def add_one(model: Stack) -> None:
    for block in model.blocks:
        block.norm.weight.data += 1


def recurrent_in_code(port: Recurrence) -> None:
    port.rnn = Recurrent(port.rnn)


def recurrence() -> Recurrence:
    model = Recurrence()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0, 0.4)
    return model


def padded(pads: tuple[int, int], mode: str) -> Pair:
    def change(model: nn.Sequential) -> None:
        model[1].pads, model[1].mode = pads, mode

    make = lambda: nn.Sequential(nn.Conv2d(3, 4, 1), Strided((1, 1)), nn.Conv2d(6, 2, 1))  # noqa: E731
    return changed(make, change, torch.randn(2, 3, 8, 10))


class Said(NamedTuple):
    """The only finding, by the reference's module, the port's, and its side; or none.

    Attributes:
        cause: its kind, or several that are right.
        words: of its explanation.
        warning: part of a warning.
        others: how many more findings there may be.
    """

    module: str | None = None
    port_module: str | None = None
    side: str | None = None
    cause: str | tuple[str, ...] | None = None
    kind: str | None = None
    words: str = ""
    warning: str = ""
    others: bool = False


def own(name: str, side: str = "parameter", *said: Any, **more: Any) -> Said:
    """Return a finding at a module that both programs call by the same name."""
    return Said(name, name, side, *said, **more)


MATCH = Said()
LEFT_OUT = {"kind": "missing"}
PAIRS: dict[str, tuple[Callable[[], Pair], Said]] = {
    # weights of modules that are never called
    "the transposed weight of an uncalled projection": (
        lambda: changed(Attending, set_weight("attns.1.out_proj.weight", lambda w: w.T.contiguous()), torch.randn(2, 5, 16)),
        own("attns.1.out_proj", cause="transposed", kind="weights")),
    "head, read by the port": (lambda: tagged(Tagger, HeadRead, roll("head")), own("head", cause="rows_permuted")),
    "head, read by both": (lambda: tagged(HeadRead, HeadRead, roll("head")), own("head", cause="rows_permuted")),
    "places, read by both": (lambda: tagged(PlacesRead, PlacesRead, roll("places")), own("places", cause="rows_permuted")),
    "places, read by the port": (lambda: tagged(Tagger, PlacesRead, roll("places")), own("places", cause="rows_permuted")),
    "places, read by the reference": (lambda: tagged(PlacesRead, Tagger, roll("places")), own("places", cause="rows_permuted")),
    "an embedding that is also the head, in rows that no token asks for": (
        lambda: tagged(WordsRead, WordsRead, set_weight("words.weight", scale_unasked)), own("words")),
    "equal weights, the head read": (lambda: tagged(Tagger, HeadRead), MATCH),
    "equal weights, the places read": (lambda: tagged(Tagger, PlacesRead), MATCH),
    "an unused weight behind wrong code": (lambda: tagged(HeadRead, HeadRead, replace_unused_and_scale), own("up", "input", others=True)),
    # modules that one side never calls: what code reads wrongly is not left out
    "places read wrongly by the port": (lambda: tagged(Tagger, PlacesReadLater), own("up", "input", kind="value")),
    "places read wrongly by the reference": (lambda: tagged(PlacesReadLater, Tagger), own("up", "input", kind="value")),
    "a norm read wrongly": (lambda: tagged(Tagger, NormRead), Said("norm", "head", "input", kind="value")),
    "no places": (lambda: tagged(Tagger, NoPlaces), Said(port_module="places", **LEFT_OUT)),
    "no places beside types": (lambda: tagged(WithTypes, WithTypesOnly), Said(port_module="places", **LEFT_OUT)),
    "no types": (lambda: tagged(WithTypes, Tagger), Said(port_module="types", **LEFT_OUT)),
    "no norm": (lambda: tagged(Tagger, NoNorm), Said(port_module="norm", **LEFT_OUT)),
    # folds
    "an adapter merged wrongly": (lambda: (*merged((1, "fc2")), TOKENS), own("blocks.1.fc2", "output", "term_scaled")),
    "an adapter merged wrongly in the reference": (lambda: (*merged((1, "fc2"))[::-1], TOKENS), own("blocks.1.fc2", "output")),
    "the first adapter merged wrongly": (
        lambda: (*merged((0, "fc1")), TOKENS), Said("blocks.0.fc1.base", "blocks.0.fc1", "parameter", warning="5 more weights differ")),
    "adapters merged": (lambda: (*merged(None), TOKENS), MATCH),
    "norms folded": (lambda: folded(id), MATCH),
    "norms folded, a bias": (lambda: folded(lambda block: block.fc1.bias.add_(1)), Said(port_module="blocks.1.fc1")),
    "norms folded, the layer after": (lambda: folded(lambda block: block.fc2.weight.mul_(1.1)), Said(port_module="blocks.1.fc2")),
    "norms folded, a factor": (lambda: folded(halve), Said(port_module="blocks.1")),
    **{
        f"batch norms folded{', named alike' * alike}{'' if wrong is None else f', {wrong} wrong'}": (
            lambda alike=alike, wrong=wrong: folded_batch_norms(alike, wrong),
            MATCH if wrong is None else Said(port_module=f"stages.{wrong}.conv" if alike else f"convs.{wrong}"))
        for alike in (True, False) for wrong in (None, 0, 1)
    },
    # rounded weights
    "of rounded weights one off further": (
        lambda: rounded_pair(Stack, "blocks.1.fc2", 0.5), Said(port_module="blocks.1.fc2", warning="--quantized")),
    "an outlier that nothing is computed with": (lambda: rounded_pair(WithSpare, "spare", 0.5), own("spare", others=True)),
    "rounding alone": (lambda: rounded_pair(Stack, "", 1.0), own("blocks.0.fc1")),
    # what differs by right nowhere
    "norms that hold one more": (
        lambda: changed(lambda: with_norms(Rms), add_one, TOKENS),
        own("blocks.0.norm", cause="shifted", warning="2 more weights differ", others=True)),
    "a norm whose squares overflow": (
        lambda: (with_norms(Rms), with_norms(HalfRms), TOKENS * 1000),
        own("blocks.0.norm", "output", ("zero", "norm", "part"), others=True)),
    "a recurrence in code": (lambda: changed(recurrence, recurrent_in_code, TOKENS), own("rnn", "output", others=True)),
    "zeros on one side": (lambda: padded((0, 1), "constant"), own("1", "output", "padding", words="0 before and 1 after", others=True)),
    "a reflection": (lambda: padded((1, 1), "reflect"), own("1", "output", "padding", words="a reflection", others=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_what_is_said_of_weights(tmp_path: Path, name: str) -> None:
    make, said = PAIRS[name]
    model, port, x = make()
    report = compare(tmp_path, forward(model, x), forward(port, x))
    if said == MATCH:
        assert (report.verdict, report.introduced) == ("match", [])
        assert not any("rounded" in warning for warning in report.warnings)
        assert report.warnings == [] or name != "adapters merged"
        return
    first = report.first
    assert first is not None and report.verdict == "diverged"
    assert said.others or report.introduced == [first]
    place = first.module, first.port_module, first.port_side
    assert [
        own for own, expected in zip(place, said[:3], strict=True) if expected not in (own, None)
    ] == []
    cause = None if first.cause is None else first.cause.kind
    assert said.cause is None or cause in (
        said.cause if isinstance(said.cause, tuple) else (said.cause,)
    )
    assert said.kind in (first.kind, None) and said.words in first.explanation
    assert not said.warning or any(said.warning in warning for warning in report.warnings)
    if said.kind == "value":
        assert "leaves out" not in first.explanation and "nly" not in first.explanation
    if name.startswith("batch norms"):
        assert not any("rounded" in warning for warning in report.warnings)


@pytest.mark.parametrize("keeps", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    ("block", "where"),
    [
        (Dropping, ("blocks.1.drop", "blocks.1.drop", "output")),
        (DroppingInCode, ("blocks.1.down", "blocks.1.down", "input")),
    ],
)
def test_another_mask_in_the_recomputed_forward_is_named(
    tmp_path: Path,
    block: type[nn.Module],
    where: tuple[str, str, str],
    keeps: tuple[bool, bool],
) -> None:
    report = compare(tmp_path, *(training(block, side) for side in keeps), capture="training")
    first = report.first
    if keeps == (True, True):
        assert report.verdict == "match"
        return
    assert first is not None and first.phase == "recompute"
    assert (first.module, first.port_module, first.port_side) == where
    assert first.cause is not None and first.cause.kind == "random_stream"
