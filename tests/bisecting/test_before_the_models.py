"""Programs that compute before they call a model, that call none, and that call it otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from otel_torch.bisecting.bisection import Bisection
from otel_torch.bisecting.search import Options, bisect_programs
from tests.bisecting.recorded_runs import RecordedRuns

PREPARED = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
layers = nn.Linear(16, 24), nn.Linear(24, 6)
frames = torch.linspace(-2, 2, 96).sin().reshape(2, 48).unfold(-1, 16, 8)
window = torch.hann_window(16)
"""
# the same weights, applied without a call of a module
FUNCTIONAL = """
(up, up_bias), (down, down_bias) = (layer.parameters() for layer in layers)
with torch.no_grad():
    made = F.linear(F.silu(F.linear(frames * window, up, up_bias)), down, down_bias)
"""
# the same layers in a model, which returns RETURNED
ENCODER = """
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = layers
    def forward(self, frames):
        return RETURNED
"""
MADE = "self.down(F.silu(self.up(frames)))"
MODULES = f"""{ENCODER.replace("RETURNED", MADE)}
with torch.no_grad():
    made = Encoder()(frames * window)
"""
STEPS = """
class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = layers
    def forward(self, rows):
        return self.down(F.silu(self.up(rows)))KEPT
decoder, rows, kept = Decoder(), frames[:, :1], []
with torch.no_grad():
    for step in range(3):
        row = decoder(rows)[:, -1:]
        kept.append(row)
        rows = torch.cat([rows, frames[:, NEXT : NEXT + 1] + row.mean()], dim=1)
    made = torch.stack(kept)
"""


def steps(kept: str, following: str) -> str:
    return PREPARED + STEPS.replace("KEPT", kept).replace("NEXT", following)


def bisect(folder: Path, reference: str, port: str) -> Bisection:
    return bisect_programs(RecordedRuns(folder, reference, port), Options())


def found(answer: Bisection) -> tuple[str, str | None]:
    """Return the first line of the port that is named, and whether it is proven."""
    fault = answer.faults[0]
    assert fault.port_line is not None
    return fault.port_line.text.strip(), fault.proof


def test_a_port_without_modules_is_recorded_from_its_first_operation(tmp_path: Path) -> None:
    reference, port = PREPARED + MODULES, PREPARED + FUNCTIONAL
    assert bisect(tmp_path / "legal", reference, port).verdict == "match"
    wrong = port.replace("hann_window(16)", "hann_window(16, periodic=False)")
    answer = bisect(tmp_path / "wrong", reference, wrong)
    assert found(answer) == ("window = torch.hann_window(16, periodic=False)", "proven")


def test_what_a_program_only_prints_numbers_of_is_compared(tmp_path: Path) -> None:
    shown = "print(made.std().item(), (made * 2).norm().item())"
    reference, port = (PREPARED + own + shown for own in (MODULES, FUNCTIONAL))
    assert bisect(tmp_path / "legal", reference, port).verdict == "match"
    answer = bisect(tmp_path / "wrong", reference, port.replace("silu", "gelu"))
    line, proof = found(answer)
    assert "F.gelu" in line and proof == "proven" and answer.is_healed


# a training whose weights are kept transposed and are changed by hand
TRAINED = """
target = torch.ones(2, 5, 6)
"""
BY_MODULES = """
model = nn.Sequential(layers[0], nn.SiLU(), layers[1])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    loss = (model(frames) - target).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item(), sum(p.abs().sum() for p in model.parameters()).item())
"""
BY_HAND = """
own = [w for layer in layers for w in (layer.weight.detach().t().contiguous(), layer.bias.detach())]
own = [w.requires_grad_() for w in own]
for step in range(2):
    up, up_bias, down, down_bias = own
    made = F.silu(frames @ up + up_bias) @ down + down_bias
    loss = (made - target).square().mean()
    with torch.no_grad():
        for w, slope in zip(own, torch.autograd.grad(loss, own)):
            w.sub_(0.1 * slope)
print(loss.item(), sum(w.abs().sum() for w in own).item())
"""


