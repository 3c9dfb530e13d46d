"""`diff` of weights: those that code reads without calling their module, those that a legal fold
changed, and those that are rounded on purpose. And what a fault beside them is called.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils.checkpoint import checkpoint

import otel_torch
from otel_torch import bootstrap
from otel_torch.parity.finding import Finding, Report

Program = Callable[[], object]


def compare(folder: Path, reference: Program, port: Program, capture: str = "parity") -> Report:
    """Record two programs in this process, with whole tensors, and compare them."""
    paths = []
    for side, program in (("reference", reference), ("port", port)):
        path = folder / f"{side}.jsonl"
        tensors = str(folder / f"{side}-tensors")
        assert bootstrap.start(jsonl=str(path), capture=capture, tensors=tensors)
        try:
            program()
        finally:
            bootstrap.stop()
        paths.append(path)
    return otel_torch.diff(*paths)


def forward(model: nn.Module, x: Tensor) -> Program:
    def run() -> Tensor:
        with torch.no_grad():
            return model(x)

    return run


def place(finding: Finding | None) -> tuple[str | None, str | None, str | None]:
    assert finding is not None
    return finding.module, finding.port_module, finding.port_side


def kind_of_cause(finding: Finding | None) -> str | None:
    return None if finding is None or finding.cause is None else finding.cause.kind


# -- weights of modules that are never called
# --------------------------------------------------------------------------------------------------


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


def test_the_transposed_weight_of_an_uncalled_projection_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Attending().eval()
    port = deepcopy(model)
    weight = port.attns[1].out_proj.weight
    weight.data = weight.data.T.contiguous()
    x = torch.randn(2, 5, 16)
    report = compare(tmp_path, forward(model, x), forward(port, x))
    [finding] = report.introduced
    assert place(finding) == ("attns.1.out_proj", "attns.1.out_proj", "parameter")
    assert finding.kind == "weights" and kind_of_cause(finding) == "transposed"


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


IDS = torch.arange(12).reshape(2, 6) % 10


@pytest.mark.parametrize(
    ("reference", "port", "name"),
    [
        (Tagger, HeadRead, "head"),
        (HeadRead, HeadRead, "head"),
        (PlacesRead, PlacesRead, "places"),
        (Tagger, PlacesRead, "places"),
        (PlacesRead, Tagger, "places"),
    ],
)
def test_another_weight_that_code_reads_is_named(
    tmp_path: Path, reference: type[Tagger], port: type[Tagger], name: str
) -> None:
    model, other = taggers(reference, port)
    weight = getattr(other, name).weight
    weight.data = weight.data.roll(1, 0)
    [finding] = compare(tmp_path, forward(model, IDS), forward(other, IDS)).introduced
    assert place(finding) == (name, name, "parameter")
    assert kind_of_cause(finding) == "rows_permuted"


def test_an_embedding_that_is_also_the_head_is_named_for_rows_that_no_token_asked_for(
    tmp_path: Path,
) -> None:
    model, port = taggers(WordsRead, WordsRead)
    port.words.weight.data[12:] *= 1.5
    [finding] = compare(tmp_path, forward(model, IDS), forward(port, IDS)).introduced
    assert place(finding) == ("words", "words", "parameter")


@pytest.mark.parametrize("port", [HeadRead, PlacesRead])
def test_equal_weights_that_one_side_reads_match(tmp_path: Path, port: type[Tagger]) -> None:
    model, other = taggers(Tagger, port)
    assert compare(tmp_path, forward(model, IDS), forward(other, IDS)).verdict == "match"


def test_an_unused_weight_is_not_named_for_code_before_it(tmp_path: Path) -> None:
    model, port = taggers(HeadRead, HeadRead)
    port.scale = 3.0
    port.head.weight.data = torch.randn(20, 12)
    report = compare(tmp_path, forward(model, IDS), forward(port, IDS))
    assert place(report.first) == ("up", "up", "input")


# -- modules that one side never calls
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "port", "where"),
    [
        (Tagger, PlacesReadLater, ("up", "up", "input")),
        (PlacesReadLater, Tagger, ("up", "up", "input")),
        (Tagger, NormRead, ("norm", "head", "input")),
    ],
)
def test_weights_that_code_reads_wrongly_are_not_called_left_out(
    tmp_path: Path, reference: type[Tagger], port: type[Tagger], where: tuple[str, str, str]
) -> None:
    model, other = taggers(reference, port)
    [finding] = compare(tmp_path, forward(model, IDS), forward(other, IDS)).introduced
    assert place(finding) == where and finding.kind == "value"
    assert "leaves out" not in finding.explanation and "nly" not in finding.explanation


@pytest.mark.parametrize(
    ("reference", "port", "name"),
    [
        (Tagger, NoPlaces, "places"),
        (WithTypes, WithTypesOnly, "places"),
        (WithTypes, Tagger, "types"),
        (Tagger, NoNorm, "norm"),
    ],
)
def test_what_the_numbers_show_to_be_left_out_is_called_so(
    tmp_path: Path, reference: type[Tagger], port: type[Tagger], name: str
) -> None:
    model, other = taggers(reference, port)
    [finding] = compare(tmp_path, forward(model, IDS), forward(other, IDS)).introduced
    assert (finding.port_module, finding.kind) == (name, "missing")


# -- folds
# --------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("is_turned", [False, True])
def test_only_the_adapter_that_is_merged_wrongly_is_named(tmp_path: Path, is_turned: bool) -> None:
    model, port = merged((1, "fc2"))[:: -1 if is_turned else 1]
    report = compare(tmp_path, forward(model, TOKENS), forward(port, TOKENS))
    [finding] = report.introduced
    assert place(finding) == ("blocks.1.fc2", "blocks.1.fc2", "output")
    if not is_turned:
        assert kind_of_cause(finding) == "term_scaled"


def test_a_wrong_first_adapter_leaves_the_others_unjudged(tmp_path: Path) -> None:
    model, port = merged((0, "fc1"))
    report = compare(tmp_path, forward(model, TOKENS), forward(port, TOKENS))
    assert place(report.first) == ("blocks.0.fc1.base", "blocks.0.fc1", "parameter")
    assert len(report.introduced) == 1
    assert any("5 more weights differ" in warning for warning in report.warnings)


def test_merged_adapters_match(tmp_path: Path) -> None:
    model, port = merged(None)
    report = compare(tmp_path, forward(model, TOKENS), forward(port, TOKENS))
    assert (report.verdict, report.warnings) == ("match", [])


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


def no_fault(block: Block) -> None:
    pass


def unfold_bias(block: Block) -> None:
    block.fc1.bias.data += 1.0


def scale_next(block: Block) -> None:
    block.fc2.weight.data *= 1.1


def halve(block: Block) -> None:
    block.gain = 0.5


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (no_fault, None),
        (unfold_bias, "blocks.1.fc1"),
        (scale_next, "blocks.1.fc2"),
        (halve, "blocks.1"),
    ],
)
def test_a_norm_folded_into_the_next_layer_is_not_accused(
    tmp_path: Path, fault: Callable[[Block], None], name: str | None
) -> None:
    model, port = folded_norms()
    fault(port.blocks[1])
    report = compare(tmp_path, forward(model, TOKENS), forward(port, TOKENS))
    assert report.verdict == ("match" if name is None else "diverged")
    assert [finding.port_module for finding in report.introduced] == (
        [] if name is None else [name]
    )


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


@pytest.mark.parametrize("are_named_alike", [True, False])
@pytest.mark.parametrize("wrong", [None, 0, 1])
def test_a_folded_batch_norm_is_not_accused(
    tmp_path: Path, wrong: int | None, are_named_alike: bool
) -> None:
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
    x = torch.randn(2, 3, 8, 8)
    report = compare(tmp_path, forward(model, x), forward(port, x))
    assert report.verdict == ("match" if wrong is None else "diverged")
    name = f"stages.{wrong}.conv" if are_named_alike else f"convs.{wrong}"
    named = [finding.port_module for finding in report.introduced]
    assert named == ([] if wrong is None else [name])
    assert not any("rounded" in warning for warning in report.warnings)


# -- rounded weights
# --------------------------------------------------------------------------------------------------


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


def test_of_weights_that_are_all_rounded_only_the_one_that_is_off_further_is_named(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model = Stack()
    port = rounded(model, "blocks.1.fc2", 0.5)
    report = compare(tmp_path, forward(model, TOKENS), forward(port, TOKENS))
    assert [finding.port_module for finding in report.introduced] == ["blocks.1.fc2"]
    assert any("--quantized" in warning for warning in report.warnings)


class WithSpare(Stack):
    """A model with a layer that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(16, 16)


