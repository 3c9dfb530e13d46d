"""An engine that serves a model: all that runs in one engine step has its step."""

from __future__ import annotations

from pathlib import Path

from tests.support import PROGRAMS, lines, run_python


def test_logits_and_sampler_have_the_step_of_the_engine(tmp_path: Path) -> None:
    engine = PROGRAMS / "engine"
    run_python(tmp_path, engine / "serve.py", PYTHONPATH=str(engine))
    rows = lines(tmp_path / "run.jsonl")
    places = {}
    for row in rows:
        places.setdefault((row["model"], row["module"]), []).append((row["step"], row["phase"]))
    served = [(step, "forward") for step in range(4)]
    assert places == {
        ("LanguageModel", ""): [(0, "warmup"), *served],
        ("LanguageModel", "model"): [(0, "warmup"), *served],
        ("LanguageModel", "logits_processor"): served,
        ("Sampler", ""): [*served, (4, "forward")],
    }
