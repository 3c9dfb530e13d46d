"""`otel-torch send`: delivers OTLP JSON to the endpoint of the standard variables."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from otel_torch.cli.main import INTERRUPTED
from otel_torch.cli.remote_arguments import folder_or_url
from otel_torch.process.console import as_given, say
from otel_torch.rendering.progress import Progress
from otel_torch.rendering.table import escape
from otel_torch.telemetry.otlp.replay import ReplayOutcome, find_files, replay_file
from otel_torch.telemetry.otlp.replay_endpoint import GIVE_UP_S, Endpoint, RateLimit, ReplayError

SCHEMA = "otel_torch.send/1"


def parse_rate(text: str) -> RateLimit:
    try:
        return RateLimit.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Deliver OTLP JSON, written by OTEL_TORCH_OTLP_FILE or any file exporter, to the "
        "endpoint of the standard OTEL_EXPORTER_OTLP_* variables. What was acknowledged is stored "
        "beside each file and not sent again. Exit status: 0 all accepted, 1 something refused or "
        "not delivered, 2 bad input."
    )
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        type=folder_or_url,
        help="OTLP files, or folders of them; beside a URL nothing is stored: what is sent twice "
        "arrives twice",
    )
    parser.add_argument(
        "--rate",
        metavar="RATE",
        type=parse_rate,
        default=RateLimit(),
        help="limit per second: bytes (5MB/s) or requests (20/s)",
    )
    parser.add_argument(
        "--give-up",
        metavar="SECONDS",
        type=float,
        default=GIVE_UP_S,
        help="how long to retry a message (default: 60)",
    )
    parser.add_argument("--again", action="store_true", help="also send what was acknowledged")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a line per file"
    )


def run(arguments: argparse.Namespace) -> int:
    """Send the files and return the exit status; bad input is one line on stderr."""
    with Progress() as progress:
        reported: set[str] = set()

        def report(text: str) -> None:
            progress.clear()
            if text not in reported:
                reported.add(text)
                say(text)

        def show_progress(text: str) -> None:
            progress(escape(text))

        thread = threading.current_thread()
        thread_name = thread.name
        thread.name = "otel_torch-send"  # keeps the exporters' own warnings off the terminal
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # and those of gRPC's core
        endpoint = Endpoint(arguments.rate, arguments.give_up, report, _sleep)
        outcomes: list[ReplayOutcome] = []
        try:
            files = find_files(arguments.files, report)
            for signal in {signal for _, signal in files if signal is not None}:
                endpoint.can_send(signal)
            for path, _ in files:
                outcomes.append(
                    replay_file(path, endpoint, report, show_progress, again=arguments.again)
                )
        except ReplayError as error:
            report(str(error))
            return 2
        except KeyboardInterrupt:
            report("stopped; run the same command to continue")
            return INTERRUPTED
        finally:
            endpoint.close()
            thread.name = thread_name
    _print(outcomes, endpoint, as_json=arguments.json)
    return _exit_status(outcomes)


def _sleep(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)


def _exit_status(outcomes: Sequence[ReplayOutcome]) -> int:
    """Return 2 for unreadable lines, 1 for data that did not arrive, else 0."""
    if any(outcome.unreadable_lines for outcome in outcomes):
        return 2
    is_incomplete = any(
        outcome.rejected or outcome.refused or outcome.undelivered_lines for outcome in outcomes
    )
    return 1 if is_incomplete else 0


def _print(outcomes: Sequence[ReplayOutcome], endpoint: Endpoint, *, as_json: bool) -> None:
    if as_json:
        result = {
            "schema": SCHEMA,
            "status": _exit_status(outcomes),
            "endpoint": endpoint.name,
            "files": [_as_json(outcome) for outcome in outcomes],
        }
        print(as_given(json.dumps(result)))
        return
    for outcome in outcomes:
        print(as_given(_describe(outcome)))
    sys.stdout.flush()


def _as_json(outcome: ReplayOutcome) -> dict[str, Any]:
    values = {entry.name: getattr(outcome, entry.name) for entry in fields(outcome)}
    return {
        name: dict(value) if isinstance(value, Counter) else value for name, value in values.items()
    }


def _describe(outcome: ReplayOutcome) -> str:
    """Return one line about a file for the user."""
    parts = [
        _join_counts(counts, verdict)
        for counts, verdict in (
            (outcome.accepted, "accepted"),
            (outcome.rejected, "rejected by the receiver"),
            (outcome.refused, "refused"),
        )
        if counts
    ]
    parts += [
        f"{_plural(count, 'line')} {verdict}"
        for count, verdict in (
            (outcome.undelivered_lines, "not delivered"),
            (outcome.unreadable_lines, "unreadable"),
            (outcome.already_lines, "acknowledged before"),
        )
        if count
    ]
    if outcome.sent_again:
        parts.append(f"{_plural(outcome.sent_again, 'message')} sent again after no answer")
    if outcome.cut_off:
        parts.append("the last line was cut off and is skipped")
    return f"{escape(outcome.file)}: {'; '.join(parts) or 'nothing to send'}"


def _join_counts(counts: Counter[str], verdict: str) -> str:
    texts = [_plural(count, name.rstrip("s").replace("_", " ")) for name, count in counts.items()]
    return f"{', '.join(texts)} {verdict}"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"
