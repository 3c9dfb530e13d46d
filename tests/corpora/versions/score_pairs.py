"""Scores pairs of versions: python -m tests.corpora.versions.score_pairs FOLDER [--only NAME]

FOLDER receives the packages (pip), environments and runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.corpora.versions.pairs import PAIRS, VersionPair
from tests.corpora.versions.tiny_environments import install, make_environment

# what some packages need and the shared environment has not
_NEEDED = {
    "kornia": ["kornia_rs"],
    "transformers": [
        "httpx==0.28.1",
        "httpcore==1.0.9",
        "tokenizers==0.22.2",
        "huggingface_hub==1.33.0",
    ],
}
_MOST_RUNS = 12


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    for pair in PAIRS:
        if options.only in pair.name:
            print(json.dumps(score(pair, options.folder.resolve())), flush=True)


def score(pair: VersionPair, folder: Path) -> dict[str, Any]:
    """Run both versions, and return whether the answer is right."""
    place = folder / pair.name.replace(" ", "-")
    place.mkdir(parents=True, exist_ok=True)
    (place / "train.py").write_text(pair.program)
    needed = [install(name, folder) for name in _NEEDED.get(pair.old.partition("==")[0], ())]
    pythons = [
        make_environment(place / side, [install(own, folder), *needed])
        for side, own in (("a", pair.old), ("b", pair.new))
    ]
    answer = bisect(pythons, place)
    changes = answer["changes"]
    named = {own["name"].partition(f"{_module(own)}.")[2] for own in changes}
    runs = len(answer["runs"]) + len(answer["failed"])
    if pair.right:
        is_right = answer["healed"] and bool(named) and named <= pair.right and runs <= _MOST_RUNS
    else:
        is_right = answer["verdict"] == "match"
    return {
        "name": pair.name,
        "versions": f"{pair.old} → {pair.new}",
        "is_right": is_right,
        "right": sorted(pair.right),
        "named": sorted(named),
        "healed": answer["healed"],
        "verdict": answer["verdict"],
        "reason": answer["reason"],
        "runs": runs,
        "candidates": answer["candidates"],
        "failed": answer["failed"],
    }


def _module(change: dict[str, Any]) -> str:
    side = change["port"] or change["reference"]
    return "" if side is None else Path(side["file"]).stem


def bisect(pythons: list[Path], folder: Path) -> dict[str, Any]:
    """Return the answer of the command as an object."""
    command = [sys.executable, "-m", "otel_torch", "bisect", "--json", "-", "--out", "runs"]
    command += ["--python-a", str(pythons[0]), "--python-b", str(pythons[1]), "--", "train.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    (folder / "stderr.txt").write_text(done.stderr)
    if not done.stdout:
        raise RuntimeError(done.stderr)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


if __name__ == "__main__":
    main()
