"""`otel-torch diff --bitwise`: two runs of one program, equal in every bit or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from otel_torch.cli.main import main
from otel_torch.parity.diff import diff
from otel_torch.statistics.bit_hash import bit_hash
from otel_torch.statistics.measure import measure
from otel_torch.statistics.table import columns_for, derive
from tests.support import run_python

TRAIN = """
import os, torch
place = os.environ.get("PLACE")

def last_bit(tensor):
    return torch.nextafter(tensor, torch.tensor(torch.inf))

class Last(torch.nn.Linear):
    def forward(self, hidden):
        output = super().forward(hidden)
        if step == 2 and place == "forward":
            output.data[0, 3] = last_bit(output.data[0, 3])
        return output

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), Last(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for step in range(4):
    if step == 1 and place == "optimizer":
        model[2].bias.data[5] += 1e-3
    loss = model(torch.ones(2, 8)).square().mean()
    loss.backward()
    if step == 1 and place == "backward":
        model[0].weight.grad[1, 1] = last_bit(model[0].weight.grad[1, 1])
    optimizer.step()
    optimizer.zero_grad()
"""


def record(folder: Path, name: str, **variables: str) -> Path:
    path = folder / f"{name}.jsonl"
    settings = {
        "OTEL_TORCH_CAPTURE": "inputs,outputs,gradients,parameters",
        "OTEL_TORCH_STATS": "hash,shape,dtype",
        "OTEL_TORCH_JSONL": str(path),
    }
    run_python(folder, TRAIN, **settings | variables)
    return path


def hash_of(tensor: torch.Tensor) -> str:
    measured = measure(tensor, columns_for(["hash"]))
    return str(derive(["hash"], measured.row, measured)["hash"])


def test_two_runs_that_are_equal_match(tmp_path: Path) -> None:
    report = diff(record(tmp_path, "first"), record(tmp_path, "second"), bitwise=True)
    assert (report.verdict, report.warnings) == ("match", [])
    assert report.pairs == len((tmp_path / "first.jsonl").read_text().splitlines())


@pytest.mark.parametrize(
    "place, module, tensor, step, phase",
    [
        ("forward", "2", "out", 2, "forward"),
        ("backward", "0", "param_grad.weight", 1, "backward"),
        ("optimizer", "2", "out", 1, "forward"),
    ],
)
def test_the_first_tensor_with_another_bit_is_named(
    place: str, module: str, tensor: str, step: int, phase: str, tmp_path: Path
) -> None:
    reference, port = record(tmp_path, "reference"), record(tmp_path, "port", PLACE=place)
    first = diff(reference, port, bitwise=True).first
    assert first is not None
    assert (first.module, first.tensor, first.step, first.phase) == (module, tensor, step, phase)
    assert (first.port_module, first.port_tensor, first.port_step) == (module, tensor, step)


def test_the_command_says_whether_the_inputs_were_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference, port = record(tmp_path, "reference"), record(tmp_path, "port", PLACE="forward")
    assert main(["diff", "--bitwise", str(reference), str(port)]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "computed other bits from the same recorded inputs" in text
    assert main(["diff", "--bitwise", str(reference), str(port), "--json", "-"]) == 1
    assert json.loads(capsys.readouterr().out)["first"]["error"] is None
    assert main(["diff", "--bitwise", str(reference), str(reference)]) == 0


def test_records_without_a_hash_are_compared_by_their_statistics(tmp_path: Path) -> None:
    stats = {"OTEL_TORCH_STATS": "sum,max,shape"}
    reference = record(tmp_path, "reference", **stats)
    port = record(tmp_path, "port", PLACE="forward", **stats)
    report = diff(reference, port, bitwise=True)
    assert report.first is not None and report.first.step == 2
    assert "have no hash" in report.warnings[0]


def test_rows_in_another_order_and_missing_rows_are_still_compared(tmp_path: Path) -> None:
    reference = record(tmp_path, "reference")
    lines = reference.read_text().splitlines()
    port = tmp_path / "port.jsonl"
    port.write_text("\n".join(lines[:0:-1]) + "\n")
    report = diff(reference, port, bitwise=True)
    assert (report.verdict, report.pairs) == ("partial", len(lines) - 1)
    assert "1 record of the reference without a counterpart, of 1 tensor" in report.reason
    assert len(report.unpaired["reference"]) == 1 and not report.unpaired["port"]


def test_tolerances_and_maps_make_no_sense_bit_by_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(record(tmp_path, "run"))
    assert main(["diff", "--bitwise", "--rtol", "1e-3", path, path]) == 2
    assert "leave out --noise, --golden, --rtol" in capsys.readouterr().err


# -- the hash

KINDS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_every_changed_element_changes_the_hash(dtype: torch.dtype) -> None:
    zeros = torch.zeros(300_000, dtype=torch.float32).to(dtype)
    hashes = {hash_of(zeros)}
    places = (0, 1, 299_999, 2**18 - 1, 2**18)
    for place in places:
        changed = zeros.clone()
        changed[place] = torch.ones((), dtype=torch.float32).to(dtype)
        hashes.add(hash_of(changed))
    assert len(hashes) == 1 + len(places)
    assert all(len(text) == 16 for text in hashes)


def test_the_hash_does_not_depend_on_strides_or_threads() -> None:
    tensor = torch.randn(700, 900)
    strided = tensor.t().contiguous().t()
    assert hash_of(strided) == hash_of(tensor) != hash_of(tensor.t())
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert hash_of(tensor) == hash_of(strided)
    finally:
        torch.set_num_threads(threads)


def test_the_hash_tells_zeros_and_nans_apart() -> None:
    assert hash_of(torch.tensor([0.0])) != hash_of(torch.tensor([-0.0]))
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert hash_of(nans[:1]) != hash_of(nans[1:])


def test_the_hash_follows_its_formula() -> None:
    bits = [3, -1, 2**31 - 1]
    total = 0
    for position, number in enumerate(bits, 1):
        mixed = position * 0x9E3779B97F4A7C15 % 2**64
        # the shifts are those of signed integers
        signed = mixed - 2**64 * (mixed >> 63)
        mixed = (signed ^ signed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        signed = mixed - 2**64 * (mixed >> 63)
        total += number * ((signed ^ signed >> 27) | 1)
    assert hash_of(torch.tensor(bits, dtype=torch.int32)) == f"{total % 2**64:016x}"
    assert bit_hash(torch.zeros(0)).tolist() == [0, 0, 0]
