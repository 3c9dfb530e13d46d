"""`diff` on small models that were written twice: alignment, judgment and report, rule by rule."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import otel_torch
from otel_torch.parity.finding import Report
from tests.parity.small_models import WIDTH, Block, Port, port_of, reference
from tests.support import recording_to


def record(
    path: Path, model: nn.Module, x: torch.Tensor, forwards: int = 1, **settings: str
) -> Path:
    with recording_to(path, **settings):
        for turn in range(forwards):
            model(x + turn)
    return path


@pytest.fixture(name="inputs")
def make_inputs() -> torch.Tensor:
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


def compare_models(
    tmp_path: Path, model: nn.Module, port: nn.Module, x: torch.Tensor, **settings: Any
) -> Report:
    return otel_torch.diff(
        record(tmp_path / "reference.jsonl", model, x, **settings),
        record(tmp_path / "port.jsonl", port, x, **settings),
    )


def compare(
    tmp_path: Path, inputs: torch.Tensor, change: Callable[[Port], object] = id, **settings: Any
) -> Report:
    """Compare the reference with its port, to which something is done before."""
    model = reference()
    port = port_of(model)
    with torch.no_grad():
        change(port)
    return compare_models(tmp_path, model, port, inputs, **settings)


def places(report: Report) -> tuple[str | None, ...]:
    assert report.first is not None, report
    first = report.first
    return first.kind, first.side, first.module, first.port_side, first.port_module


def test_a_right_port_without_a_name_in_common_matches(
    tmp_path: Path, inputs: torch.Tensor
) -> None:
    report = compare(tmp_path, inputs)
    assert (report.verdict, report.first, report.introduced) == ("match", None, [])
    compared = {(pair.module, pair.port_module) for pair in report.compared}
    assert ("blocks.1.attention", "body.layers.1.self_attn") in compared
    assert ("blocks.2", "body.layers.2") in compared
    assert (
        "blocks.0.act",
        "body.layers.0.mlp.1",
    ) in compared  # no parameters: by what goes in and comes out
    assert report.pairs > 60


class Infinite(nn.GELU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).index_fill(-1, torch.tensor([3]), float("inf"))


def other_activation(port: Port) -> None:
    port.layers[1].mlp[1] = nn.SiLU()


def infinite_activation(port: Port) -> None:
    port.layers[1].mlp[1] = Infinite()


def other_residual(port: Port) -> None:
    port.layers[1].residual_scale = 0.9


def parts_exchanged(port: Port) -> None:
    port.layers[0].self_attn.exchange = True


def wrong_weight(port: Port) -> None:
    port.layers[2].mlp[0].weight.mul_(1.1)


def weights_of_another_block(port: Port) -> None:
    port.layers[1].post_norm.load_state_dict(port.layers[2].post_norm.state_dict())


def weights_of_each_other(port: Port) -> None:
    """They are paired by place, and not crosswise."""
    norms = port.layers[0].post_norm, port.layers[1].post_norm
    states = [copy.deepcopy(norm.state_dict()) for norm in norms]
    for norm, state in zip(norms, states[::-1], strict=True):
        norm.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "kind", "side", "module", "port_module"),
    [
        (other_activation, "value", "output", "blocks.1.act", "body.layers.1.mlp.1"),
        # by what code between modules hands on
        (other_residual, "value", "input", "blocks.1.norm2", "body.layers.1.post_norm"),
        # exchanged parts of a fused output are seen behind them
        (
            parts_exchanged, "value", "input",
            "blocks.0.attention.out", "body.layers.0.self_attn.o_proj",
        ),
        (wrong_weight, "weights", "parameter", "blocks.2.up", "body.layers.2.mlp.0"),
        (
            weights_of_another_block, "weights", "parameter",
            "blocks.1.norm2", "body.layers.1.post_norm",
        ),
        (
            weights_of_each_other, "weights", "parameter",
            "blocks.0.norm2", "body.layers.0.post_norm",
        ),
        (infinite_activation, "nonfinite", "output", "blocks.1.act", "body.layers.1.mlp.1"),
    ],
)  # fmt: skip
def test_a_fault_is_named_in_both_programs(
    tmp_path: Path,
    inputs: torch.Tensor,
    change: Callable[[Port], None],
    kind: str,
    side: str,
    module: str,
    port_module: str,
) -> None:
    report = compare(tmp_path, inputs, change)
    assert places(report) == (kind, side, module, side, port_module)
    if change is wrong_weight:
        assert report.first is not None and report.first.port_tensor == "param.weight"
        assert report.first.explanation.endswith(
            "(body.layers.2.mlp.0.weight). Its input is right."
        )
    if change is infinite_activation:
        assert report.as_json()["first"]["error"] == "Infinity"


@pytest.mark.parametrize(
    ("capture", "shift", "said"),
    [
        ("outputs,parameters", 0.0, "Its input was not recorded."),
        ("parity", 0.0, "Its input is right."),
        ("parity", 1.0, "Its input differs, too."),
    ],
)
def test_of_an_input_is_said_what_was_compared(
    tmp_path: Path, inputs: torch.Tensor, capture: str, shift: float, said: str
) -> None:
    def recorded(name: str, scale: float, x: torch.Tensor) -> Path:
        torch.manual_seed(3)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        with torch.no_grad():
            model[2].weight.mul_(scale)
        stats = "sketch,shape,dtype,numel,min,max,sum"
        return record(tmp_path / name, model, x, capture=capture, stats=stats)

    report = otel_torch.diff(
        recorded("reference.jsonl", 1.0, inputs), recorded("port.jsonl", 1.1, inputs + shift)
    )
    (finding,) = (finding for finding in report.introduced if finding.kind == "weights")
    assert finding.module == "2" and finding.explanation.endswith(said)


class Permuting(nn.Module):
    """Returns the right numbers in another order."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).flip(1)


