"""`otel-torch doctor`: says before a run what is set, what would be recorded, and whether it can
arrive.

For the hour that is otherwise lost to a variable with a typing mistake or a Collector that nobody
listens to. Prints our own variables with their values; of all others only the names, and of an
endpoint no more than host and port: what this prints may be pasted into a public report.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from urllib.parse import urlsplit

from otel_torch.job import this_job
from otel_torch.settings import Settings, UnusableSelection, find_misspelled
from otel_torch.telemetry.exporters import CARRIERS

Environ = Mapping[str, str]


@dataclass(frozen=True)
class Finding:
    """One line of the report. `ok` is False for what is set and cannot work, None for what is
    merely said.
    """

    about: str
    ok: bool | None
    text: str


def find_versions(environ: Environ) -> Iterator[Finding]:
    """Which interpreter and packages a run from here would use."""
    names = (
        "otel-torch",
        "torch",
        "opentelemetry-sdk",
        "opentelemetry-exporter-otlp",
        "opentelemetry-instrumentation",
    )
    for name in names:
        try:
            yield Finding("version", None, f"{name} {version(name)}")
        except PackageNotFoundError:
            needed = name != "opentelemetry-instrumentation"
            why = "" if needed else ", and only `opentelemetry-instrument` needs it"
            yield Finding("version", False if needed else None, f"{name} is not installed{why}")
    yield Finding("version", None, f"Python {platform.python_version()}, {sys.executable}")
    yield Finding("version", None, f"statistics by: {_kernel(environ)}")


def _kernel(environ: Environ) -> str:
    """What would compute the statistics of a CPU's tensors, and of a GPU's."""
    try:
        gpu_kernel, cpu_kernel = (
            importlib.import_module(f"otel_torch.statistics.{name}")
            for name in ("gpu_kernel", "cpu_kernel")
        )
        cpu_kernel.choose(Settings.from_env(environ).kernel)
        return f"{cpu_kernel.describe()}; on a GPU: {gpu_kernel.try_out()}"
    except (ImportError, UnusableSelection) as error:
        return f"nothing: {error}"


def find_switch(environ: Environ) -> Iterator[Finding]:
    """Whether a program started from here would be recorded."""
    switched_on = environ.get("OTEL_TORCH_ENABLED", "").strip().lower() in (
        "1",
        "true",
        "yes",
        "on",
    )
    look = "import sys; print('otel_torch.startup' in sys.modules)"
    inside = {**environ, "OTEL_TORCH_ENABLED": "1"}
    active = (
        subprocess.run(
            [sys.executable, "-c", look], env=inside, capture_output=True, text=True
        ).stdout.strip()
        == "True"
    )
    if active:
        yield Finding("start", True, "the start-up file is active: OTEL_TORCH_ENABLED=1 records")
    else:
        text = "the start-up file is not active here: use otel-torch run, or install the package into this Python"
        yield Finding("start", False if switched_on else None, text)
    if not switched_on:
        yield Finding("start", None, "OTEL_TORCH_ENABLED is off: nothing is recorded")


def find_settings(environ: Environ) -> Iterator[Finding]:
    """Our variables that are set, what is wrong with them, and what they amount to."""
    known = Settings.names()
    for name in sorted(environ):
        if name in known:
            yield Finding("set", None, f"{name}={environ[name]}")
        elif name.startswith("OTEL_") and not name.startswith("OTEL_TORCH_"):
            yield Finding("set", None, f"{name} (value not shown)")
    for line in find_misspelled(environ):
        yield Finding("set", False, line)
    problems: list[str] = []
    try:
        settings = Settings.from_env(environ, problems.append)
    except UnusableSelection as error:
        yield Finding("set", False, f"{error}; a program runs on unrecorded")
        return
    yield from (Finding("set", False, problem) for problem in problems)
    yield Finding("record", None, _describe(settings))


def _describe(settings: Settings) -> str:
    if not settings.activations:
        return "regions and steps only, no activations"
    where = [
        f"modules {_quote(settings.modules, 'all')}",
        f"models {_quote(settings.models, 'all')}",
        *([f"without {_quote(settings.exclude, '')}"] if settings.exclude else []),
        "all steps" if settings.steps.all else "selected steps",
    ]
    return f"{', '.join(settings.capture)} of {', '.join(where)}: {', '.join(settings.stats)}"


def _quote(pattern: re.Pattern[str] | None, otherwise: str) -> str:
    return f"/{pattern.pattern}/" if pattern else otherwise


def find_recording(environ: Environ) -> Iterator[Finding]:
    """Whether the recording's place can be written, and has room."""
    settings = _usable_settings(environ)
    if settings is None:
        return
    if settings.jsonl is None:
        yield Finding("recording", None, "OTEL_TORCH_JSONL is off: none is written")
        return
    path = _placed(settings.jsonl, environ)
    if os.path.isdir(path):
        yield Finding(
            "recording", False, f"{settings.jsonl}: is a folder; OTEL_TORCH_JSONL names a file"
        )
    else:
        yield _can_be_written("recording", settings.jsonl, os.path.dirname(path), settings)


