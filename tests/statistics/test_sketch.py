"""The sketch estimates the distance of tensors, adds up over parts, and never changes."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from otel_torch.statistics.sketch import PIECE, prepare_tables, row_sketch, sketch
from otel_torch.statistics.sketch_format import FREQUENCIES, SIZE, encode
from tests.support import PROGRAMS, run_ranks

TRIALS = 200


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(actual, expected, rtol=1e-9, atol=1e-9 * float(expected.norm() + 1e-30))


def dense(difference: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    return difference.normal_(generator=chance)


def bias(difference: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    return difference.add_(torch.randn(difference.shape[-1], generator=chance))


def constant(difference: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    return difference.add_(torch.randn(1, generator=chance))


def one_channel(difference: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    channel = int(torch.randint(difference.shape[-1], (1,), generator=chance))
    difference[..., channel] = torch.randn(difference.shape[:-1], generator=chance)
    return difference


def constant_in_one_channel(difference: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    difference[..., int(torch.randint(difference.shape[-1], (1,), generator=chance))] = 1.0
    return difference


def one_token(difference: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    difference[0, int(torch.randint(difference.shape[1], (1,), generator=chance))].normal_(
        generator=chance
    )
    return difference


def rolled(difference: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    values = torch.randn(difference.shape, generator=chance)
    return values - values.roll(int(torch.randint(1, 7, (1,), generator=chance)), 1)


FAULTS = [dense, bias, constant, one_channel, constant_in_one_channel, one_token, rolled]
SHAPES = [(1, 96, 512), (2, 33, 129), (1, 300, 1024)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_distance_of_sketches_estimates_the_distance_of_tensors(
    fault: Callable[..., torch.Tensor], shape: tuple[int, ...]
):
    """The error is within 20 % from the 5th to the 95th percentile for any kind of difference."""
    ratios = []
    chance = generator(sum(shape))
    for _ in range(TRIALS // 4 if math.prod(shape) > 100_000 else TRIALS):
        reference = torch.randn(shape, generator=chance)
        difference = fault(torch.zeros(shape), chance)
        changed = reference + difference.mul_(1e-3 * float(reference.norm() / difference.norm()))
        ratios.append(
            float(
                (sketch(changed) - sketch(reference)).norm()
                / (changed.double() - reference.double()).norm()
            )
        )
    low, middle, high = torch.tensor(ratios).quantile(torch.tensor([0.05, 0.5, 0.95])).tolist()
    assert 0.8 < low < high < 1.2 and 0.93 < middle < 1.07, (low, middle, high)


@pytest.mark.parametrize("numel", [1, 2, 5, 17, 64])
def test_tiny_tensors_too(numel: int):
    chance = generator(numel)
    ratios = [
        float(sketch(x).norm() / x.norm())
        for x in (torch.randn(numel, generator=chance) for _ in range(TRIALS))
    ]
    low, high = torch.tensor(ratios).quantile(torch.tensor([0.05, 0.95])).tolist()
    assert 0.8 < low <= high < 1.2


def test_large_tensors_of_which_all_pieces_are_alike():
    """Signs repeat in pieces of 1021 x 128 elements; equal pieces must not add up."""
    ratios = []
    for seed in range(12):
        piece = torch.randn(1021 * 128, generator=generator(seed))
        whole = piece.repeat(20)
        ratios.append(float(sketch(whole).norm() / whole.norm()))
    assert 0.85 < sum(ratios) / len(ratios) < 1.15 and max(ratios) < 1.35 and min(ratios) > 0.65, (
        ratios
    )


def test_a_sketch_is_linear():
    first, second = (
        torch.randn(3, 50_000, generator=generator(0)),
        torch.randn(3, 50_000, generator=generator(1)),
    )
    assert close(
        sketch(2 * first.double() - 3 * second.double()), 2 * sketch(first) - 3 * sketch(second)
    )
    assert close(
        row_sketch(2 * first.double() - 3 * second.double()),
        2 * row_sketch(first) - 3 * row_sketch(second),
    )


def test_parts_add_up_to_the_whole_by_their_positions():
    whole = torch.randn(400_000, generator=generator(2))
    cuts = [0, 1, 1021, 130_688, 130_700, 262_000, 400_000]
    parts = [sketch(whole[start:end], start) for start, end in pairwise(cuts)]
    assert close(sum(parts[1:], parts[0]), sketch(whole))
    matrix = torch.randn(700, 300, generator=generator(3))
    rows = [row_sketch(matrix[start:end], start) for start, end in ((0, 1), (1, 250), (250, 700))]
    assert close(sum(rows[1:], rows[0]), row_sketch(matrix))


@pytest.mark.parametrize("kind", [sketch, row_sketch], ids=lambda kind: kind.__name__)
def test_parts_of_complex_tensors_add_up_too(kind: Callable[..., torch.Tensor]):
    whole = torch.randn(90, 700, 2, generator=generator(4)).view(90, 1400)[:, :1400]
    whole = torch.view_as_complex(whole.reshape(90, 700, 2).contiguous())
    start = 30 if kind is row_sketch else 30 * 700
    assert close(kind(whole[:30]) + kind(whole[30:], start), kind(whole))


RANKS = PROGRAMS / "layouts/sketch_distributed_tensors.py"


def test_shards_of_two_ranks_add_up(tmp_path: Path):
    run_ranks(tmp_path, RANKS, OTEL_TORCH_ENABLED="0")


def test_views_agree_and_other_orders_do_not():
    heads = torch.randn(2, 17, 4, 8, generator=generator(5))
    assert torch.equal(sketch(heads), sketch(heads.reshape(2, 17, 32)))
    assert torch.equal(sketch(heads), sketch(heads.reshape(-1)))
    moved = heads.transpose(1, 2).contiguous()
    assert torch.equal(
        sketch(moved.transpose(1, 2)), sketch(heads)
    )  # where memory has another order, the logical one counts
    for other in (moved, heads.flip(1), heads.roll(1, -1), -heads):
        distance = float((sketch(other) - sketch(heads)).norm() / sketch(heads).norm())
        assert 1.0 < distance < 2.5


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool],
    ids=str,
)
def test_every_type_is_sketched_by_its_numbers(dtype: torch.dtype):
    values = (torch.randn(40, 30, generator=generator(6)) * 3).abs().to(dtype)
    wanted = torch.cat([sketch(values.double()), row_sketch(values.double())])
    assert torch.equal(torch.cat([sketch(values), row_sketch(values)]), wanted)
    strided = values[::2, 1::3]
    assert torch.equal(sketch(strided), sketch(strided.contiguous()))
    assert close(row_sketch(strided), row_sketch(strided.contiguous()))


def test_complex_numbers_count_as_pairs():
    values = torch.randn(6, 5, 2, generator=generator(7))
    assert torch.equal(sketch(torch.view_as_complex(values)), sketch(values))
    assert torch.equal(row_sketch(torch.view_as_complex(values)), row_sketch(values))
    conjugate = torch.view_as_complex(values).conj()
    assert torch.equal(sketch(conjugate), sketch(values * torch.tensor([1.0, -1.0])))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), ()], ids=str)
def test_nothing_and_a_single_number(shape: tuple[int, ...]):
    values = torch.ones(shape)
    for kind in (sketch, row_sketch):
        actual = kind(values)
        assert actual.shape == (SIZE,) and actual.dtype == torch.float64
        assert torch.equal(
            actual,
            kind(torch.ones(1)) if values.numel() else torch.zeros(SIZE, dtype=torch.float64),
        )
    assert row_sketch(torch.tensor(1j)).shape == (SIZE,)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_every_number_so(bad: float):
    values = torch.ones(5, 400)
    values[3, 7] = bad
    assert not sketch(values).isfinite().any()
    assert not row_sketch(values).isfinite().any()


def test_a_row_sketch_of_a_fused_weight_follows_from_its_parts():
    """The rows before a part rotate its phases, which tells the parts and their order."""
    from otel_torch.statistics.sketch_format import TURNS

    def turned(rows: int, part: torch.Tensor) -> torch.Tensor:
        actual = row_sketch(part)
        turns = torch.polar(
            torch.ones(FREQUENCIES).double(),
            2 * math.pi * (rows * torch.tensor(TURNS).double()).frac(),
        )
        turned = torch.complex(actual[:FREQUENCIES], actual[FREQUENCIES:]) * turns
        return torch.cat([turned.real, turned.imag])

    query, key, value = (torch.randn(rows, 24, generator=generator(rows)) for rows in (16, 8, 9))
    fused = row_sketch(torch.cat((query, key, value)))
    assert close(turned(0, query) + turned(16, key) + turned(24, value), fused)
    assert not torch.allclose(
        turned(0, query) + turned(16, value) + turned(25, key), fused, rtol=0.1
    )
    bias = torch.randn(33, generator=generator(9))
    assert close(row_sketch(bias[:16]) + turned(16, bias[16:]), row_sketch(bias))


def test_text_is_base64_of_little_endian_float32():
    numbers = [1.5, -2.0, math.nan, math.inf, 1e-40]
    assert base64.b64decode(encode(numbers)) == struct.pack("<5f", *numbers)
    assert len(encode(sketch(torch.ones(3)).tolist())) == 344


def test_numbers_beyond_float32_are_infinite_and_lose_no_record():
    assert base64.b64decode(encode([1e39, -1e300])) == struct.pack("<2f", math.inf, -math.inf)


# of [1, 2, 3] and of 1..6 as (3, 2), times 8: sums of signs
LITERAL = """
-2 -4 0 6 0 -4 -2 0 0 -2 0 0 0 2 0 2 0 0 2 -6 -6 0 0 0 0 6 -2 6 6 -6 -6 -2 0 0 -2 0 4 4 2 0
-6 2 2 2 6 -4 2 -2 -2 -4 4 6 0 0 2 0 2 -2 -4 2 -4 2 6 0
"""
LITERAL_ROWS = """
8.52713 4.089144 0.106403 -18.366339 -6.321355 8.434584 -20.891732 1.471571 2.893439
-6.608683 -3.949935 8.50013 8.554743 8.327246 -5.569594 7.494222 8.458952 -20.985977
4.729498 -17.881411 -6.959648 7.462736 -6.894448 7.829109 -18.995657 -1.5572 0.98436
3.023009 7.899072 -2.524788 6.495819 4.701306 -4.275805 -5.08385 15.20836 8.929585
-2.797272 -1.808659 -1.886452 -6.173329 13.744186 2.148606 -16.146543 -2.330175 -3.672002
1.20915 -16.195681 1.235469 -4.946082 0.679915 12.246945 -9.63661 0.699459 -8.388912
-1.128426 -0.471166 -7.872763 -6.245104 -6.266973 5.655711 7.303301 -5.998045 -10.122496
-4.660576
"""
FAR = "++-+++-+-+-+++-+++---++++---+--+---++++-+++----++++--++++-+++---"


def test_signs_are_the_same_for_ever():
    """Recordings of today are compared with those of later versions and other devices, so these
    literals never change.
    """
    assert [round(number * 8, 9) for number in sketch(torch.tensor([1.0, 2.0, 3.0])).tolist()] == [
        int(number) for number in LITERAL.split()
    ]
    rows = row_sketch(torch.arange(1.0, 7.0).reshape(3, 2)).tolist()
    assert rows == pytest.approx([float(number) for number in LITERAL_ROWS.split()], abs=1e-6)


def test_shifts_of_far_pieces_are_the_same_for_ever():
    far = sketch(torch.tensor([1.0]), 130_688 * 3 + 5) * 8
    assert "".join("+" if number > 0 else "-" for number in far.tolist()) == FAR
    assert torch.equal(far.abs(), torch.ones(SIZE, dtype=torch.float64))


@pytest.fixture
def four_at_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what has pieces taken four at a time, as a device does."""
    return lambda: monkeypatch.setattr("otel_torch.statistics.sketch._at_once", lambda values: 4)