def test_the_right_numbers_in_another_order_are_a_layout_fault(
    tmp_path: Path, inputs: torch.Tensor
) -> None:
    def change(port: Port) -> None:
        port.stem = Permuting(port.stem)  # type: ignore[assignment]

    kind, *_, port_module = places(compare(tmp_path, inputs, change))
    assert (kind, port_module) == ("layout", "stem")


def test_a_module_that_is_never_called_is_missing(tmp_path: Path, inputs: torch.Tensor) -> None:
    def change(port: Port) -> None:
        port.skipped = 1

    report = compare(tmp_path, inputs, change)
    assert report.first is not None
    assert (report.first.kind, report.first.module, report.first.port_module) == (
        "missing",
        "blocks.1",
        "body.layers.1",
    )
    assert (report.first.step, report.first.port_step) == (0, None)


def test_a_difference_that_heals_is_harmless(tmp_path: Path, inputs: torch.Tensor) -> None:
    def change(port: Port) -> None:
        """The activation comes out twice as large, and what takes it halves it again."""
        port.layers[1].mlp[2].weight.mul_(0.5)
        port.layers[1].mlp[1] = nn.Sequential(nn.GELU(), _Twice())

    report = compare(tmp_path, inputs, change)
    assert report.verdict == "match" and report.first is None
    assert {finding.port_module for finding in report.harmless} & {
        "body.layers.1.mlp.1.1",
        "body.layers.1.mlp.2",
    }


