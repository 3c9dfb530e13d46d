"""Name what the user gave instead of the temporary files that were made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from otel_torch.parity.finding import Report
from otel_torch.recording.reader import RecordingError


def compare_temporary_files(run: Callable[[], Report], given: Mapping[Path, Path]) -> Report:
    """Run a comparison; its report and its error name what the user gave.

    Args:
        given: What the user gave, by the temporary file that was made of it.

    Raises:
        RecordingError: A file cannot be read.
    """

    def with_names(text: str) -> str:
        for path, name in given.items():
            text = text.replace(str(path), str(name))
        return text

    try:
        report = run()
    except RecordingError as error:
        raise RecordingError(with_names(str(error))) from None
    name_files(report, with_names)
    return report


def name_files(report: Report, with_names: Callable[[str], str]) -> None:
    """Change the names of files in a report."""
    report.reference, report.port = with_names(report.reference), with_names(report.port)
    report.warnings = list(map(with_names, report.warnings))
    report.uncompared = list(map(with_names, report.uncompared))
    report.reason = None if report.reason is None else with_names(report.reason)
