"""Runs attacks until its time is over: `make chaos SECONDS=600 SEED=1 ATTACK=kill`.

    python -m tests.chaos [--seconds N] [--seed N] [--attack NAME] [--json FILE]

Every attempt has a seed of its own, which repeats it: `make chaos SEED=7.12 ATTACK=kill`. The folders of
failed attempts stay. Exit status: 0 if every promise was kept, else 1.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.chaos.arena import Arena, BrokenPromise
from tests.chaos.attacks import ATTACKS, folder_of
from tests.interpreters import heed_signals


def attempt(name: str, seed: str, folder: Path) -> str:
    """Run one attack; return what was not kept, or ""."""
    folder.mkdir(parents=True)
    arena = Arena(folder, f"{name} {seed}")
    try:
        ATTACKS[name](arena)
    except BrokenPromise as broken:
        return str(broken)
    arena.clear()
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", default=str(random.randrange(10**6)))
    parser.add_argument("--attack", choices=ATTACKS, help="only this one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was tried there")
    arguments = parser.parse_args()
    heed_signals()
    names = [arguments.attack] if arguments.attack else list(ATTACKS)
    root = Path(tempfile.mkdtemp(prefix="chaos-"))
    is_repeated = "." in arguments.seed
    print(f"chaos: seed {arguments.seed}, {arguments.seconds:g} s, in {root}", flush=True)
    tried: Counter[str] = Counter()
    broken: Counter[str] = Counter()
    deadline, number = time.monotonic() + arguments.seconds, 0
    while number == 0 or (time.monotonic() < deadline and not is_repeated):
        name = names[number % len(names)]
        seed = arguments.seed if is_repeated else f"{arguments.seed}.{number}"
        folder = folder_of(name, number, root)
        problem = attempt(name, seed, folder)
        tried[name] += 1
        number += 1
        if problem:
            broken[name] += 1
            print(f"BROKEN {name}: {problem}\n  again: make chaos SEED={seed} ATTACK={name}"
                  f"\n  its folder: {folder}", flush=True)  # fmt: skip
    for name in names:
        print(f"{name:<20} {tried[name]:>5} tried, {broken[name]} broken")
    if arguments.json:
        arguments.json.write_text(json.dumps({"tried": tried, "broken": broken}) + "\n")
    if not broken:
        root.rmdir()
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
