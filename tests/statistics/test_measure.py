"""The statistics of tensors are right, cheap, and invisible to the program."""

from __future__ import annotations

import math

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from otel_torch.settings import STATISTICS
from otel_torch.statistics import cpu_kernel
from otel_torch.statistics.bit_hash import bit_hash
from otel_torch.statistics.histogram import histogram
from otel_torch.statistics.measure import Measurement, _measure_any, _plan, measure
from otel_torch.statistics.part_sketches import part_sketches
from otel_torch.statistics.read_rows import read_rows
from otel_torch.statistics.reduce import reduce_scalars
from otel_torch.statistics.row_layout import COLUMNS, MAX, SCALARS, VECTORS
from otel_torch.statistics.sketch import row_sketch, sketch
from otel_torch.statistics.table import DEFINITIONS, columns_for, derive
from otel_torch.statistics.token_sketch import row_sketches
from tests.support import PROGRAMS, run_python

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
FP8 = [getattr(torch, name) for name in dir(torch) if name.startswith("float8_")]
INTEGERS = [
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
]


@pytest.fixture(params=["auto", "torch"])
def kernel(request):
    """Use each way of measuring the tensors of a CPU."""
    cpu_kernel.choose(request.param)
    yield request.param
    cpu_kernel.choose("auto")


on_both_kernels = pytest.mark.usefixtures("kernel")


def statistics(tensor: torch.Tensor, names=STATISTICS):
    measured = measure(tensor)
    return derive(names, read_rows([measured])[0], measured)


def expected(tensor: torch.Tensor):
    """Return the statistics as torch computes them from an fp64 copy."""
    wide = tensor.detach().to(torch.float64).flatten()
    values = {
        "abs_mean": wide.abs().mean(), "sum": wide.sum(), "min": wide.min(), "max": wide.max(), "mean": wide.mean(),
        "std": wide.std(correction=min(wide.numel() - 1, 1)),
        "nonfinite": (~wide.isfinite()).sum(), "rms": wide.square().mean().sqrt(), "l2": wide.square().sum().sqrt(),
        "zeros": (wide == 0).sum(),
    }  # fmt: skip
    actual = {
        name: value.item()
        for name, value in values.items()
        if not (name == "std" and wide.numel() < 2)
    }
    return {
        **actual,
        "numel": wide.numel(),
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype),
    }


def assert_same(actual, wanted):
    assert list(actual) == [name for name in STATISTICS if name in wanted]
    for name, value in wanted.items():
        if isinstance(value, float):
            assert actual[name] == pytest.approx(
                value, rel=1e-9, abs=1e-9 * abs(wanted.get("rms", 1.0)), nan_ok=True
            ), name
        else:
            assert actual[name] == value, name
            assert type(actual[name]) is type(value), name


def test_the_table_and_the_settings_name_the_same_statistics():
    assert tuple(DEFINITIONS) == STATISTICS


@on_both_kernels
@pytest.mark.parametrize("dtype", FLOATS + FP8 + INTEGERS + [torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (2,), (7, 3), (2, 3, 4, 5), (300, 1000)], ids=str)
def test_agrees_with_torch_in_fp64(shape, dtype):
    generator = torch.Generator().manual_seed(sum(shape))
    values = torch.randn(shape, generator=generator) * 3
    tensor = (
        values.abs() + 0.5
        if dtype == torch.float8_e8m0fnu
        else values.abs()
        if not dtype.is_signed
        else values
    ).to(dtype)
    assert_same(statistics(tensor), expected(tensor))


@on_both_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_memory_layout_does_not_matter(dtype):
    base = torch.randn(6, 700, 500).to(dtype)
    for view in (
        base.transpose(0, 2),
        base[:, ::2],
        base[1:3, :, 7:311],
        base[:1].expand(3, -1, -1),
        base.permute(2, 0, 1)[::3],
        base[0, 0, 5],
        torch._neg_view(base[0]),
    ):
        assert_same(statistics(view), statistics(view.contiguous()))
        if not dtype.is_complex:
            assert_same(statistics(view), expected(view))