LENGTHS = (PIECE - 1, 2 * PIECE, 5 * PIECE + 4321)


@pytest.mark.parametrize("numel", LENGTHS)
@pytest.mark.parametrize("start", (0, 1, 3 * PIECE, (2**14 - 3) * PIECE, 2**15 * PIECE))
def test_the_pieces_that_a_device_takes_at_once_are_those_of_a_cpu(
    four_at_once: Callable[[], None], numel: int, start: int
):
    values = torch.randn(numel, generator=generator(numel))
    expected = sketch(values, start)
    four_at_once()
    assert close(sketch(values, start), expected)


@pytest.mark.parametrize("numel", LENGTHS)
@pytest.mark.parametrize("start", (0, 1))
def test_the_rows_that_a_device_takes_at_once_are_those_of_a_cpu(
    four_at_once: Callable[[], None], numel: int, start: int
):
    values = torch.randn(numel, 1, generator=generator(numel))
    expected = row_sketch(values, start)
    four_at_once()
    assert close(row_sketch(values, start), expected)


def test_a_device_is_asked_for_nothing_once_its_tables_are_there(
    four_at_once: Callable[[], None], monkeypatch: pytest.MonkeyPatch
):
    four_at_once()
    values = torch.randn(3 * PIECE)
    prepare_tables(values.device)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError(
            "numbers of the host are sent to the device, which makes the program wait"
        )

    for name in ("tensor", "frombuffer", "as_tensor"):
        monkeypatch.setattr(torch, name, refuse)
    assert sketch(values).isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_has_the_sketch_of_the_host_and_is_not_waited_for():
    values = torch.randn(70 * PIECE + 4321)
    device = values.cuda()
    prepare_tables(device.device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = sketch(device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert close(actual.cpu(), sketch(values))