def test_a_training_by_hand_is_compared_with_one_by_modules(tmp_path: Path) -> None:
    reference, port = (PREPARED + TRAINED + own for own in (BY_MODULES, BY_HAND))
    assert bisect(tmp_path / "legal", reference, port).verdict == "match"
    wrong = port.replace("w.sub_(0.1 * slope)", "w.sub_(0.1 * slope + 0.01 * w)")
    line, _ = found(bisect(tmp_path / "wrong", reference, wrong))
    assert line == "w.sub_(0.1 * slope + 0.01 * w)"


def test_what_prepares_an_input_is_named_instead_of_the_input(tmp_path: Path) -> None:
    reference = PREPARED + MODULES
    answer = bisect(tmp_path, reference, reference.replace("sin()", "sin().clamp(max=0.5)"))
    line, proof = found(answer)
    assert line.startswith("frames = torch.linspace") and proof == "proven"


# a weight that the reference normalizes in each call, and the port once, over AXES
NORMALIZED = PREPARED + MODULES.replace(
    "layers\n", "map(nn.utils.parametrizations.weight_norm, layers)\n"
)
FUSED = f"""{PREPARED}
with torch.no_grad():
    for layer in layers:
        size = layer.weight.norm(dim=1, keepdim=True)
        layer.weight.copy_(size * layer.weight / layer.weight.norm(dim=AXES, keepdim=True))
{MODULES}"""


def test_what_prepares_a_weight_is_named_instead_of_the_weight(tmp_path: Path) -> None:
    reference, port, wrong = NORMALIZED, FUSED.replace("AXES", "1"), FUSED.replace("AXES", "0")
    assert bisect(tmp_path / "legal", reference, port).verdict == "match"
    line, _ = found(bisect(tmp_path / "wrong", reference, wrong))
    assert line.startswith("layer.weight.copy_(")


# a student and its teacher: each model counts its own steps, and an optimizer those of what it trains
TAUGHT = f"""{PREPARED}
import copy
student = nn.Sequential(layers[0], nn.SiLU(), layers[1])
teacher = copy.deepcopy(student).requires_grad_(False)
OPTIMIZER
for step in range(4):
    with torch.no_grad():
        goal = teacher(frames) + 1
    loss = (student(frames) - goal).square().mean()
    loss.backward()
    rate = 0.1 if step < LONG else 0.02
    UPDATE
    for own, w in zip(teacher.parameters(), student.parameters()):
        own.data.lerp_(w.data, 0.5)
print(loss.item())
"""
BY_OPTIMIZER = TAUGHT.replace(
    "OPTIMIZER", "optimizer = torch.optim.SGD(student.parameters(), lr=1)"
).replace(
    "UPDATE", "optimizer.param_groups[0]['lr'] = rate; optimizer.step(); optimizer.zero_grad()"
)
BY_LOOP = TAUGHT.replace("OPTIMIZER", "").replace(
    "UPDATE",
    """
    for w in student.parameters():
        w.data = w.data - w.grad * rate
        w.grad = None""",
)


def test_an_update_that_shows_in_the_next_step_is_named(tmp_path: Path) -> None:
    reference = BY_OPTIMIZER.replace("LONG", "2")
    assert bisect(tmp_path / "legal", reference, BY_LOOP.replace("LONG", "2")).verdict == "match"
    line, _ = found(bisect(tmp_path / "wrong", reference, BY_LOOP.replace("LONG", "1")))
    assert line == "w.data = w.data - w.grad * rate"


# steps of a sampler, whose times are made before the first call of the model
SAMPLED = f"""{PREPARED}
layers = nn.Linear(17, 24), nn.Linear(24, 16)
{ENCODER.replace("RETURNED", MADE)}
model, x = Encoder(), frames
times = TIMES
with torch.no_grad():
    for step in range(3):
        now, then = times[step], times[step + 1]
        STEP
    print(x.sum().item())
"""
BY_LENGTH = "length = then - now; x = x + length * model(torch.cat([x, now.expand(2, 5, 1)], -1))"
BACKWARDS = "x = x - (now - then) * model(torch.cat([x, now.expand(2, 5, 1)], -1))"


