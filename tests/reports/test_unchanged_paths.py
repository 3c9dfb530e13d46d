"""Programs that a recording must not lead another way, and whose parts it must not miss."""

from __future__ import annotations

from pathlib import Path

from tests.reports.sides import PROGRAMS, compare, record
from tests.support import lines, metadata, run_python


def test_an_encoder_layer_makes_of_padding_what_it_makes_bare(tmp_path: Path) -> None:
    program = PROGRAMS / "padded_encoder" / "prog.py"
    bare = run_python(tmp_path, program, OTEL_TORCH_ENABLED="").stdout
    recorded = run_python(
        tmp_path, program, OTEL_TORCH_CAPTURE="parity", OTEL_TORCH_JSONL=str(tmp_path / "r.jsonl")
    )
    assert recorded.stdout == bare and not bare.startswith("0 ")
    assert recorded.stderr.count("does not call the modules inside it") == 1
    assert "something inside TransformerEncoderLayer produced it from finite" in recorded.stderr
    assert "after its modules had returned" not in recorded.stderr
    modules = metadata(tmp_path / "r.jsonl")["models"]["TransformerEncoderLayer"]["table"]
    called = {line["module"]: line["called"] for line in modules}
    assert called[""] and not called["linear1"] and not called["self_attn"]


def test_modules_in_a_plain_object_are_recorded_where_they_are_held(tmp_path: Path) -> None:
    rows = lines(record(tmp_path, "plain_list", "ref"))
    outputs = [(row["model"], row["module"]) for row in rows if row["tensor"] == "out"]
    assert outputs == [
        ("Net", "prepare.steps.0"), ("Net", "prepare.steps.1"), ("Net", "conv"), ("Net", ""),
    ]  # fmt: skip


def test_a_fault_in_such_a_module_is_found_there(tmp_path: Path) -> None:
    answer = compare(tmp_path, "plain_list")
    assert answer.status == 1
    assert (answer.first["module"], answer.first["side"]) == ("prepare.steps.1", "output")
