"""The scoreboard: how often the comparison names a known fault, and is silent about clean pairs.

    python -m tests.corpora [CORPUS …] [--only WORD] [--variant fp32] [--seed N] [--apart]
        [--engine graph] [--keep FOLDER] [--file FILE | --page] [--sample]
    python -m tests.corpora machine --draw COUNT [--seed N]

Without a corpus it runs all, each in a process of its own; an environment that lacks the framework
of a corpus says so. `--page` keeps the scores and writes the tables of the pages of scores in `docs/`.
`--engine graph` records every operation, and grades the line.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from tests.corpora import AS_GRAPHS, CORPORA, corpus_of
from tests.corpora.case import BISECT, ENGINES, GRAPH, MODULES


def main() -> None:
    arguments = argparse.ArgumentParser(
        prog="python -m tests.corpora", description="Score the comparison on known faults."
    )
    arguments.add_argument("corpora", nargs="*", metavar="CORPUS", help=f"of {', '.join(CORPORA)}")
    arguments.add_argument("--only", default="", help="only cases with this in their name")
    arguments.add_argument("--variant", action="append", default=[], help="default: all")
    arguments.add_argument(
        "--seed", type=int, default=0, help="of weights and inputs, or of --draw"
    )
    arguments.add_argument("--apart", action="store_true", help="each program in its own process")
    arguments.add_argument(
        "--engine", choices=ENGINES, default=MODULES, help="what is recorded and compared"
    )
    arguments.add_argument("--keep", type=Path, help="folder that keeps the recordings")
    arguments.add_argument("--draw", type=int, metavar="COUNT", help="new faults for each pair")
    arguments.add_argument("--file", type=Path, help="write the scores to this file")
    arguments.add_argument("--page", action="store_true", help="and to the page of scores")
    arguments.add_argument(
        "--sample", action="store_true", help="only what SAMPLE_SEED draws, or the day"
    )
    options = arguments.parse_args()
    if unknown := set(options.corpora) - set(CORPORA):
        arguments.error(f"no such corpus: {', '.join(sorted(unknown))}")
    if len(options.corpora) != 1:
        every = CORPORA if options.engine == MODULES else AS_GRAPHS
        for name in options.corpora or every:
            words = [word for word in sys.argv[1:] if word not in options.corpora]
            subprocess.run([sys.executable, "-m", "tests.corpora", name, *words], check=False)
        return

    (name,) = options.corpora
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for one order of summation
    if "engine" in name:  # before torch is imported, which starts threads that no fork would have
        from tests.corpora.engines.environment import ENVIRONMENT

        os.environ.update(ENVIRONMENT)
    try:
        corpus = corpus_of(name)
        if options.engine == GRAPH:
            from tests.corpora.operations import Operations

            corpus = Operations(corpus)
        if options.engine == BISECT:
            from tests.corpora.bisected import Bisected

            corpus = Bisected(corpus)
        cases = corpus.drawn(options.draw, options.seed) if options.draw else corpus.load()
    except ImportError as error:
        print(f"{name}: not run: {error}")
        return
    from tests.corpora import page
    from tests.corpora.scores import FILE, Recorder, line, score, totals, write
    from tests.sampling import sample

    scores = []
    with tempfile.TemporaryDirectory() as temporary:
        together = False if options.apart else None
        seed = 0 if options.draw else options.seed
        folder = (options.keep or Path(temporary)).resolve()
        recorder = Recorder(corpus, folder, seed, together, fresh=options.apart, alone=True)
        chosen = [case for case in cases if options.only in case.name]
        chosen = sample(chosen) if options.sample else chosen
        for answers in score(corpus, recorder, chosen, options.variant):
            scores += answers
            print(*map(line, answers), sep="\n", flush=True)
    print("", *totals(scores), sep="\n")
    if options.file:
        write(scores, options.file)
    if options.page:
        # what is said changes with every word of an explanation
        write([replace(answer, said="") for answer in scores], FILE)
        page.update()


if __name__ == "__main__":
    main()