def find_otlp_files(environ: Environ) -> Iterator[Finding]:
    """Whether the folder of the OTLP files can be written, and has room."""
    settings = _usable_settings(environ)
    if settings is not None and settings.otlp_file is not None:
        yield _can_be_written(
            "otlp files", settings.otlp_file, _placed(settings.otlp_file, environ), settings
        )


def _placed(path: str, environ: Environ) -> str:
    """A path with its placeholders replaced, from the root on."""
    job = this_job(environ)
    for placeholder, value in (
        ("<run>", job.run_id),
        ("<rank>", str(job.rank)),
        ("<pid>", str(job.pid)),
    ):
        path = path.replace(placeholder, value)
    return os.path.abspath(path)


def _can_be_written(about: str, given: str, folder: str, settings: Settings) -> Finding:
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        return Finding(about, False, f"{given}: {folder} cannot be written to")
    free = shutil.disk_usage(folder).free
    return Finding(
        about,
        True,
        f"{given}: {free / 1e9:.1f} GB free, at most {settings.max_bytes / 1e9:g} GB written",
    )


def find_endpoints(environ: Environ) -> Iterator[Finding]:
    """Which of OpenTelemetry's signals would go anywhere."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        yield Finding("export", None, "OTEL_SDK_DISABLED is true: nothing is exported")
        return
    for signal in ("traces", "metrics", "logs"):
        endpoint = environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT") or environ.get(
            "OTEL_EXPORTER_OTLP_ENDPOINT"
        )
        exporter = environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip()
        if exporter == "none":
            yield Finding(
                "export", None, f"{signal}: not exported, OTEL_{signal.upper()}_EXPORTER is none"
            )
        elif endpoint:
            yield Finding("export", None, f"{signal}: to {_host_and_port(endpoint)}")
        elif exporter:
            yield Finding(
                "export",
                None,
                f"{signal}: to the exporter that OTEL_{signal.upper()}_EXPORTER names",
            )
        else:
            yield Finding("export", None, f"{signal}: no endpoint is named, so nothing is sent")


def _host_and_port(endpoint: str) -> str:
    try:
        parts = urlsplit(endpoint if "//" in endpoint else f"//{endpoint}")
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "an address that cannot be read"
    host = (
        f"[{parts.hostname}]"
        if ":" in (parts.hostname or "")
        else parts.hostname or "an address without a host"
    )
    return f"{f'{parts.scheme}://' if parts.scheme else ''}{host}{port}"


def find_delivery(environ: Environ) -> Iterator[Finding]:
    """Send one span, one event and one metric, and say whether each was accepted: a fault only
    where it is asked for.
    """
    try:
        probe = importlib.import_module("otel_torch.telemetry.probe").probe
    except ImportError as error:
        yield Finding("delivery", False, f"not tried: {error}")
        return
    settings = _usable_settings(environ)
    asked = {CARRIERS[signal] for signal in (settings or Settings.from_env({})).signals}
    for result in probe(environ):
        text = f"{result.signal}: {result.detail}"
        if result.signal in asked:
            yield Finding("delivery", result.accepted, text)
        else:
            yield Finding("delivery", None, f"{text}; OTEL_TORCH_SIGNALS does not ask for it")


CHECKS: tuple[Callable[[Environ], Iterator[Finding]], ...] = (
    find_versions,
    find_switch,
    find_settings,
    find_recording,
    find_otlp_files,
    find_endpoints,
    find_delivery,
)


def _usable_settings(environ: Environ) -> Settings | None:
    try:
        return Settings.from_env(environ)
    except UnusableSelection:
        return None


def examine(environ: Environ) -> list[Finding]:
    """All findings, in the order of the checks. A check that fails itself is a finding and stops no
    other.
    """
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings.extend(check(environ))
        except Exception as error:
            findings.append(Finding(check.__name__, False, f"{type(error).__name__}: {error}"))
    return findings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `doctor` takes."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the report. Returns 0, or 2 when something that is set cannot work."""
    findings = examine(dict(os.environ))
    fine = all(finding.ok is not False for finding in findings)
    if arguments.json:
        rows = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"schema": "otel_torch.doctor/1", "ok": fine, "findings": rows}, indent=2))
    else:
        for finding in findings:
            mark = {True: "ok", False: "NO", None: "  "}[finding.ok]
            print(f"{mark} {finding.about:<10} {finding.text}")
    return 0 if fine else 2