class _SideInput(nn.Module):
    """Adds a side input between two blocks, scaled in its module or in the code after it."""

    def __init__(self, scale_in_module: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale_in_module = scale_in_module
        self.side = _Scaled(8, 8) if scale_in_module else nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side = self.side(x)
        side = side if self.scale_in_module else 4 * side
        x = self.blocks[1](self.blocks[0](x) + 0)
        return self.blocks[2](x + side)  # type: ignore[no-any-return]


class _Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 4 * super().forward(input)


def test_a_scale_that_the_code_after_a_module_applies_hides_no_fault(tmp_path: Path) -> None:
    x = torch.randn(4, 8)
    port = _SideInput(scale_in_module=False)
    record(tmp_path / "reference.jsonl", _SideInput(scale_in_module=True), x)
    matching = otel_torch.diff(
        tmp_path / "reference.jsonl", record(tmp_path / "matching.jsonl", port, x)
    )
    port.blocks[2][1] = nn.SiLU()  # type: ignore[index]
    wrong = otel_torch.diff(tmp_path / "reference.jsonl", record(tmp_path / "wrong.jsonl", port, x))
    assert matching.verdict == "match"
    assert wrong.first is not None and wrong.first.port_module == "blocks.2.1"


class _Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class ScaledAfter(nn.Module):
    """Scales what its embedding returns."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Linear(8, WIDTH), Block(), nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(8 * self.embed(x)))


class ScaledInside(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 8 * super().forward(x)


class Scaled(ScaledAfter):
    """The same, whose embedding scales."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = ScaledInside(8, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(x)))


@pytest.mark.parametrize("wrong", [None, "block.attention.out", "block.up"])
def test_a_scale_that_was_moved_into_a_module_is_harmless(
    tmp_path: Path, inputs: torch.Tensor, wrong: str | None
) -> None:
    torch.manual_seed(7)
    model, port = ScaledAfter().eval(), Scaled().eval()
    port.load_state_dict(model.state_dict())
    if wrong is not None:
        port.get_submodule(wrong).register_forward_hook(lambda module, args, output: 1.1 * output)
    report = compare_models(tmp_path, model, port, inputs)
    named = None if report.first is None else (report.first.port_module, report.first.port_side)
    assert named == (None if wrong is None else (wrong, "output"))


def test_a_scale_that_is_applied_twice_is_named(tmp_path: Path, inputs: torch.Tensor) -> None:
    torch.manual_seed(7)
    model, port = ScaledAfter().eval(), ScaledAfter().eval()
    port.embed = ScaledInside(8, WIDTH)
    port.load_state_dict(model.state_dict())
    report = compare_models(tmp_path, model, port, inputs)
    assert report.first is not None
    # the module and the code that calls it scale: either of them once too often
    assert (report.first.port_module, report.first.port_side) == ("block", "input")


class HandsOnItsBias(nn.Module):
    """Attention that makes a bias for the ones after it, unless it is given one.

    The bias hides all later tokens, whatever the power.
    """

    def __init__(self, power: int) -> None:
        super().__init__()
        self.values, self.power = nn.Linear(WIDTH, WIDTH), power

    def forward(
        self, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if bias is None:
            steps = torch.arange(x.shape[-2])
            bias = -1e4 * (1.0 + steps**self.power).expand(len(steps), -1).triu(1)
        scores = x @ x.transpose(-1, -2) / WIDTH + bias
        return x + scores.softmax(-1) @ self.values(x), bias


class SharedBias(nn.Module):
    def __init__(self, power: int, scale: float) -> None:
        super().__init__()
        self.embed, self.head, self.scale = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8), scale
        self.blocks = nn.ModuleList(HandsOnItsBias(power) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, bias = self.embed(x), None
        for block in self.blocks:
            x, bias = block(x, bias)
        return self.head(self.scale * x)


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_a_value_that_is_used_rightly_and_handed_on_is_harmless(
    tmp_path: Path, inputs: torch.Tensor, scale: float
) -> None:
    torch.manual_seed(7)
    model, port = SharedBias(1, 1.0).eval(), SharedBias(2, scale).eval()
    port.load_state_dict(model.state_dict())
    report = compare_models(tmp_path, model, port, inputs)
    named = None if report.first is None else (report.first.port_module, report.first.port_side)
    assert named == (None if scale == 1 else ("head", "input"))


def test_two_faults_are_listed_apart(tmp_path: Path, inputs: torch.Tensor) -> None:
    def change(port: Port) -> None:
        port.layers[0].self_attn.o_proj.bias.zero_()
        port.layers[2].mlp[2].bias.add_(30)

    report = compare(tmp_path, inputs, change)
    named = [finding.port_module for finding in report.introduced]
    assert named[0] == "body.layers.0.self_attn.o_proj" and "body.layers.2.mlp.2" in named


def test_the_first_wrong_step_is_named(tmp_path: Path, inputs: torch.Tensor) -> None:
    class Later(nn.GELU):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x) * (1.0 if self.calls < 3 else 1.01)

    def change(port: Port) -> None:
        port.layers[1].mlp[1] = Later()

    report = compare(tmp_path, inputs, change, forwards=4)
    assert places(report)[-1] == "body.layers.1.mlp.1"
    assert report.first is not None and (report.first.step, report.first.port_step) == (2, 2)


def test_rounding_in_bfloat16_is_no_divergence_and_a_bug_in_it_is(
    tmp_path: Path, inputs: torch.Tensor
) -> None:
    model = reference()
    port = port_of(model).bfloat16()
    model = model.bfloat16()
    inputs = inputs.bfloat16()
    reference_file = record(tmp_path / "reference.jsonl", model, inputs)
    noise = record(tmp_path / "noise.jsonl", model, inputs, noise="1")
    clean = otel_torch.diff(
        reference_file, record(tmp_path / "port.jsonl", port, inputs), noise=noise
    )
    assert clean.verdict == "match"
    port.layers[1].residual_scale = 0.5
    bugged = otel_torch.diff(
        reference_file, record(tmp_path / "bug.jsonl", port, inputs), noise=noise
    )
    assert places(bugged)[1:] == ("input", "blocks.1.norm2", "input", "body.layers.1.post_norm")


def test_modules_kept_in_another_type_are_listed_as_harmless(
    tmp_path: Path, inputs: torch.Tensor
) -> None:
    class Kept(nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.float()).to(x.dtype)

    model = reference()
    port = port_of(model).bfloat16()
    model = model.bfloat16()
    for block in model.blocks:
        norm = Kept(WIDTH)
        norm.load_state_dict(
            {name: value.float() for name, value in block.norm.state_dict().items()}
        )
        block.norm = norm
    report = compare_models(tmp_path, model, port, inputs.bfloat16())
    assert report.verdict == "match"
    assert {(pair.kind, pair.module) for pair in report.harmless} >= {
        ("dtype", "blocks.0.norm"),
        ("dtype", "blocks.2.norm"),
    }


def test_models_that_have_nothing_in_common_are_incomparable(
    tmp_path: Path, inputs: torch.Tensor
) -> None:
    other = nn.Sequential(nn.Linear(8, 3), nn.Tanh())
    report = compare_models(tmp_path, reference(), other, inputs)
    assert report.verdict == "incomparable" and report.reason


def test_equal_norms_before_training_do_not_relate_two_models(
    tmp_path: Path, inputs: torch.Tensor
) -> None:
    def model(*names: str) -> nn.Module:
        modules = nn.Linear(8, 64, bias=False), nn.LayerNorm(64), nn.Linear(64, 64, bias=False)
        return nn.Sequential(OrderedDict(zip(names, modules, strict=True)))

    pair = model("first", "norm", "last"), model("enter", "scale", "leave")
    assert compare_models(tmp_path, *pair, inputs).verdict == "incomparable"


class PackedExperts(nn.Module):
    """Two norms around a weight with most of the model's elements, which may be stored packed."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)
        for norm in (self.first, self.second):
            nn.init.normal_(norm.weight, generator=generator)
        weight = torch.randn(40, 8, generator=generator)
        if packed:
            self.packed = nn.Parameter(weight.flip(0).mul(2))
        else:
            self.weight = nn.Parameter(weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.packed.div(2).flip(0) if hasattr(self, "packed") else self.weight
        hidden = self.first(hidden)
        return self.second(hidden @ weight.T @ weight)


def test_models_are_related_although_most_elements_are_packed_away(
    tmp_path: Path, inputs: torch.Tensor
) -> None:
    report = compare_models(tmp_path, PackedExperts(False), PackedExperts(True), inputs)
    assert report.verdict == "match"
    assert {pair.module for pair in report.compared} >= {"first", "second"}


def test_without_sketches_statistics_decide_and_it_is_said(
    tmp_path: Path, inputs: torch.Tensor
) -> None:
    model, port = reference(), reference()
    plain = {"capture": "outputs", "stats": "abs_mean,mean,std,min,max,shape"}
    clean = compare_models(tmp_path, model, port, inputs, **plain)
    assert clean.verdict == "match" and clean.weaker
    port.blocks[1].act = nn.SiLU()
    bugged = compare_models(tmp_path, model, port, inputs, **plain)
    assert bugged.first is not None and bugged.first.port_module == "blocks.1.act" and bugged.weaker
