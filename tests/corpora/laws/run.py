"""Runs one training of the corpus: `python run.py MODULE NAME [--watch]`."""

import importlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))


def main(module: str, name: str, *options: str) -> None:
    import torch

    torch.manual_seed(0)
    if "--watch" not in options:
        getattr(importlib.import_module(module), name)()
        return
    from tests.corpora.laws.watch import Watch

    with Watch() as watch:
        getattr(importlib.import_module(module), name)()
    changed = any(parameter.changed for parameter in watch.parameters.values())
    facts = {"rank": watch.rank_facts(), "changed": changed, "laws": watch.laws()}
    # one write: torchrun's ranks share an unbuffered stream
    sys.stdout.write(f"WATCHED {json.dumps(facts)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