def test_what_makes_a_table_is_named_instead_of_what_reads_it(tmp_path: Path) -> None:
    made = "1 / (1 + (1 / torch.linspace(1, 0, 4) - 1) RATIO 3)"
    reference = SAMPLED.replace("STEP", BY_LENGTH).replace("TIMES", made.replace("RATIO", "/"))
    port = SAMPLED.replace("STEP", BACKWARDS).replace("TIMES", made.replace("RATIO", "/"))
    assert bisect(tmp_path / "legal", reference, port).verdict == "match"
    line, _ = found(bisect(tmp_path / "wrong", reference, port.replace(") / 3", ") * 3")))
    assert line.startswith("times = ")


def doubled(port: str) -> str:
    """Return a port whose forwards get another tensor in the place of the first."""
    return port.replace("(self, rows)", "(self, twice, rows)").replace(
        "(rows)[", "(rows * 2, rows)["
    )


@pytest.mark.parametrize("as_others", [str, doubled], ids=["other sizes", "another order"])
def test_steps_of_other_forwards_are_compared_all(
    tmp_path: Path, as_others: Callable[[str], str]
) -> None:
    reference = steps("", "step + 1")
    legal, wrong = (as_others(steps("[:, -1:]", following)) for following in ("step + 1", "step"))
    assert bisect(tmp_path / "legal", reference, legal).verdict == "match"
    line, _ = found(bisect(tmp_path / "wrong", reference, wrong))
    assert line.startswith("rows = torch.cat([rows, frames[:, step")


TWICE = """
encoder = Encoder()
with torch.no_grad():
    first, second = encoder(frames), encoder(frames.flip(0))
    print((OUTSIDE(first) * OUTSIDE(second)).sum(-1))
"""


def returning(returned: str, outside: str = "") -> str:
    return PREPARED + ENCODER.replace("RETURNED", returned) + TWICE.replace("OUTSIDE", outside)


def test_what_one_model_returns_may_be_made_of_the_other_s_later(tmp_path: Path) -> None:
    reference = returning(f"F.normalize({MADE}, dim=-1)")
    answer = bisect(
        tmp_path / "later", reference, returning(MADE, "(lambda made: F.normalize(made, dim=-1))")
    )
    assert answer.verdict == "match"
    never = bisect(tmp_path / "never", reference, returning(MADE))
    assert never.verdict == "diverged"
    assert never.faults[0].line is not None and "F.normalize" in never.faults[0].line.text


PADDED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = layers
    def forward(self, ids):
        x = F.one_hot(ids, 16).float()
        keep = (ids > 0).float()[..., None]
        return (self.down(F.silu(self.up(x))) * keep).sum(1) / keep.sum(1)
model = Model()
ids = torch.tensor(IDS)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(ids).square().mean().backward()
optimizer.step()
"""


def test_an_input_of_another_size_is_not_proven(tmp_path: Path) -> None:
    """Without paddings it is right; with a wrong id it heals all as well as the whole input would."""
    padded, short, wrong = (
        PREPARED + PADDED.replace("IDS", ids)
        for ids in (
            "[[3, 5, 2, 9, 0, 0], [7, 7, 8, 0, 0, 0]]",
            "[[3, 5, 2, 9], [7, 7, 8, 0]]",
            "[[3, 5, 2, 9], [7, 6, 8, 0]]",
        )
    )
    assert bisect(tmp_path / "legal", padded, short).verdict == "match"
    answer = bisect(tmp_path / "wrong", padded, wrong)
    assert [fault.proof for fault in answer.faults] == ["not proven"]
    assert "an input of another size" in answer.unproven[0]