@on_both_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_mean_and_deviation_hold_where_the_mean_is_ten_thousand_deviations(dtype):
    generator = torch.Generator().manual_seed(3)
    if dtype is torch.bfloat16:  # eight bits: two neighbours, one of them very rarely
        tensor = torch.full((600_000,), 1.0).to(dtype)
        tensor[torch.randperm(600_000, generator=generator)[:100]] = 1.0078125
    else:
        tensor = (1e4 + torch.randn(600_000, generator=generator)).to(dtype)
    reference = tensor.to(torch.float64)
    assert reference.mean() / reference.std() > 9_000
    actual = statistics(tensor)
    assert actual["mean"] == pytest.approx(reference.mean().item(), rel=1e-4)
    assert actual["std"] == pytest.approx(reference.std().item(), rel=1e-4)


@on_both_kernels
def test_equal_numbers_have_no_deviation():
    assert statistics(torch.full((1000,), 0.1))["std"] == 0.0


@on_both_kernels
def test_large_and_small_magnitudes_neither_overflow_nor_vanish():
    assert_same(
        statistics(torch.tensor([3e38, 3e38, -1e38])), expected(torch.tensor([3e38, 3e38, -1e38]))
    )
    tiny = torch.tensor([1e-30, 3e-30])
    assert statistics(tiny)["std"] == pytest.approx(tiny.double().std().item(), rel=1e-9)


@on_both_kernels
@pytest.mark.parametrize("size", [5, 600_000])
@pytest.mark.parametrize(
    "bad",
    [(math.nan,), (math.inf,), (-math.inf,), (math.inf, -math.inf), (math.nan, math.inf)],
    ids=str,
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_not_finite_is_counted_and_goes_through_as_in_torch(dtype, bad, size):
    tensor = torch.ones(size).to(dtype)
    tensor[2 : 2 + len(bad)] = torch.tensor(bad).to(dtype)
    tensor[0] = 0
    assert_same(statistics(tensor), expected(tensor))


def test_complex_numbers_have_the_statistics_of_their_magnitudes_only():
    for dtype in (torch.complex32, torch.complex64, torch.complex128):
        tensor = torch.tensor([3 + 4j, 0, complex(0, math.inf)]).to(dtype)
        actual = statistics(tensor)
        assert set(actual) == {
            "abs_mean",
            "nonfinite",
            "rms",
            "l2",
            "zeros",
            "numel",
            "shape",
            "dtype",
        }
        assert (actual["nonfinite"], actual["zeros"], actual["abs_mean"]) == (1, 1, math.inf)
    assert statistics(torch.tensor([3 + 4j, 0]))["l2"] == 5.0
    assert statistics(torch.tensor([3 + 4j, 0]).conj())["abs_mean"] == 2.5


def test_an_empty_tensor_has_a_sum_and_no_mean():
    assert statistics(torch.empty(0, 3)) == {
        "sum": 0.0, "nonfinite": 0, "l2": 0.0, "zeros": 0, "numel": 0, "shape": [0, 3], "dtype": "torch.float32",
    }  # fmt: skip


@on_both_kernels
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_sparse_tensors_count_the_zeros_that_they_do_not_store(layout):
    dense = torch.tensor([[0, 1.5, 0], [-2, 0, 0]])
    assert_same(statistics(getattr(dense, layout)()), expected(dense))
    positive = torch.tensor([[0, 1.5, 0], [2, 3, 0]])
    assert statistics(getattr(positive, layout)())["min"] == 0.0
    nothing = torch.zeros(2, 2)
    assert_same(statistics(getattr(nothing, layout)()), expected(nothing))


def test_entries_of_one_place_in_a_sparse_tensor_are_one():
    tensor = torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (3,))
    assert_same(statistics(tensor), expected(tensor.to_dense()))


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors_are_measured_by_what_they_stand_for():
    values = torch.randn(2, 3)
    for tensor in (
        torch.quantize_per_tensor(values, 0.1, 0, torch.qint8),
        torch.quantize_per_channel(
            values, torch.tensor([0.1, 0.2]), torch.tensor([0, 0]), 0, torch.qint8
        ),
    ):
        assert statistics(tensor)["sum"] == pytest.approx(
            tensor.dequantize().double().sum().item(), rel=1e-9, abs=1e-12
        )


