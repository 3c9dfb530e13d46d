"""The compiled observer records what Python's observers record, to the byte, and leaves alone what
only they can record.
"""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections import Counter, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import otel_torch
from otel_torch.records import Record
from otel_torch.sources.tensors import compact_records, native_observer
from otel_torch.sources.tensors.activations import Activations
from otel_torch.statistics import cpu_kernel
from tests.support import run_python

pytestmark = pytest.mark.skipif(
    cpu_kernel.load() is None or cpu_kernel.load().objects is None, reason=cpu_kernel.describe()
)
CAPTURES = ("outputs", "inputs,outputs", "parity")
Pair = namedtuple("Pair", "first second")


class Returning(nn.Module):
    """Returns whatever a function makes of its arguments."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.linspace(-2, 3, torch.Size(shape).numel()).reshape(shape).to(dtype)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def called(model: nn.Module, *args: Any, times: int = 1, **kwargs: Any) -> None:
    with torch.no_grad():
        for _ in range(times):
            model(*args, **kwargs)


# -- programs


def ordinary() -> None:
    called(mlp(), values(3, 8), times=2)


def outputs_of_every_form() -> None:
    x = values(3, 4)
    forms = {
        "tuple": lambda m, x: (x, None, x * 2),
        "flat": lambda m, x: (x, 1, "text", 2.0, True),
        "long": lambda m, x: tuple(x + i for i in range(20)),
        "nested": lambda m, x: (x, (x, [x])),
        "dict": lambda m, x: {"a": x, "b": x * 3},
        "named": lambda m, x: Pair(x, x),
        "none": lambda m, x: None,
        "number": lambda m, x: 3,
        "parameter": lambda m, x: nn.Parameter(x),
        "empty": lambda m, x: x[:0],
        "scalar": lambda m, x: x.sum(),
        "transposed": lambda m, x: x.t(),
        "strided": lambda m, x: x[:, ::2],
        "expanded": lambda m, x: x[:1].expand(5, 4),
        "conjugate": lambda m, x: torch.complex(x, x).conj(),
        "negated": lambda m, x: torch.complex(x, x).conj().imag,
        "sparse": lambda m, x: x.to_sparse(),
        "meta": lambda m, x: x.to("meta"),
    }
    model = Returning(
        lambda m, x: [getattr(m, name)(x) for name in forms],
        **{name: Returning(form) for name, form in forms.items()},
    )
    called(model, x)


def arguments_of_every_form() -> None:
    x = values(2, 3)
    model = Returning(lambda m, *args, **kwargs: args[0] if args else None)
    for args, kwargs in (
        ((x,), {"mask": None, "scale": 2.0}),
        ((x, (x, x + 1)), {"pair": (x, None)}),
        ((x,), {"nested": [x], "ü": x}),
        (tuple(x + i for i in range(12)), {}),
        ((), {}),
    ):
        called(model, *args, **kwargs)


def every_dtype() -> None:
    dtypes = (
        torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8,
        torch.bool, torch.complex64, torch.float8_e4m3fn,
    )  # fmt: skip
    model = Returning(lambda m, x: m.part(x), part=nn.Identity())
    for dtype in dtypes:
        called(model, values(4, 5, dtype=dtype))


def sizes_about_every_limit() -> None:
    model = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True), nn.Identity())
    for size in (1, 2, 4095, 4096, 2**15, 2**18, 2**18 + 1):
        called(model, values(size))


def not_finite() -> None:
    model = nn.Sequential(nn.Identity(), nn.Softmax(-1), nn.Identity())
    for value in (float("nan"), float("inf"), -float("inf"), 1e200):
        called(model, torch.tensor([0.5, value, 1.5], dtype=torch.float64))


def shared_modules() -> None:
    block = mlp()
    outer = Returning(
        lambda m, x: m.b(m.a(x)), a=nn.Sequential(block), b=nn.Sequential(nn.Identity())
    )
    outer.b.append(block[1])
    called(outer, values(2, 8))
    called(block, values(2, 8), times=2)
    called(nn.Sequential(block[0]), values(2, 8))


def nested_calls_of_one_module() -> None:
    def function(m: Any, x: Tensor, depth: int = 0) -> Tensor:
        return x if depth == 3 else m.part(m(x * 2, depth + 1))

    called(Returning(function, part=nn.Identity()), values(3), times=2)


def errors_inside() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        try:
            m.bad(x)
        except ValueError:
            return m.good(x)

    def fail(m: Any, x: Tensor) -> None:
        raise ValueError

    model = Returning(function, bad=Returning(fail, inner=nn.Identity()), good=nn.Identity())
    called(model, values(3), times=2)


def changes_in_place() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        y = m.first(x)
        y.add_(1)
        z = m.second(y)
        y.data.mul_(2)  # which torch does not count
        return m.third(y) + z

    for size in (100, 2**15):
        parts = {name: nn.Identity() for name in ("first", "second", "third")}
        called(Returning(function, **parts), values(size), times=2)


def changes_of_inputs_that_torch_does_not_count() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        return m.inner(m.doubling(x)) + m.inner(x)

    def double(m: Any, x: Tensor) -> Tensor:
        x.data.mul_(2)
        return x

    for size in (100, 2**15):
        parts = {"doubling": Returning(double), "inner": nn.Identity()}
        called(Returning(function, **parts), values(size), times=2)


def views_and_parameters_as_values() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        y = m.outer(x)
        return m.inner(y.view(-1)) + m.inner(y[:1].view(-1)) + m.inner(m.weight).sum()

    outer = Returning(lambda m, x: m.inner(x), inner=nn.Linear(4, 4))
    model = Returning(function, outer=outer, inner=nn.Identity())
    model.weight = nn.Parameter(values(4))
    called(model, values(1, 4), times=2)


def classes_that_change() -> None:
    class Scaled(nn.Identity):
        pass

    model = nn.Sequential(nn.Identity(), nn.ReLU())
    for cls in (nn.Identity, Scaled, nn.Identity):
        model[0].__class__ = cls
        called(model, values(3))


def steps_that_end_inside_of_a_call() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        for step in range(2):
            with otel_torch.trace_step(step):
                x = m.part(x)
        return x

    called(Returning(function, part=nn.Linear(3, 3)), values(2, 3), times=2)


def training() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        checkpoint(model, values(3, 8), use_reentrant=False).square().mean().backward()
        optimizer.step()
    model.eval()
    called(model, values(3, 8))


def steps_and_loops() -> None:
    model = mlp()
    for _ in range(2):
        for step in range(3):
            with otel_torch.trace_step(step):
                called(model, values(2, 8), times=2)


def inference_and_autocast() -> None:
    model = mlp()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        model(values(2, 8))


def threads() -> None:
    model, text = mlp(), mlp()
    called(model, values(2, 8))
    for part in (model, text):
        thread = threading.Thread(target=called, args=(part, values(2, 8)))
        thread.start()
        thread.join()
    called(model, values(2, 8))


def compiled_calls() -> None:
    torch._dynamo.reset()
    net = Returning(lambda m, x: (m.first(x), [m.second(x)]), first=mlp(), second=nn.ReLU())
    model = torch.compile(net, backend="aot_eager", fullgraph=True)
    for step in range(4):
        with otel_torch.trace_step(step):
            called(model, values(2, 8), times=2)
    called(model, values(2, 8) / 0)


PROGRAMS = [
    ordinary, outputs_of_every_form, arguments_of_every_form, every_dtype, sizes_about_every_limit,
    not_finite, shared_modules, nested_calls_of_one_module, errors_inside, changes_in_place,
    changes_of_inputs_that_torch_does_not_count, views_and_parameters_as_values,
    classes_that_change, steps_that_end_inside_of_a_call, training, steps_and_loops,
    inference_and_autocast, threads, compiled_calls,
]  # fmt: skip


def recorded(program: Callable[[], None], path: Path, **settings: Any) -> bytes:
    torch.manual_seed(0)
    assert otel_torch.start(jsonl=str(path), **settings)
    try:
        program()
    finally:
        otel_torch.stop()
    return path.read_bytes() if path.exists() else b""


@pytest.fixture
def by_python(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that leaves all calls to Python from now on."""
    return lambda: monkeypatch.setattr(native_observer, "_suffices_for", lambda settings: False)


