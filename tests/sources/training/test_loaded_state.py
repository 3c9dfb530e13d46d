"""Weights that are loaded into sharded parameters, which have no memory of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import PROGRAMS, metadata, run_python


@pytest.mark.parametrize(("arguments", "broken"), [((), []), (("again",), ["state_not_continued"])])
def test_a_sharded_state_is_read(
    tmp_path: Path, arguments: tuple[str, ...], broken: list[str]
) -> None:
    program = PROGRAMS / "training/load_a_sharded_state.py"
    run_python(tmp_path, program, *arguments, OTEL_TORCH_ENABLED="1", OTEL_TORCH_JSONL="r.jsonl")
    laws = metadata(tmp_path / "r.jsonl").get("broken_laws", [])
    assert [law["law"] for law in laws] == broken
