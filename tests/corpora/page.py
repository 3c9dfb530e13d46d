"""Writes the tables of the pages of scores in `docs/` from the file of scores.

    python -m tests.corpora.page

A table is between `<!-- scores: NAME -->` and `<!-- end -->`; the prose around it stays.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tests.corpora.case import BISECT, GRAPH, KEPT_BACK, MODULES, REST
from tests.corpora.judge import OURS, RULE
from tests.corpora.judge_lines import LINE_GRADES
from tests.corpora.scores import Score, read

DOCS = Path(__file__).parents[2] / "docs"
PAGES = DOCS / "parity-scores.md", DOCS / "bisect-scores.md"
MARKED = re.compile(r"(?<=<!-- scores: )(\S+)( -->\n).*?(?=<!-- end -->)", re.S)
JUDGES = {OURS: "`diff`", RULE: "FastVideo's rule"}

# corpora whose faults have a place by which both engines are graded: title, name, variant
PLACED = (
    ("small cases, fp32", "small", "fp32"),
    ("small cases, bf16, above rounding", "small", "bf16"),
    ("real ports, fp32", "ports", "fp32"),
    ("real ports, bf16, above rounding", "ports", "bf16"),
    ("planted by a machine, fp32", "machine", "fp32"),
)

Rows = Iterable[Sequence[object]]


def table(head: Sequence[str], rows: Rows) -> str:
    lines = [f"| {' | '.join(map(str, line))} |\n" for line in (head, *rows)]
    return "".join([lines[0], f"|{'---|' * len(head)}\n", *lines[1:]]).replace("|  ", "| ")


def grades(scores: Sequence[Score], names: Sequence[str]) -> list[int]:
    counts = Counter(s.grade for s in scores)
    counts["wrong"] += counts["error"]
    return [counts[name] for name in names]


def places(scores: Sequence[Score]) -> str:
    """Of the small cases and the real ports: how often the place is right, by each judge."""

    def rows() -> Rows:
        for title, corpus, variant in PLACED:
            for judge, said in JUDGES.items():
                chosen = [
                    s
                    for s in scores
                    if (s.corpus, s.variant, s.judge) == (corpus, variant, judge)
                    and not s.clean
                    and not s.invisible
                ]
                first = (title, len(chosen)) if judge == OURS else ("", "")
                both = "–" if corpus == "machine" else sum(s.both for s in chosen)
                exact, *others = grades(chosen, ("exact", "near", "late", "missed", "wrong"))
                if chosen:
                    yield *first, said, exact, both, *others

    head = "programs", "n", "judge", "exact", "in both", "adjacent", "late", "missed", "false"
    return table(head, rows())


def clean_pairs(scores: Sequence[Score]) -> str:
    def rows() -> Rows:
        for title, corpus, variant in (
            ("small cases, fp32", "small", "fp32"),
            ("small cases, bf16", "small", "bf16"),
            ("real ports, fp32, with the noise and without", "ports", "fp32"),
            ("real ports, bf16", "ports", "bf16"),
        ):
            chosen = [s for s in scores if (s.corpus, s.variant) == (corpus, variant) and s.clean]
            silent = [
                sum(s.judge == judge and s.grade == "silent" for s in chosen) for judge in JUDGES
            ]
            if chosen:
                yield title, len(chosen) // len(JUDGES), *silent

    return table(("clean pairs", "n", "`diff` silent", "FastVideo's rule silent"), rows())


def causes(scores: Sequence[Score]) -> str:
    """What a fault is said to be, wherever it is."""

    def rows() -> Rows:
        for round, name in ((REST, "faults"), (KEPT_BACK, "kept back")):
            for variant, said in (
                ("tensors", "whole tensors"),
                ("statistics", "statistics and sketches"),
            ):
                chosen = [s for s in scores if (s.corpus, s.variant) == ("causes", variant)]
                of_round = [s for s in chosen if s.round == round and not s.clean]
                known, outside = (
                    [s for s in of_round if s.kind.startswith("outside") == is_outside]
                    for is_outside in (False, True)
                )
                clean = [s for s in chosen if s.clean]
                right = sum(s.grade == "exact" for s in outside)
                silent = sum(s.grade == "silent" for s in clean)
                first = name if variant == "tensors" else ""
                yield (
                    first, said, len(known), *grades(known, ("exact", "place", "missed", "wrong")),
                    f"{right} of {len(outside)}", f"{silent} of {len(clean)}",
                )  # fmt: skip

    head = (
        "corpus", "recorded with", "n", "named", "in part", "not known", "wrong", "outside of the table: not known",
        "clean: silent",
    )  # fmt: skip
    return table(head, rows())


def by_kind(corpora: Sequence[str], second: str) -> Callable[[Sequence[Score]], str]:
    """Return a table of the grades of each kind of fault; `second` is what `place` is called."""

    def of(scores: Sequence[Score]) -> str:
        faults = [s for s in scores if s.corpus in corpora and not s.clean]
        groups = {kind: [s for s in faults if s.kind == kind] for kind in [s.kind for s in faults]}
        head = "faults in", "n", "exact", second, "near", "missed", "wrong"
        names = "exact", "place", "near", "missed", "wrong"
        return table(head, ((k, len(g), *grades(g, names)) for k, g in groups.items()))

    return of


def engines(scores: Sequence[Score]) -> str:
    """How often each engine is right: the comparison of modules, and that of operations."""

    def rows() -> Rows:
        for title, corpus, variant in (
            *PLACED,
            ("faults of three models of our own", "causes", ""),
            ("trainings", "training", ""),
        ):
            of_graph, of_modules = (
                [
                    s
                    for s in scores
                    if (s.corpus, s.engine, s.judge) == (corpus, engine, OURS)
                    and variant in ("", s.variant)
                    and not s.invisible
                ]
                for engine in (GRAPH, MODULES)
            )
            if of_graph:
                yield title, *_graph_cells(of_graph), *_module_cells(of_modules, corpus)

    head = (
        "programs", "faults", "graph: the line", "a region with it", "another line", "nothing", "the right module", "clean: silent",
        "modules: exact", "clean: silent",
    )  # fmt: skip
    return table(head, rows())


def bisections(scores: Sequence[Score]) -> str:
    """How often the first line that bisect names is right, and proven."""

    def rows() -> Rows:
        groups: dict[tuple[str, str], list[Score]] = {}
        for s in scores:
            if s.engine == BISECT and not s.invisible:
                groups.setdefault((s.corpus, s.variant), []).append(s)
        for (corpus, variant), group in groups.items():
            faults = [s for s in group if not s.clean]
            graded = [s for s in faults if s.line]
            proven = [s for s in faults if s.proof == "proven"]
            yield (
                f"{corpus} {variant}".strip(),
                len(faults),
                f"{sum(s.line in ('line', 'region') for s in graded)} of {len(graded)}",
                len(proven),
                sum(s.line == "other" for s in proven),
                sum(s.healed for s in faults),
                f"{sum(s.runs for s in faults) / max(len(faults), 1):.1f}",
                _silent(group),
            )

    head = (
        "programs", "faults", "the line or a region with it", "proven", "proven at another line", "healed in whole",
        "runs, on average", "clean: silent",
    )  # fmt: skip
    return table(head, rows())


def _graph_cells(scores: Sequence[Score]) -> Sequence[object]:
    faults = [s for s in scores if not s.clean]
    by_line = Counter(s.line for s in faults)
    lines = [by_line[name] for name in LINE_GRADES] if any(by_line) else ["–"] * 4
    right = sum(s.grade in ("exact", "near") for s in faults)
    return len(faults), *lines, right or "–", _silent(scores)


def _module_cells(scores: Sequence[Score], corpus: str) -> Sequence[object]:
    is_placed = corpus != "causes"  # of those what the fault is was graded, and not where
    exact = sum(s.grade == "exact" for s in scores if not s.clean)
    return exact if is_placed else "–", _silent(scores)


def _silent(scores: Sequence[Score]) -> str:
    clean = {s.case: True for s in scores if s.clean}
    clean |= {s.case: False for s in scores if s.clean and s.grade != "silent"}
    return f"{sum(clean.values())} of {len(clean)}" if clean else "–"


TABLES = {
    "places": places,
    "clean": clean_pairs,
    "causes": causes,
    "training": by_kind(["training"], "unexplained"),
    "layouts": by_kind(["layouts"], "place"),
    "engines": by_kind(["engines"], "place"),
}


# of the scores of all engines; those above are of modules alone
OF_ALL = {"both": engines, "bisect": bisections}


def updated(text: str) -> str:
    """Return a page with the tables of the file of scores."""
    scores = read()
    of_modules = [s for s in scores if s.engine == MODULES]

    def written(name: str) -> str:
        if name in OF_ALL:
            return OF_ALL[name](scores)
        return TABLES[name](of_modules)

    return MARKED.sub(lambda found: f"{found[1]}{found[2]}{written(found[1])}", text)


def update() -> None:
    for page in PAGES:
        page.write_text(updated(page.read_text()))


if __name__ == "__main__":
    update()