@pytest.fixture
def seen_by_python(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the calls that Python observes, by what is observed and the module's name."""
    counts: Counter[str] = Counter()
    for name in ("on_inputs", "on_output", "on_compiled_tensors"):
        original = getattr(Activations, name)

        def counting(
            self: Any, site: Any, *args: Any, name: str = name, original: Any = original, **how: Any
        ) -> None:
            counts[f"{name} {getattr(site, 'site', site).name}"] += 1
            original(self, site, *args, **how)

        monkeypatch.setattr(Activations, name, counting)
    return counts


# -- tests


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_recording_is_that_of_pythons_observers(program, capture, tmp_path, by_python):
    native = recorded(program, tmp_path / "native.jsonl", capture=capture)
    by_python()
    assert native.decode().splitlines() == (
        recorded(program, tmp_path / "python.jsonl", capture=capture).decode().splitlines()
    )
    assert native


@pytest.mark.parametrize("capture", ["outputs", "parity"])
@pytest.mark.parametrize(
    "stats",
    ["max", "mean,shape,std", "l2,rms,zeros,numel", "mean,sketch", "histogram,sketch", "hash"],
)
def test_any_statistics_are_encoded_alike(stats, capture, tmp_path, by_python):
    native = recorded(ordinary, tmp_path / "native.jsonl", stats=stats, capture=capture)
    by_python()
    python = recorded(ordinary, tmp_path / "python.jsonl", stats=stats, capture=capture)
    assert native == python != b""


@pytest.mark.parametrize("capture", CAPTURES)
def test_compiled_calls_of_steps_that_are_not_recorded_are_counted_alike(
    capture, tmp_path, by_python
):
    native = recorded(compiled_calls, tmp_path / "native.jsonl", capture=capture, steps="*/3")
    by_python()
    python = recorded(compiled_calls, tmp_path / "python.jsonl", capture=capture, steps="*/3")
    assert native == python != b""


def test_python_sees_of_compiled_calls_those_with_a_list_or_a_nan(tmp_path, seen_by_python):
    recorded(compiled_calls, tmp_path / "run.jsonl")
    assert seen_by_python == {
        "on_output ": 9,
        "on_compiled_tensors first": 1,
        "on_compiled_tensors first.0": 1,
        "on_compiled_tensors first.1": 1,
        "on_compiled_tensors first.2": 1,
        "on_compiled_tensors second": 1,
    }


def test_python_sees_no_compiled_call_of_a_step_that_is_not_recorded(tmp_path, seen_by_python):
    for capture in CAPTURES:
        recorded(compiled_calls, tmp_path / "run.jsonl", capture=capture, steps="1000")
    assert not seen_by_python


@pytest.mark.parametrize("capture", CAPTURES)
def test_python_sees_no_ordinary_call(capture, tmp_path, seen_by_python):
    for program in (ordinary, steps_and_loops, inference_and_autocast, changes_in_place):
        recorded(program, tmp_path / "run.jsonl", capture=capture)
    assert not seen_by_python


def test_a_step_that_is_not_recorded_is_counted(tmp_path, seen_by_python):
    model = mlp()

    def program() -> None:
        for _ in range(3):
            with otel_torch.trace_step(0):
                called(model, values(2, 8))

    recorded(program, tmp_path / "run.jsonl", steps="7")
    assert not seen_by_python


def test_a_process_without_a_model_loads_no_kernel(tmp_path):
    code = """
import otel_torch
from otel_torch.statistics import cpu_kernel
assert otel_torch.start()
assert cpu_kernel._kernel is None
otel_torch.stop()
"""
    run_python(tmp_path, code, fresh=True)


@pytest.mark.parametrize("capture", ["training", "gradients,outputs"])
def test_what_only_python_records_is_left_to_it(capture, tmp_path, seen_by_python):
    recorded(ordinary, tmp_path / "run.jsonl", capture=capture)
    assert seen_by_python["on_output 0"] == 2


def test_records_are_made_for_sinks_that_ask_for_them(tmp_path):
    from otel_torch import session
    from otel_torch.recorder import Sink

    received: list[Record] = []

    class Collecting(Sink):
        def write(self, batch):
            received.extend(batch.records)

    def program() -> None:
        session.current().recorder.add_sink(Collecting())
        ordinary()

    lines = recorded(program, tmp_path / "run.jsonl").splitlines()
    assert [type(record) for record in received] == [Record] * len(lines)
    assert [record.module for record in received[:4]] == ["0", "1", "2", ""]
    assert received[0].stats["shape"] == [3, 16] and received[0].time_ns > 10**18


def test_no_tensor_or_module_outlives_the_program(tmp_path):
    kept: list[weakref.ref[Any]] = []

    def program() -> None:
        model = nn.Sequential(nn.Identity(), nn.Identity())
        x = values(2**15)
        called(model, x)
        kept.extend((weakref.ref(x), weakref.ref(model)))

    recorded(program, tmp_path / "run.jsonl", capture="inputs,outputs")
    gc.collect()
    assert [reference() for reference in kept] == [None, None]


def test_a_tensor_is_measured_once_on_its_way(tmp_path):
    """An input is not measured again: uncounted changes of its memory do not show."""

    def function(m: Any, x: Tensor) -> Tensor:
        y = m.first(x)
        memoryview(y.numpy()).cast("B")[:] = bytes(4 * y.numel())
        return m.second(y)

    def program() -> None:
        called(Returning(function, first=nn.ReLU(), second=nn.ReLU()), values(2**15))

    lines = recorded(program, tmp_path / "run.jsonl", capture="inputs,outputs").decode()
    sums = {
        (row["module"], row["tensor"]): row["sum"] for row in map(json.loads, lines.splitlines())
    }
    assert sums["second", "in[0]"] == sums["first", "out"] != 0 == sums["second", "out"]


def test_an_ordinary_call_costs_no_record_on_its_way_to_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    record_of = compact_records.record_of
    monkeypatch.setattr(
        compact_records,
        "record_of",
        lambda row, statistics: made.append(row) or record_of(row, statistics),
    )
    otel_torch.start(jsonl=str(tmp_path / "run.jsonl"))
    ordinary()
    otel_torch.stop()
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 8
    assert made == []
