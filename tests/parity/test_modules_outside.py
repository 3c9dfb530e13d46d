"""`diff` on models that keep modules outside the tree: in a list, a dict, a closure, a partial, or
made in each forward.

Such a module is a model by itself, and its calls still belong to the forward that makes them.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import otel_torch
from otel_torch import recorder
from otel_torch.parity.forwards import iterate_forwards
from otel_torch.parity.recording_source import RecordingSource
from otel_torch.recording.row_batches import RowKinds
from tests.parity.small_models import WIDTH, Reference
from tests.support import recording_to

Tensor = torch.Tensor
Norms = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


class Attention(nn.Module):
    """Attention with two norms, held as `holder` says."""

    def __init__(self, holder: str) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(WIDTH, WIDTH) for _ in range(4)
        )
        self.scale = 1.0
        q, k = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        for norm in (q, k):  # weights of ones would be equal
            nn.init.normal_(norm.weight, 1.0, 0.2)
        self.outside = q, k
        if holder == "tree":
            self.q_norm, self.k_norm = q, k
        self.norms = HOLDERS[holder](q, k)

    def forward(self, x: Tensor) -> Tensor:
        q_norm, k_norm = self.norms()
        q, k = q_norm(self.q_proj(x)), k_norm(self.k_proj(x))
        return self.o_proj(scaled_dot_product_attention(self.scale * q, k, self.v_proj(x)))


def _in_list(q: nn.Module, k: nn.Module) -> Callable[[], Norms]:
    norms = [q, k]
    return lambda: (norms[0], norms[1])


def _in_dict(q: nn.Module, k: nn.Module) -> Callable[[], Norms]:
    norms = {"q": q, "k": k}
    return lambda: (norms["q"], norms["k"])


def _in_closures(q: nn.Module, k: nn.Module) -> Callable[[], Norms]:
    return lambda: (lambda x: q(x), lambda x: k(x))


def _in_partials(q: nn.Module, k: nn.Module) -> Callable[[], Norms]:
    return lambda: (functools.partial(q), functools.partial(k))


def _made_in_forward(q: nn.Module, k: nn.Module) -> Callable[[], Norms]:
    def make(weight: Tensor) -> nn.Module:
        norm = nn.RMSNorm(WIDTH)
        norm.weight = nn.Parameter(weight)
        return norm

    return lambda: (make(q.weight), make(k.weight))


HOLDERS = {
    "tree": _in_list, "list": _in_list, "dict": _in_dict, "closure": _in_closures,
    "partial": _in_partials, "made": _made_in_forward,
}  # fmt: skip


def model_with(holder: str) -> Reference:
    torch.manual_seed(0)
    return Reference(lambda: Attention(holder)).eval()


def record(path: Path, model: nn.Module, **settings: str) -> Path:
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    with recording_to(path, **settings):
        for step in range(2):
            model(x + step)
    return path


def without(path: Path, *fields: str) -> Path:
    """Remove fields from all rows of a recording."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [{name: row[name] for name in row if name not in fields} for row in rows]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in kept))
    return path


SIDES = [
    ("tree", "list"), ("list", "tree"), ("dict", "dict"), ("closure", "closure"),
    ("tree", "closure"), ("partial", "tree"), ("tree", "made"), ("made", "made"), ("made", "list"),
]  # fmt: skip
CASES = [(sides, ()) for sides in SIDES] + [
    (sides, removed)
    for sides in (("tree", "list"), ("closure", "closure"), ("made", "tree"))
    for removed in (("parent",), ("order", "parent"))
]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that records a model once, and gives the folder of the recording."""

    @functools.cache
    def record_once(holder: str, flush_interval_s: float, scale: float = 1.0) -> Path:
        model = model_with(holder)
        model.blocks[1].attention.scale = scale
        folder = tmp_path_factory.mktemp("recorded")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recorder, "FLUSH_INTERVAL_S", flush_interval_s)
            record(folder / "run.jsonl", model)
        return folder

    return record_once


@pytest.mark.parametrize("flush_interval_s", [float("inf"), 0.0], ids=["fast", "slow"])
@pytest.mark.parametrize(
    "sides, removed",
    CASES,
    ids=[f"{'-'.join(sides)} {' '.join(removed)}" for sides, removed in CASES],
)
def test_modules_outside_the_tree_do_not_cut_a_forward(
    tmp_path: Path,
    recorded: Callable[..., Path],
    sides: tuple[str, str],
    removed: tuple[str, ...],
    flush_interval_s: float,
) -> None:
    """A slow model's rows are written whenever any model returns: calls are still running then."""

    def recording(name: str, holder: str, scale: float = 1.0) -> Path:
        shutil.copytree(recorded(holder, flush_interval_s, scale), tmp_path / name)
        return without(tmp_path / name / "run.jsonl", *removed)

    recordings = [
        recording(name, side) for name, side in zip(("reference", "port"), sides, strict=True)
    ]
    for path in recordings:
        assert len(list(iterate_forwards(RecordingSource(path), RowKinds()))) == 2
    clean = otel_torch.diff(*recordings)
    assert (clean.verdict, clean.introduced) == ("match", [])
    assert clean.pairs > 160
    assert not [warning for warning in clean.warnings if "no counterpart" in warning]

    bugged = recording("bugged", sides[1], scale=1.5)
    module = "blocks.1.attention.o_proj"
    assert [
        (found.side, found.module, found.port_side, found.port_module)
        for found in otel_torch.diff(recordings[0], bugged).introduced
    ] == [("input", module, "input", module)]


def test_a_fault_in_a_module_outside_the_tree_is_named_in_both_programs(tmp_path: Path) -> None:
    port = model_with("list")
    with torch.no_grad():
        port.blocks[1].attention.outside[1].weight.mul_(1.5)
    report = otel_torch.diff(
        record(tmp_path / "reference.jsonl", model_with("tree")),
        record(tmp_path / "port.jsonl", port),
    )
    first = report.first
    assert first is not None
    assert (first.kind, first.module) == ("weights", "blocks.1.attention.k_norm")
    assert (first.port_model, first.port_module) == ("RMSNorm#4", "")


def test_models_that_run_one_after_the_other_stay_forwards_of_their_own(tmp_path: Path) -> None:
    """An encoder, two steps of a model and a decoder, recorded without calls."""
    encoder, model, decoder = nn.Linear(8, 8), model_with("list"), nn.Sequential(nn.Linear(8, 4))
    path = tmp_path / "run.jsonl"
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    with recording_to(path):
        x = encoder(x)
        for _ in range(2):
            x = model(x)
        decoder(x)
    source = RecordingSource(without(path, "order", "parent"))
    forwards = list(iterate_forwards(source, RowKinds()))
    assert [(forward.model, forward.step) for forward in forwards] == [
        ("Linear", 0), ("Reference", 0), ("Reference", 1), ("Sequential", 0),
    ]  # fmt: skip
