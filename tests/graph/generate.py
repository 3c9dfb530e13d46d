"""Score the engine on random programs: `python -m tests.graph.generate --cases 10000`.

Half of the cases are clean. A case that goes wrong is printed with its seed; `--seed` shows one.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from dataclasses import fields, replace

from otel_torch.graph.blame import Rules
from tests.graph.programs import Case, draw_case
from tests.graph.score import GOOD, OUTCOMES, fault_lines, run


def make_case(seed: int, dtype: str = "float32") -> Case:
    """Return the case of a seed; even ones are clean."""
    return draw_case(random.Random(seed).choice, bool(seed % 2), dtype)


def score(
    seeds: range, dtype: str, rules: Rules | None = None
) -> tuple[Counter[str], Counter[str], dict[str, list[int]]]:
    """Return the outcomes, those that went wrong by fault, and their seeds."""
    outcomes: Counter[str] = Counter()
    bad: Counter[str] = Counter()
    examples: dict[str, list[int]] = {}
    for seed in seeds:
        case = make_case(seed, dtype)
        word, _ = run(case, rules)
        outcomes[word] += 1
        if word not in GOOD:
            key = f"{word} {case.fault}"
            bad[key] += 1
            examples.setdefault(key, []).append(seed)
    return outcomes, bad, examples


def summary(outcomes: Counter[str]) -> str:
    """Return rates as one line."""
    faults = sum(outcomes[word] for word in ("line", "region", "listed", "wrong", "missed"))
    clean = outcomes["silent"] + outcomes["accused"]
    right = outcomes["line"] + outcomes["region"]
    return (
        f"right {right}/{faults} = {right / max(faults, 1):.2%} (line {outcomes['line']}), "
        f"clean silent {outcomes['silent']}/{clean}; "
        + ", ".join(f"{word} {outcomes[word]}" for word in OUTCOMES if outcomes[word])
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--ablation", action="store_true")
    options = parser.parse_args()
    if options.seed is not None:
        show(options.seed, options.dtype)
        return
    seeds = range(options.start, options.start + options.cases)
    began = time.perf_counter()
    outcomes, bad, examples = score(seeds, options.dtype)
    print(f"{summary(outcomes)}  [{time.perf_counter() - began:.0f} s]")
    for key, count in bad.most_common():
        print(f"  {count:5} {key:40} seeds {examples[key][:6]}")
    if options.ablation:
        for rule in fields(Rules):
            outcomes, _, _ = score(seeds, options.dtype, replace(Rules(), **{rule.name: False}))
            print(f"without {rule.name:20} {summary(outcomes)}")


def show(seed: int, dtype: str) -> None:
    """Print a case, and what the engine makes of it."""
    from otel_torch.graph.states import STATE_NAMES

    case = make_case(seed, dtype)
    word, comparison = run(case)
    print(word, case.fault, sorted(case.lines))
    for spec in (case.reference, case.port):
        print(spec)
    for side, graph in enumerate(comparison.graphs):
        print("--", ("reference", "port")[side])
        for value in range(len(graph.values)):
            node = int(graph.values.maker[value])
            state = STATE_NAMES[comparison.states[side][value]]
            line = graph.lines[graph.values.line[value]][1]
            made = graph.values.name[value]
            if node >= 0:
                reads = graph.nodes.reads[node].tolist()
                operation = graph.operations[graph.nodes.operation[node]]
                made = f"[{node}] {operation} {reads} {graph.arguments[graph.nodes.argument[node]]}"
            print(
                f"{value:4} {state:9} {comparison.partners[side][value]:4} "
                f"{comparison.errors[side][value]:9.2e} {comparison.limits[side][value]:8.1e} "
                f"{line:14} {made} {graph.values.shape[value]}"
            )
    print(comparison.ends, comparison.counts)
    for fault in comparison.faults:
        lines = list(fault_lines(comparison, fault, "nodes"))
        print(lines, list(dict.fromkeys(fault_lines(comparison, fault, "region"))))
        print("  ", fault)


if __name__ == "__main__":
    main()
