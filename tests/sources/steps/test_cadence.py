"""OTEL_TORCH_BUDGET: recording stays within its share of time, sampled recordings still pair, and
errors are still seen.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import otel_torch
from otel_torch.settings import Settings
from otel_torch.sources.steps.cadence import FULL_STEPS, Cadence, Kind
from tests.support import PROGRAMS, lines, metadata, recording, run_python

DENOISE = Kind("schedule", "Transformer", "forward")
ENCODE = Kind("forward", "TextEncoder", "forward")
TRAIN = Kind("optimizer", "Net", "forward")


class Program:
    """A program that runs on a clock of its own.

    step: seconds of one that is not recorded. in_step, between: what recording adds to it, and to
    the time until the next one begins. reading: what reading takes, in this step or, `late`, in the
    next. first: what the very first step adds.
    """

    def __init__(
        self,
        percent: float,
        *,
        step: float = 1.0,
        in_step: float = 0.0,
        between: float = 0.0,
        reading: float = 0.0,
        late: bool = False,
        first: float = 0.0,
    ) -> None:
        self.now = self.spent = 0.0
        self.cadence = Cadence(percent, lambda: self.now)
        self.picked: list[tuple[str, int, int]] = []  # model, loop, step
        self._step, self._in_step, self._between, self._reading, self._late = (
            step,
            in_step,
            between,
            reading,
            late,
        )
        self._first, self._unread = first, 0.0

    def run(self, kind: Kind, step: int, loop: int = 0, wanted: bool = True) -> bool:
        """Run one step; return whether it was recorded."""
        self.cadence.begin()
        recorded = self.cadence.choose(kind, step, loop, wanted)
        self.now += self._step + self._first + self._in_step * recorded
        self._first = 0.0
        unread, self._unread = self._unread, self._reading * recorded
        self._read(unread if self._late else self._unread)
        self.cadence.end()
        self.now += self._between * recorded
        if recorded:
            self.picked.append((kind.model, loop, step))
            self.spent += self._in_step + self._between + self._reading
        return recorded

    def _read(self, seconds: float) -> None:
        if seconds:
            self.now += seconds
            self.cadence.read(seconds)

    def steps(self, model: str = "Net") -> list[int]:
        return [step for name, _, step in self.picked if name == model]


def trained(percent: float, steps: int, **costs: Any) -> Program:
    program = Program(percent, **costs)
    for step in range(steps):
        program.run(TRAIN, step)
    return program


WAYS = {
    "in the step": {"in_step": 0.3},
    "on the device, later": {"between": 0.3},
    "reading": {"reading": 0.3},
    "reading, a step later": {"reading": 0.3, "late": True},
    "everywhere": {"in_step": 0.1, "between": 0.1, "reading": 0.1, "late": True},
}


@pytest.mark.parametrize("costs", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("percent", [0.3, 1, 5, 20])
def test_recording_costs_what_it_may_wherever_it_costs(
    percent: float, costs: dict[str, Any]
) -> None:
    program = trained(percent, 4000, **costs)
    spent = 100 * program.spent / program.now
    assert percent / 3 < spent <= percent
    assert program.cadence.cost_percent == pytest.approx(spent, rel=0.1)


def test_what_costs_nothing_is_recorded_always() -> None:
    assert len(trained(1, 1000, in_step=0.001).picked) > 990


def test_the_first_steps_are_recorded_and_what_the_very_first_takes_means_nothing() -> None:
    assert trained(0.01, 100, in_step=1.0).steps() == [0, 2, 4]
    assert trained(1, 2000, in_step=0.3, first=500.0).picked == trained(1, 2000, in_step=0.3).picked


def test_ranks_that_decide_alone_record_steps_of_one_ladder() -> None:
    fast, slow = (set(trained(2, 3000, in_step=cost).steps()) for cost in (0.2, 0.9))
    assert len(fast) > 2 * len(slow) > 50
    assert slow < fast
    assert {step % 64 for step in slow - {0, 2, 4}} == {0}


def test_the_same_times_give_the_same_picks() -> None:
    assert (
        trained(2, 500, in_step=0.1, reading=0.01).picked
        == trained(2, 500, in_step=0.1, reading=0.01).picked
    )


def generated(videos: int, denoise_steps: int, percent: float, **costs: Any) -> Program:
    program = Program(percent, **costs)
    for video in range(videos):
        program.run(ENCODE, video, video)
        for step in range(denoise_steps):
            program.run(DENOISE, step, video)
    return program


def test_what_runs_once_a_video_has_a_share_of_its_own() -> None:
    program = generated(40, 50, 3, in_step=0.3)
    assert 100 * program.spent / program.now <= 3
    assert program.steps("TextEncoder")[-30:] == [*range(10, 40)]
    assert len(program.steps("Transformer")) > 80


def test_the_first_step_of_each_video_is_recorded_before_any_other_step_twice() -> None:
    program = generated(40, 50, 2, in_step=0.5)
    firsts = [loop for name, loop, step in program.picked if name == "Transformer" and step == 0]
    assert len(firsts) > 30


def test_of_videos_of_few_steps_whole_ones_are_left_out_by_the_same_ladder() -> None:
    program = Program(2, in_step=0.3)
    for video in range(200):
        for step in range(4):
            program.run(DENOISE, step, video)
    assert 100 * program.spent / program.now <= 2
    later = [(loop, step) for _, loop, step in program.picked if loop > 1]
    assert len(later) > 20
    assert {(loop % 4, step) for loop, step in later} == {(0, 0)}


@pytest.mark.parametrize(
    "numbers",
    [range(1, 2000, 2), [step * 1000 + 1 for step in range(1000)]],
    ids=["odd", "far apart"],
)
def test_steps_that_are_numbered_past_the_ladder_do_not_starve(numbers: Any) -> None:
    program = Program(5, in_step=0.3)
    for step in numbers:
        program.run(TRAIN, step)
    assert 5 / 6 < 100 * program.spent / program.now <= 5


def test_steps_that_nobody_wants_are_what_the_others_are_compared_with() -> None:
    program = Program(5, in_step=0.3)
    for step in range(1000):
        program.run(TRAIN, step, wanted=step % 5 == 3)
    assert len(program.picked) > 50
    assert {step % 5 for step in program.steps()} == {3}
    assert 100 * program.spent / program.now <= 5


def test_a_model_that_only_runs_in_steps_of_others_is_seen() -> None:
    program = trained(0.01, 50, in_step=1.0)
    cadence, teacher = program.cadence, Kind("forward", "Teacher", "eval")
    for expected in (True, False):
        cadence.begin()
        assert not cadence.choose(TRAIN, 51, 0)
        assert cadence.choose(teacher, 0, 0) is expected
        assert not cadence.choose(TRAIN, 51, 0)
        cadence.end()


def test_a_step_is_recorded_as_a_whole() -> None:
    cadence = Cadence(1)
    cadence.begin()
    assert cadence.choose(TRAIN, 0, 0)
    assert cadence.choose(Kind("forward", "Teacher", "forward"), 77, 0)
    assert not cadence.choose(TRAIN, 0, 0, wanted=False)


class TestNonFinite:
    @pytest.fixture
    def program(self) -> Program:
        return trained(0.01, 41, in_step=1.0)  # its budget is spent for a long time

    def run(self, program: Program, steps: range) -> list[int]:
        return [step for step in steps if program.run(TRAIN, step)]

    def test_the_steps_after_one_are_recorded_whatever_they_cost(self, program: Program) -> None:
        program.cadence.observe("Net", False)
        assert self.run(program, range(41, 60)) == [41, 42, 43]
        assert program.cadence.describe()["in_full"] == FULL_STEPS
        assert "3 of them because of a NaN or Inf" in program.cadence.line()

    def test_what_stays_so_is_no_news(self, program: Program) -> None:
        program.cadence.observe("mask", False)
        self.run(program, range(41, 50))
        program.cadence.observe("mask", False)
        assert self.run(program, range(50, 60)) == []

    def test_nor_what_is_so_time_and_again(self, program: Program) -> None:
        found = []
        for turn in range(6):
            program.cadence.observe("scores", False)
            found.append(len(self.run(program, range(50 + 10 * turn, 60 + 10 * turn))))
            program.cadence.observe("scores", True)
        assert found == [3, 3, 3, 0, 0, 0]

    def test_steps_that_nobody_wants_stay_out(self, program: Program) -> None:
        program.cadence.observe("Net", False)
        assert not program.run(TRAIN, 41, wanted=False)


# -- in a program

# so little that nothing is recorded but the first steps, however fast the machine
LITTLE = "0.001"
FIRST = [0, 2, 4]
X = torch.linspace(-1, 1, 6).reshape(2, 3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(3, 3), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.linear(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), Block(), nn.Linear(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


def make() -> Net:
    torch.manual_seed(0)
    return Net()


pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.parametrize("text", ["", "off", "0", "no"])
def test_off(text: str) -> None:
    assert Settings.from_env({"OTEL_TORCH_BUDGET": text}).budget is None


@pytest.mark.parametrize(
    ("text", "percent"), [("5", 5.0), (" 0.5 % ", 0.5), (".25", 0.25), ("100%", 100.0)]
)
def test_percentages(text: str, percent: float) -> None:
    assert Settings.from_env({"OTEL_TORCH_BUDGET": text}).budget == percent


@pytest.mark.parametrize("text", ["-1", "101", "1e2", "nan", "much", "0.0"])
def test_what_is_no_percentage_is_named_and_all_is_recorded(text: str) -> None:
    problems: list[str] = []
    assert Settings.from_env({"OTEL_TORCH_BUDGET": text}, problems.append).budget is None
    assert problems == [
        f"OTEL_TORCH_BUDGET={text!r}: use a percentage above 0 and up to 100, such as 1 or 0.5, or off; using 'off'"
    ]


def test_steps_are_recorded_as_wholes_and_counted_as_if_all_were(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with recording(budget=LITTLE) as sink:
        net = make()
        for step in range(40):
            with otel_torch.trace_step(step):
                net(X)
                net(X)
    assert sorted(set(sink.rows("step", "call", module="layers.1"))) == [
        (step, call) for step in FIRST for call in (0, 1)
    ]
    assert len(sink.closed) == 40 + 80  # steps and forwards are spans all the same
    reported = re.findall(r"OTEL_TORCH_BUDGET=0.001: .*", capfd.readouterr().err)
    assert len(reported) == 1
    assert re.fullmatch(
        r".*: 3 of 40 steps were recorded; at the end one in \d+ of Net's; that cost about [\d.e+-]+ % of .*",
        reported[0],
    )


def test_training_records_gradients_of_the_same_steps() -> None:
    with recording(budget=LITTLE, capture="outputs,parameters,gradients") as sink:
        net = make()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(12):
            net(X).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for where in ({"tensor": "out"}, {"tensor": "grad"}, {"tensor": "param_grad.weight"}):
        assert sink.rows("step", module="layers.0", **where) == FIRST


def test_of_the_steps_that_are_chosen_some_are_recorded() -> None:
    with recording(budget=LITTLE, steps="1,3,5-30") as sink:
        net = make()
        for _ in range(40):
            net(X)
    recorded = sorted(set(sink.rows("step")))
    assert recorded[0] == 1 and 3 <= len(recorded) < 6


def eager(net: Net) -> Any:
    return net


def whole(net: Net) -> Any:
    return torch.compile(net, fullgraph=True, backend="eager")


def in_place(net: Net) -> Any:
    net.compile(fullgraph=True, backend="eager")
    return net


def regional(net: Net) -> Any:
    net.layers[1].compile(fullgraph=True, backend="eager")
    return net


FORMS = (eager, whole, in_place, regional)


@pytest.mark.parametrize("modules", ["", r"^layers\.1$"], ids=["all modules", "one module"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_around_a_value_that_is_not_finite_steps_are_recorded_though_it_began_in_one_that_is_not(
    form: Any, modules: str
) -> None:
    with recording(budget=LITTLE, modules=modules) as sink:
        net = form(make())
        for step in range(30):
            net(X * (float("nan") if step == 20 else 1))
    assert sorted(set(sink.rows("step"))) == [*FIRST, 21, 22, 23]


def test_a_value_that_is_not_finite_inside_a_recorded_step_has_the_next_ones_recorded() -> None:
    class Hidden(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nan_to_num(self.layers(x))

    with recording(budget=LITTLE, stats="mean") as sink:  # seen through any statistic
        net = Hidden()
        for step in range(30):
            net(X * (float("inf") if step == 4 else 1))
    assert sorted(set(sink.rows("step"))) == [*FIRST, 5, 6, 7]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_change_of_cadence_makes_no_new_graph(form: Any) -> None:
    def work() -> list[torch.Tensor]:
        torch._dynamo.reset()
        counters.clear()
        net = form(make())
        return [net(X * step) for step in range(12)]

    bare, graphs = work(), counters["stats"]["unique_graphs"]
    with recording(budget=LITTLE) as sink:
        found = work()
        assert counters["stats"]["unique_graphs"] == graphs
    assert sorted(set(sink.rows("step"))) == FIRST
    assert all(torch.equal(one, other) for one, other in zip(bare, found, strict=True))


def test_a_port_that_is_fed_with_its_reference_needs_every_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with recording(budget=LITTLE, isolate=str(tmp_path), capture="parity") as sink:
        net = make()
        for _ in range(8):
            net(X)
    assert sorted(set(sink.rows("step", phase="forward"))) == [*range(8)]
    assert "OTEL_TORCH_BUDGET is ignored with OTEL_TORCH_ISOLATE" in capfd.readouterr().err


def test_nothing_stays_behind() -> None:
    with recording(budget=LITTLE):
        net = make()
        net(X)
        assert net._forward_hooks
    assert not net._forward_hooks and not net._forward_pre_hooks


# -- compared

DENOISING = PROGRAMS / "denoise_two_videos.py"
RUNS = {
    "full": ({}, ()),
    "budget": ({"OTEL_TORCH_BUDGET": LITTLE}, ()),
    "steps": ({"OTEL_TORCH_STEPS": "*/5"}, ()),
    "full, bug": ({}, ("bug",)),
    "budget, bug": ({"OTEL_TORCH_BUDGET": LITTLE}, ("bug",)),
    "steps, bug": ({"OTEL_TORCH_STEPS": "*/5"}, ("bug",)),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    found = {}
    for name, (variables, arguments) in RUNS.items():
        folder = tmp_path_factory.mktemp("run")
        done = run_python(folder, DENOISING, *arguments, OTEL_TORCH_CAPTURE="parity", **variables)
        found[name] = folder / "run.jsonl", done.stdout
    return found


def test_a_sampled_run_computes_what_any_other_does_and_says_what_was_recorded(
    runs: dict[str, tuple[Path, str]],
) -> None:
    full, sampled = runs["full"], runs["budget"]
    assert sampled[1] == full[1]
    kept = {(row["model"], row["loop"], row["step"], row["phase"]) for row in lines(sampled[0])}
    totals = metadata(sampled[0])["budget"]
    assert "budget" not in metadata(full[0])
    assert {(model, phase) for model, _, _, phase in kept} >= {
        ("Transformer", "attach"),
        ("TextEncoder", "attach"),
    }
    # forwards of the text encoder are steps of their own
    assert {
        (loop, step)
        for model, loop, step, phase in kept
        if (model, phase) == ("Transformer", "forward")
    } >= {(0, 0), (0, 2)}
    assert (totals["percent"], totals["steps"], [kind["model"] for kind in totals["kinds"]]) == (
        0.001,
        34,
        ["TextEncoder", "Transformer"],
    )
    assert totals["recorded"] < 8 and totals["cost_percent"] > 0.001


@pytest.mark.parametrize("port", ["budget", "steps"])
@pytest.mark.parametrize("reference", ["full", "budget", "steps"])
def test_a_sampled_recording_pairs_with_any_other(
    reference: str, port: str, runs: dict[str, tuple[Path, str]]
) -> None:
    for one, other in ((reference, port), (port, reference)):
        clean = otel_torch.diff(runs[one][0], runs[other][0])
        assert (clean.verdict, clean.first) == ("match", None)
        diverged = otel_torch.diff(runs[one][0], runs[f"{other}, bug"][0])
        first = diverged.first
        assert (diverged.verdict, len(diverged.introduced)) == ("diverged", 1)
        assert (first.module, first.side, first.loop, first.step, first.call) == (
            "blocks.1.up",
            "output",
            0,
            0,
            0,
        )
        assert (first.port_loop, first.port_step, first.port_call) == (0, 0, 0)
