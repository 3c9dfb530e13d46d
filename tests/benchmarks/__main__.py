"""Runs all benchmarks: `make bench`. Writes the table and the machine into docs/performance.md,
and adds the figures to docs/performance-history.jsonl.

    python -m tests.benchmarks [NAME…] [--json FILE] [--page FILE]

Each benchmark runs in its own process, one at a time. One that fails becomes a line of the table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.benchmarks.figures import ROOT, environment, is_unclear, measured, module_command, number
from tests.benchmarks.history import HISTORY, append_run, last_run, worse_figures

# benchmark -> what it is about, in the order of the table
BENCHMARKS = {
    "six_statistics": "statistics of all modules",
    "small_tensors": "records of tiny tensors",
    "graph": "the graph of operations",
    "fastvideo_trace": "the real FastVideo",
    "gpu": "on a GPU",
    "training": "the health of a training",
    "laws": "the laws of training",
    "regions": "regions",
    "compiled": "under torch.compile",
    "telemetry": "sending",
    "growth": "agent and gateway",
    "exit": "exit with a dead collector",
    "startup": "start of the interpreter",
    "caching": "keeping all outputs",
    "large": "large",
    "diff": "comparing",
    "ranks": "comparing many ranks",
    "bandwidth": "distance from one read of the memory",
    "peers": "others, beside us",
}
PAGE = ROOT / "docs" / "performance.md"
_PACKAGES = (
    "torch",
    "transformers",
    "fastvideo",
    "opentelemetry-sdk",
    "nnsight",
    "mindstudio-probe",
)
_TIMEOUT_S = 1200


def figures_of(name: str) -> list[dict[str, Any]]:
    """Run a benchmark in its own process; return its figures, or one line with the reason it failed."""
    try:
        done = subprocess.run(
            module_command(name, "--json", "-"),
            cwd=ROOT,
            env=environment(),
            timeout=_TIMEOUT_S,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(
                (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            )
        figures: list[dict[str, Any]] = json.loads(done.stdout[done.stdout.index("{") :])["figures"]
        return [{"benchmark": name, "name": str(figure["name"]), **figure} for figure in figures]
    except subprocess.TimeoutExpired:
        why = f"not done after {_TIMEOUT_S} s"
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
    return [
        {
            "benchmark": name,
            "name": BENCHMARKS.get(name, name),
            "ours": None,
            "goal": None,
            "met": None,
            "detail": f"did not run: {why}",
        }
    ]


def table(figures: Sequence[dict[str, Any]]) -> str:
    """Return the figures as a Markdown table."""
    words = {True: "yes", False: "**no**", None: "–"}
    lines = ["| figure | today | goal | met | measured |", "|---|--:|--:|---|---|"]
    for figure in figures:
        goal = "–" if figure.get("goal") is None else f"≤ {number(figure['goal'])}"
        cells = [
            figure["name"],
            measured(figure),
            goal,
            "cannot tell" if is_unclear(figure) else words[figure.get("met")],
            figure.get("detail") or "",
        ]
        lines.append(
            "| "
            + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells)
            + " |"
        )
    return "\n".join(lines)


def machine() -> str:
    """Describe the machine in Markdown, without its name."""
    model, count = "unknown processor", os.cpu_count()
    try:
        model = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)[0]
    except (OSError, IndexError):
        pass
    versions = []
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            versions.append(f"no {package}")
    when = time.strftime("%Y-%m-%d", time.gmtime())
    load = f"load {os.getloadavg()[0]:.1f} at the end" if hasattr(os, "getloadavg") else ""
    python = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    return f"{when}: {model}, {count} cores, one thread; {load}. {python}; {', '.join(versions)}."


def rewritten(page: str, **parts: str) -> str:
    """Return the page with the text between the markers of each part replaced.

    >>> rewritten("a <!-- figures -->old<!-- end of figures --> b", figures="new")
    'a <!-- figures -->\\nnew\\n<!-- end of figures --> b'
    """
    for name, text in parts.items():
        start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        if start not in page or end not in page:
            raise ValueError(f"the page has no {start} … {end}")
        page = page[: page.index(start) + len(start)] + f"\n{text}\n" + page[page.index(end) :]
    return page


def main(argv: Sequence[str]) -> int:
    """Run the benchmarks and print the figures. Write them into the page if all were run."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"some of {', '.join(BENCHMARKS)}, instead of all"
    )
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument(
        "--page",
        type=Path,
        help="the page that the table is written into; docs/performance.md if all are run",
    )
    parser.add_argument(
        "--history",
        type=Path,
        help="the file that the figures are added to; docs/performance-history.jsonl if all are run",
    )
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.names) - set(BENCHMARKS):
        parser.error(
            f"no benchmark {', '.join(sorted(unknown))}; use some of {', '.join(BENCHMARKS)}"
        )
    figures: list[dict[str, Any]] = []
    for name in arguments.names or BENCHMARKS:
        start = time.perf_counter()
        found = figures_of(name)
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        figures += found
    print(table(figures))
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"machine": machine(), "figures": figures}, indent=1) + "\n"
        )
    history = arguments.history or HISTORY
    before = last_run(history)
    if before is not None:
        measured_before = before["figures"]
        if arguments.names:
            names = {figure["name"] for figure in figures}
            measured_before = [figure for figure in measured_before if figure["name"] in names]
        worse = list(worse_figures(measured_before, figures))
        print(f"Worse by more than a tenth than in the run before ({before['machine']}):")
        print("\n".join(worse) or "none")
    if arguments.history or not arguments.names:
        append_run(history, machine(), figures)
    page = arguments.page or (None if arguments.names else PAGE)
    if page:
        page.write_text(rewritten(page.read_text(), figures=table(figures), machine=machine()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
