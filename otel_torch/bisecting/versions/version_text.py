"""The answer as text: what differs, the change as a patch, its proof, and the runs."""

from __future__ import annotations

from otel_torch.bisecting.text import list_runs
from otel_torch.bisecting.versions.version_answer import FoundChange, VersionBisection
from otel_torch.parity.report.screen import Screen
from otel_torch.parity.report.text import DEFAULT_WIDTH
from otel_torch.parity.report.text_finding import next_step_block
from otel_torch.parity.report.wording import format_error
from otel_torch.rendering.table import escape
from otel_torch.rendering.words import plural

# suspects and excluded files that are listed
_MOST_LISTED = 8
_PATCH_STYLES = {"+": "green", "-": "red", "@": "dim"}


def render_version_bisection(
    answer: VersionBisection, *, color: bool, width: int = DEFAULT_WIDTH
) -> str:
    """Return the answer as text without a final line end."""
    screen = Screen(color, width, None)
    blocks = [_suspects(answer, screen), _first_line(answer, screen)]
    blocks += [_change(change, screen) for change in answer.changes]
    blocks += [
        _excluded(answer, screen),
        next_step_block(answer.bisection.report, screen),
        [*list_runs(answer.bisection, screen), _verdict(answer)],
    ]
    lines = [line for block in blocks if block for line in ("", *block)]
    return "\n".join(lines[1:])


def _suspects(answer: VersionBisection, screen: Screen) -> list[str]:
    facts = [str(suspect) for suspect in answer.suspects]
    facts += [f"{own.name} {' → '.join(own.values)}" for own in answer.settings]
    if not facts:
        return ["Nothing that is installed differs."]
    title = screen.paint("Differs between the two versions (old → new):", "bold")
    return [title, *_listed(facts, screen)]


def _listed(facts: list[str], screen: Screen) -> list[str]:
    shown = facts[:_MOST_LISTED]
    if len(facts) > _MOST_LISTED:
        shown.append(f"{len(facts) - _MOST_LISTED} more, which --json has")
    return [line for fact in shown for line in screen.wrap(fact, indent="    ")]


def _first_line(answer: VersionBisection, screen: Screen) -> list[str]:
    if answer.crash is not None:
        return screen.wrap(f"The new version fails: {answer.crash}", "red", hanging_indent="  ")
    if not answer.bisection.faults:
        return []
    finding = answer.bisection.faults[0]
    error = ""
    if finding.error is not None:
        error = f" (error {format_error(finding.error)}, limit {format_error(finding.floor)})"
    lines = screen.wrap(
        f"First difference{error}: {finding.explanation}".rstrip(": "), hanging_indent="  "
    )
    for name, line in (("old", finding.line), ("new", finding.port_line)):
        if line is not None:
            lines.append(escape(f"  {name}  {line.place} {line.function}  {line.text}"))
    return lines


def _change(change: FoundChange, screen: Screen) -> list[str]:
    sure = change.proof == "proven"
    mark = "✗ proven" if sure else "? not proven"
    old, new = change.versions
    of = f" of {change.package}" if change.package else ""
    title = f"{mark}: {change.unit} {change.name}{of}, {old} → {new}"
    lines = screen.wrap(title, "red" if sure else "yellow", hanging_indent="  ")
    for line in change.patch.splitlines():
        text, style = f"  {escape(line)}", _PATCH_STYLES.get(line[:1])
        lines.append(screen.paint(text, style) if style else text)
    if change.reason:
        lines += screen.wrap(f"As a whole, because {change.reason}", "yellow", indent="  ")
    for index, commit in enumerate(change.commits):
        lines.append(f"  {'commits ' if not index else '        '}{escape(commit)}")
    return lines


def _excluded(answer: VersionBisection, screen: Screen) -> list[str]:
    lines = []
    if answer.excluded and answer.verdict == "diverged":
        # where all is healed, none of these made the difference
        most = 0 if answer.bisection.is_healed else _MOST_LISTED
        facts = [f"{why} ({_names(own, most)})" for why, own in answer.excluded.items()]
        lines += [screen.paint("Not exchanged:", "yellow"), *_listed(facts, screen)]
    if answer.failed:
        title = "Runs that did not end well count as not healed:"
        lines += [screen.paint(title, "yellow"), *_listed(answer.failed, screen)]
    return lines


def _names(names: list[str], most: int) -> str:
    more = [f"{len(names) - most}{' more' if most else ''}"] if len(names) > most else []
    return ", ".join([*names[:most], *more])


def _verdict(answer: VersionBisection) -> str:
    count = plural(len(answer.changes), "change")
    if answer.verdict in ("match", "partial"):
        if answer.largest_error == 0.0:
            return f"{answer.verdict}: both versions compute the same"
        error = format_error(answer.largest_error)
        return f"{answer.verdict}: both versions compute the same up to rounding, at most {error}"
    if not answer.changes:
        return f"{answer.verdict}: nothing that changed between the versions ran"
    if answer.bisection.is_healed:
        only = "it alone" if len(answer.changes) == 1 else "only these"
        text = f"{count} of {answer.candidates} that ran; with {only} taken back, the new version"
        return f"{answer.verdict}: {text} computes what the old one does"
    return (
        f"{answer.verdict}: with all {answer.candidates} changes that ran taken back, the new "
        "version still computes something else; the most suspicious is shown"
    )
