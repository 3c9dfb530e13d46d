"""The module tree of the HTML report, unfolded where an error was introduced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from otel_torch.parity.finding import ComparedPair, Report, State
from otel_torch.parity.report.html_charts import STATES, hover_text
from otel_torch.parity.report.pairs import excess
from otel_torch.parity.report.wording import STATE_MARKS, format_error, module_name
from otel_torch.rendering.page import escaped

MAX_MODULES = 5000  # of a full tree; a larger one shows only branches with a finding
MAX_DEPTH = 50  # components of a module name that become branches

_SEVERITY = {state: index for index, state in enumerate(STATES)}


@dataclass(slots=True)
class _Branch:
    """A module of the tree: its submodules, the worst pair of each of its sides, and the worst
    state in the branch.
    """

    children: dict[str, _Branch] = field(default_factory=dict)
    worst: dict[str, ComparedPair] = field(default_factory=dict)
    state: State = "right"
    size: int = 0  # modules in the branch, itself included; set by `count`

    def add(self, path: Sequence[str], pair: ComparedPair) -> None:
        """Add the worst pair of a side of the module at `path`."""
        branch = self
        branch._raise_state(pair.state)
        for part in path:
            branch = branch.children.setdefault(part, _Branch())
            branch._raise_state(pair.state)
        branch.worst[pair.side] = pair

    def count(self) -> int:
        """Set and return the number of modules in the branch."""
        self.size = 1 + sum(child.count() for child in self.children.values())
        return self.size

    def _raise_state(self, state: State) -> None:
        self.state = max(self.state, state, key=_SEVERITY.__getitem__)


def module_tree(report: Report) -> list[str]:
    """Return the section with the tree of the reference's modules."""
    if not report.compared:
        return []
    roots: dict[str, _Branch] = {}
    for pair in _worst_pair_of_each_side(report):
        path = pair.module.split(".", MAX_DEPTH) if pair.module else []
        roots.setdefault(pair.model, _Branch()).add(path, pair)
    is_full = sum(root.count() for root in roots.values()) <= MAX_MODULES
    note = (
        "The reference's modules, each with the worst of its inputs and outputs over all steps; "
        "✗ leads to a finding."
    )
    if not is_full:
        note += f" With more than {MAX_MODULES:,} modules, branches without a finding are folded."
    return [
        "<h2>Modules</h2>",
        f'<p class="faint">{note}</p>',
        '<div class="tree name">',
        *(line for model, root in roots.items() for line in _branch_lines(model, root, is_full)),
        "</div>",
    ]


def _worst_pair_of_each_side(report: Report) -> list[ComparedPair]:
    worst: dict[tuple[str, str, str], ComparedPair] = {}
    for pair in report.compared:
        key = (pair.model, pair.module, pair.side)
        if key not in worst or _severity(pair) > _severity(worst[key]):
            worst[key] = pair
    return list(worst.values())


def _severity(pair: ComparedPair) -> tuple[int, float]:
    return _SEVERITY[pair.state], excess(pair)


def _branch_lines(name: str, branch: _Branch, is_full: bool) -> Iterator[str]:
    """Yield a module as a line, or as a fold if it has submodules."""
    summary = _branch_summary(name, branch)
    if not branch.children:
        yield f"<div>{summary}</div>"
    elif branch.state != "introduced" and not is_full:
        inside = f'<span class="faint">and {branch.size - 1:,} modules in it</span>'
        yield f"<div>{summary} {inside}</div>"
    else:
        is_open = " open" if branch.state == "introduced" else ""
        yield f"<details{is_open}><summary>{summary}</summary>"
        for child_name, child in branch.children.items():
            yield from _branch_lines(child_name, child, is_full)
        yield "</details>"


def _branch_summary(name: str, branch: _Branch) -> str:
    parts = [f'<span class="{branch.state}">{STATE_MARKS[branch.state]} {escaped(name)}</span>']
    for pair in branch.worst.values():
        if pair.port_module != pair.module:
            parts.append(f'<span class="faint">= {escaped(module_name(pair.port_module))}</span>')
            break
    for side in ("parameter", "input", "output"):
        pair_of_side = branch.worst.get(side)
        if pair_of_side is not None and pair_of_side.state != "right":
            parts.append(
                f'<span class="{pair_of_side.state}" title="{escaped(hover_text(pair_of_side))}">'
                f"{side} {pair_of_side.state} {format_error(pair_of_side.error)}</span>"
            )
    return " ".join(parts)
