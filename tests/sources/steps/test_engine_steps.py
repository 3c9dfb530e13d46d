"""An engine that serves a model: all that runs in one engine step has its step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support import PROGRAMS, lines, run_python

ENGINE = PROGRAMS / "engine"


def serve(tmp_path: Path, **settings: str) -> list[dict[str, Any]]:
    run_python(tmp_path, ENGINE / "serve.py", PYTHONPATH=str(ENGINE), **settings)
    return lines(tmp_path / "run.jsonl")


def test_logits_and_sampler_have_the_step_of_the_engine(tmp_path: Path) -> None:
    places: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for row in serve(tmp_path):
        places.setdefault((row["model"], row["module"]), []).append((row["step"], row["phase"]))
    served = [(step, "forward") for step in range(4)]
    assert places == {
        ("LanguageModel", ""): [(0, "warmup"), *served],
        ("LanguageModel", "model"): [(0, "warmup"), *served],
        ("LanguageModel", "logits_processor"): served,
        ("Sampler", ""): [(0, "warmup"), *served, (4, "forward")],
    }


def test_the_tokens_of_a_step_are_those_of_the_scheduler(tmp_path: Path) -> None:
    rows = serve(tmp_path, OTEL_TORCH_CAPTURE="tokens", OTEL_TORCH_TOKEN_IDS="1")
    tokens = {
        (row["model"], row["step"], row["call"]): (row["ids"], row["positions"], row["requests"])
        for row in rows
        if row["tensor"] == "tokens"
    }
    whole = [
        ([1, 2, 0, 0, 0], [0, 1, -1, -1, -1], [0, 0, -1, -1, -1]),
        ([3, 4, 5, 6, 0], [2, 0, 1, 2, -1], [0, 1, 1, 1, -1]),
        ([7, 1, 0, 0, 0], [3, 3, -1, -1, -1], [1, 0, -1, -1, -1]),
        ([2, 3], [0, 4], [2, 0]),
    ]
    last = [([2], [1], [0]), ([3, 6], [2, 2], [0, 1]), ([7, 1], [3, 3], [1, 0]), whole[3]]
    assert tokens == {
        **{("LanguageModel", step, 0): whole[step] for step in range(4)},
        **{("LanguageModel", step, 1): last[step] for step in range(4)},
        **{("Sampler", step, 0): last[step] for step in range(4)},
    }