@on_both_kernels
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_ragged_tensors_are_measured_by_their_elements(layout):
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    actual = statistics(torch.nested.nested_tensor(parts, layout=layout))
    together = torch.cat(parts)
    assert_same(actual, {**expected(together), "shape": [2, -1, 3]})


@pytest.mark.filterwarnings("error")
def test_a_tensor_without_numbers_has_its_facts_and_nothing_else():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.randn(3)
    freed = torch.nn.Parameter(torch.randn(3))
    freed.untyped_storage().resize_(0)
    for tensor in (torch.empty(3, device="meta"), fake, freed):
        assert statistics(tensor) == {"numel": 3, "shape": [3], "dtype": "torch.float32"}


def test_inside_function_transforms_only_ordinary_tensors_have_numbers():
    seen: list[Measurement] = []
    constant = torch.ones(3)

    def function(x):
        seen.append(measure(x))
        seen.append(measure(constant))
        return (x * constant).sum()

    assert torch.equal(torch.func.grad(function)(torch.zeros(3)), torch.ones(3))
    assert torch.vmap(function)(torch.ones(2, 3)).tolist() == [3.0, 3.0]
    assert [row and row[2] for row in read_rows(seen)] == [None, 3.0, None, 3.0]


def test_subclasses_are_measured_and_not_asked():
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError(f"{func} was seen")

    assert statistics(torch.ones(4).as_subclass(Loud))["sum"] == 4.0


def test_a_lazy_parameter_has_no_statistics_and_raises_nothing(capsys):
    assert measure(torch.nn.LazyLinear(3).weight).row is None


SEEN = []


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        SEEN.append(func)
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        SEEN.append(func)
        return func(*args, **(kwargs or {}))


@on_both_kernels
@pytest.mark.parametrize("mode", [Functions, Operations])
def test_no_mode_sees_the_arithmetic(mode):
    tensor = torch.randn(1000)
    SEEN.clear()
    with mode():
        row = read_rows([measure(tensor)])[0]
    assert SEEN == []
    assert row is not None and row[2] == pytest.approx(tensor.double().sum().item())


@on_both_kernels
@pytest.mark.filterwarnings("error::torch.jit.TracerWarning", "ignore:.*is deprecated")
def test_a_traced_graph_holds_none_of_it():
    measured = []

    def function(x):
        measured.append(measure(x))
        return x * 2

    graph = torch.jit.trace(function, torch.ones(3)).graph
    assert [node.kind() for node in graph.nodes()] == ["prim::Constant", "aten::mul"]
    assert (measured[0].shape, measured[0].numel) == ([3], 3)
    assert read_rows(measured[:1]) == read_rows([measure(torch.ones(3))])


@on_both_kernels
def test_the_program_is_left_as_it_was():
    tensor = torch.randn(5, requires_grad=True)
    before, version, state = tensor.detach().clone(), tensor._version, torch.get_rng_state()
    product = tensor * 2
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
            measured = measure(product, COLUMNS)
            in_autocast = read_rows([measured])[0]
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    assert in_autocast == read_rows([measure(product.detach(), COLUMNS)])[0]
    assert type(measured.row) is list
    product.sum().backward()
    assert torch.equal(product.detach(), 2 * before)
    assert tensor.grad is not None and tensor.grad.tolist() == [2.0] * 5
    assert torch.equal(tensor.detach(), before) and tensor._version == version
    assert torch.equal(torch.get_rng_state(), state)


def test_inference_tensors_and_others_may_take_turns():
    with torch.inference_mode():
        inside = measure(torch.ones(10))
    outside = measure(torch.ones(20))
    with torch.inference_mode():
        again = measure(torch.ones(30))
    assert [row and row[2] for row in read_rows([inside, outside, again])] == [10.0, 20.0, 30.0]