def test_an_outlier_that_nothing_is_computed_with_is_no_match(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = WithSpare()
    port = rounded(model, "spare", 0.5)
    report = compare(tmp_path, forward(model, TOKENS), forward(port, TOKENS))
    assert report.verdict == "diverged"
    assert place(report.first) == ("spare", "spare", "parameter")


def test_rounding_alone_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Stack()
    port = rounded(model, "", 1.0)
    report = compare(tmp_path, forward(model, TOKENS), forward(port, TOKENS))
    assert place(report.first) == ("blocks.0.fc1", "blocks.0.fc1", "parameter")
    assert len(report.introduced) == 1


# -- what differs by right nowhere
# --------------------------------------------------------------------------------------------------


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


def test_norms_that_hold_one_more_are_shifted(tmp_path: Path) -> None:
    model = with_norms(Rms)
    port = deepcopy(model)
    for block in port.blocks:
        block.norm.weight.data += 1
    report = compare(tmp_path, forward(model, TOKENS), forward(port, TOKENS))
    assert place(report.first) == ("blocks.0.norm", "blocks.0.norm", "parameter")
    assert kind_of_cause(report.first) == "shifted"
    assert any("2 more weights differ" in warning for warning in report.warnings)


def test_a_norm_whose_squares_overflow_is_named(tmp_path: Path) -> None:
    model, port = with_norms(Rms), with_norms(HalfRms)
    large = TOKENS * 1000
    report = compare(tmp_path, forward(model, large), forward(port, large))
    assert place(report.first) == ("blocks.0.norm", "blocks.0.norm", "output")
    assert kind_of_cause(report.first) in ("zero", "norm", "part")


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


def test_a_recurrence_in_code_is_named_where_it_ends(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Recurrence()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0, 0.4)
    port = deepcopy(model)
    port.rnn = Recurrent(model.rnn)
    report = compare(tmp_path, forward(model, TOKENS), forward(port, TOKENS))
    assert place(report.first) == ("rnn", "rnn", "output")


class Strided(nn.Module):
    def __init__(self, pads: tuple[int, int], mode: str = "constant") -> None:
        super().__init__()
        self.pads, self.mode = pads, mode
        self.weight = nn.Parameter(torch.randn(6, 2, 3, 3))
        self.bias = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, self.pads * 2, mode=self.mode)
        return F.conv2d(x, self.weight, self.bias, stride=2, groups=2)


@pytest.mark.parametrize(
    ("pads", "mode", "words"),
    [((0, 1), "constant", "0 before and 1 after"), ((1, 1), "reflect", "a reflection")],
)
def test_another_padding_of_a_convolution_is_named(
    tmp_path: Path, pads: tuple[int, int], mode: str, words: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), Strided((1, 1)), nn.Conv2d(6, 2, 1))
    port = deepcopy(model)
    port[1].pads, port[1].mode = pads, mode
    x = torch.randn(2, 3, 8, 10)
    first = compare(tmp_path, forward(model, x), forward(port, x)).first
    assert place(first) == ("1", "1", "output") and kind_of_cause(first) == "padding"
    assert first is not None and words in first.explanation


# -- recomputation
# --------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("keeps", [(True, False), (False, True)])
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
    programs = [training(block, side) for side in keeps]
    report = compare(tmp_path, *programs, capture="training")
    assert report.first is not None and report.first.phase == "recompute"
    assert place(report.first) == where
    assert kind_of_cause(report.first) == "random_stream"


def test_a_recomputed_forward_with_the_same_mask_matches(tmp_path: Path) -> None:
    programs = [training(Dropping, True) for _ in range(2)]
    assert compare(tmp_path, *programs, capture="training").verdict == "match"
