"""A model that only ever runs inside a compiled function has the records of an eager one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.support import PROGRAMS, lines, run_python

PROGRAM = PROGRAMS / "compile_functions.py"
WHOLE = ("a", "b", "")
# the modules that each way calls, and how often in a forward
WAYS = {
    # first: after another way's evaluation the teacher, which runs first, would belong to that
    "two_models": (WHOLE, 1),
    "function": (WHOLE, 1),
    "argument": (WHOLE, 1),
    "loop": (WHOLE, 3),
    "method_of_model": (("a",), 1),
    "method_of_trainer": (WHOLE, 1),
    "step": (WHOLE, 1),
}


def test_models_in_compiled_functions_are_recorded(tmp_path: Path) -> None:
    """The compiler is imported while recording, as in a user's program, so that is not forked."""
    bare = run_python(tmp_path, PROGRAM, *WAYS, OTEL_TORCH_ENABLED="0")
    done = run_python(tmp_path, PROGRAM, *WAYS, fresh=True)
    assert bare.stdout == done.stdout
    calls = Counter(
        (row["model"], row["module"], row["step"], row["phase"])
        for row in lines(tmp_path / "run.jsonl")
        if row["tensor"] == "out"
    )
    expected = {
        (f"Net_{way}", module, step, "forward" if step < 3 else "eval"): count
        for way, (modules, count) in WAYS.items()
        for module in modules
        for step in range(3 if way == "step" else 4)
    }
    expected |= {("Teacher", module, step, "forward"): 1 for module in WHOLE for step in range(4)}
    assert calls == expected
    assert "no model was seen" not in done.stderr