def test_nothing_is_read_before_it_is_asked_for(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a value was read")

    for name in ("item", "__float__", "__int__", "__bool__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for tensor in (
            torch.randn(1000),
            torch.tensor([1.0, math.nan]),
            torch.ones(2, dtype=torch.complex64),
        ):
            assert measure(tensor).row is not None
    assert "aten::_local_scalar_dense" not in {event.name for event in profile.events()}


@pytest.mark.parametrize("step", [1, 2])
@on_both_kernels
def test_large_tensors_are_taken_in_pieces(step):
    tensor = torch.zeros(2**11, step * 2**13, dtype=torch.bfloat16)[:, ::step]
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        assert measure(tensor).row is not None
    assert (
        max((event.cpu_memory_usage for event in profile.events()), default=0) < tensor.numel() * 2
    )


@on_both_kernels
def test_only_the_columns_that_are_asked_for_are_computed():
    columns = columns_for(["abs_mean", "sum", "shape"])
    assert columns == ("sum", "magnitudes")
    measured = measure(torch.tensor([1.0, -3.0]), columns)
    assert measured.columns == columns
    assert derive(STATISTICS, read_rows([measured])[0], measured) == {
        "abs_mean": 2.0, "sum": -2.0, "mean": -1.0, "numel": 2, "shape": [2], "dtype": "torch.float32",
    }  # fmt: skip
    assert measure(torch.ones(2), ()).row is None


@on_both_kernels
def test_every_statistic_is_computed_from_its_own_columns_alone():
    tensor = torch.randn(50)
    measured = measure(tensor, COLUMNS)
    whole = derive(STATISTICS, read_rows([measured])[0], measured)
    assert list(whole) == list(STATISTICS)
    for name in STATISTICS:
        measured = measure(tensor, columns_for([name]))
        assert derive([name], read_rows([measured])[0], measured) == {name: whole[name]}


def test_statistics_come_in_the_order_in_which_they_are_asked_for():
    assert list(statistics(torch.ones(3), ("dtype", "max", "abs_mean"))) == [
        "dtype",
        "max",
        "abs_mean",
    ]


def test_rows_come_in_order_with_gaps_where_there_is_none():
    measured = [
        measure(torch.full((3,), float(n)) if n % 3 else torch.empty(3, device="meta"), ("max",))
        for n in range(10)
    ]
    assert [row and row[MAX] for row in read_rows(measured)] == [
        float(n) if n % 3 else None for n in range(10)
    ]
    assert read_rows([]) == []


def test_a_shard_is_measured_without_asking_another_rank(tmp_path):
    run_python(tmp_path, PROGRAMS / "layouts/measure_a_shard.py", OTEL_TORCH_ENABLED="0")


def test_without_torchs_private_guards_the_numbers_are_the_same(monkeypatch):
    from otel_torch import torch_private

    monkeypatch.setattr(torch_private, "_keys", None)
    guarded = _measure_any.__wrapped__
    plain = torch_private.unobserved(guarded)
    tensor = torch.randn(10, requires_grad=True) * 1
    assert plain(tensor, _plan(SCALARS)).row == pytest.approx(measure(tensor).row)


def test_private_names_are_there():
    from otel_torch import torch_private

    assert torch_private._keys is not None
    assert torch_private.graph_task_id() == -1
    ids = []
    tensor = torch.ones(1, requires_grad=True)
    tensor.register_hook(lambda gradient: ids.append(torch_private.graph_task_id()))
    tensor.sum().backward()
    assert ids[0] >= 0


@on_both_kernels
def test_primitives_are_the_rows_columns():
    tensor = torch.tensor([-1.0, 0.0, 3.0])
    measured = measure(tensor)
    assert measured.columns == tuple(name for name in COLUMNS if name not in VECTORS)
    row = read_rows([measured])[0]
    assert row == [-1.0, 3.0, 2.0, 10.0, 4.0, 0.0, 1.0]
    measured = measure(tensor, COLUMNS)
    assert measured.columns == COLUMNS
    wide = [
        histogram(tensor),
        sketch(tensor),
        part_sketches(tensor),
        row_sketch(tensor),
        bit_hash(tensor),
        row_sketches(tensor).flatten(),
    ]
    assert read_rows([measured])[0] == pytest.approx([*row, *torch.cat(wide).tolist()])


def counted(tensor):
    measured = measure(tensor, ("histogram",))
    return derive(["histogram"], read_rows([measured])[0], measured)["histogram"]


def bins(**counts):
    """Return a histogram: `zeros`, `nonfinite`, `below` 2^-40, `above` 2^20, and `e3`, `e_3` for
    2^3 and 2^-3.
    """
    places = {"zeros": 0, "below": 1, "above": 62, "nonfinite": 63}
    wanted = [0] * 64
    for name, count in counts.items():
        wanted[places[name] if name in places else int(name[1:].replace("_", "-")) + 42] = count
    return wanted


@on_both_kernels
def test_a_histogram_counts_magnitudes_by_power_of_two():
    values = [
        0.0,
        -0.0,
        1.0,
        -1.5,
        1.999,
        2.0,
        -4.0,
        0.5,
        2.0**-40,
        2.0**-41,
        5e-324,
        2.0**19,
        2.0**20 - 1,
        2.0**20,
        -1e300,
    ]
    actual = counted(torch.tensor([*values, math.nan, math.inf, -math.inf], dtype=torch.float64))
    assert actual == bins(
        zeros=2, below=2, e_40=1, e_1=1, e0=3, e1=1, e2=1, e19=2, above=2, nonfinite=3
    )
    assert all(type(count) is int for count in actual)


@on_both_kernels
@pytest.mark.parametrize(
    "dtype", [*FLOATS, torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64], ids=str
)
def test_a_histogram_of_any_type_counts_every_element_once(dtype):
    tensor = (torch.randn(3, 50, 7, generator=torch.Generator().manual_seed(1)) * 3).abs().to(dtype)
    actual = counted(tensor.transpose(0, 2)[:, ::2])
    assert sum(actual) == 7 * 25 * 3 and actual == counted(
        tensor[:, ::2].to(torch.complex128).abs()
    )


@on_both_kernels
def test_a_histogram_of_pieces_and_of_ones_own_zeros():
    assert counted(torch.full((3_000_000,), 0.75)) == bins(e_1=3_000_000)
    assert counted(torch.eye(50).to_sparse()) == bins(e0=50, zeros=2450)
    assert counted(torch.zeros(3, 2).to_sparse()) == bins(zeros=6)
    assert counted(torch.empty(0)) == bins()
    assert counted(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])) == bins(e0=5)
    whole = torch.randn(1000)
    assert [
        first_count + second_count
        for first_count, second_count in zip(
            counted(whole[:300]), counted(whole[300:]), strict=True
        )
    ] == counted(whole)
    measured = measure(torch.ones(3, device="meta"), ("histogram",))
    assert derive(["histogram"], None, measured) == {}


def test_a_device_counts_as_the_host_does(monkeypatch):
    tensor = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    wanted = histogram(tensor)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    assert torch.equal(histogram(tensor), wanted)


@pytest.mark.parametrize(
    "special", ((), (math.nan,), (math.inf,), (-math.inf, 0.0, math.nan)), ids=str
)
@pytest.mark.parametrize(
    "dtype", (torch.float32, torch.bfloat16, torch.float64, torch.int64), ids=str
)
def test_a_device_adds_up_as_the_host_does(monkeypatch, dtype, special):
    tensor = (torch.randn(40_000, generator=torch.Generator().manual_seed(0)) * 8).to(dtype)
    tensor[7] = 0
    if dtype.is_floating_point and special:
        tensor[-len(special) :] = torch.tensor(special).to(dtype)
    before, wanted = tensor.clone(), reduce_scalars(tensor, SCALARS)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    for columns in (SCALARS, ("nonfinite",), ("zeros", "magnitudes")):
        asked = [SCALARS.index(name) for name in columns]
        assert reduce_scalars(tensor, columns)[asked].tolist() == pytest.approx(
            wanted[asked].tolist(), rel=1e-12, nan_ok=True
        )
    assert torch.equal(tensor.nan_to_num(1), before.nan_to_num(1))
