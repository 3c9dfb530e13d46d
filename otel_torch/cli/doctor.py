"""`otel-torch doctor`: checks before a run what is set, what would be recorded, and whether data
would arrive.

Finds a misspelled variable or a Collector that does not listen. The output may be pasted into a
public report: it holds the values of our own variables, only the names of all others, and of an
endpoint host and port.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from otel_torch.process.job import this_job
from otel_torch.recording.remote.remote_files import is_url
from otel_torch.recording.remote.upload import check_place
from otel_torch.recording.run_file import fill_placeholders
from otel_torch.rendering.next_step import NextStep, advice_lines
from otel_torch.settings import (
    Settings,
    UnusableSelection,
    describe_misspelled,
    misspelled_settings,
)
from otel_torch.telemetry.otlp.answer import show_endpoint
from otel_torch.telemetry.otlp.exporters import (
    CARRIERS,
    OTEL_SIGNALS,
    exporters_by_signal,
    find_config_file,
    find_overridden,
    is_sdk_disabled,
)

Environ = Mapping[str, str]

_PACKAGES = (
    "otel-torch",
    "torch",
    "opentelemetry-sdk",
    "opentelemetry-exporter-otlp",
    "opentelemetry-instrumentation",
)
_OPTIONAL_PACKAGES = frozenset({"opentelemetry-instrumentation"})
_PROGRAM = ("PROGRAM_COMMAND",)
_CHECK_AGAIN = NextStep(
    ("otel-torch", "doctor"), "mend what is marked NO, and check again", "status 0"
)
_MARKS = {True: "ok", False: "NO", None: "  "}


@dataclass(frozen=True)
class CheckResult:
    """One line of the report.

    Attributes:
        ok: False for a setting that cannot work, None for information.
        next_step: What to do about it, if that is a command.
    """

    about: str
    ok: bool | None
    text: str
    next_step: NextStep | None = None


def find_versions(environ: Environ) -> Iterator[CheckResult]:
    """Yield the interpreter and the packages of a run from here."""
    for name in _PACKAGES:
        try:
            yield CheckResult("version", None, f"{name} {version(name)}")
        except PackageNotFoundError:
            if name in _OPTIONAL_PACKAGES:
                text = f"{name} is not installed, and only `opentelemetry-instrument` needs it"
                yield CheckResult("version", None, text)
            else:
                text = f"{name} is not installed"
                yield CheckResult("version", False, text, _install(name))
    yield CheckResult("version", None, f"Python {platform.python_version()}, {sys.executable}")
    yield CheckResult("version", None, f"statistics by: {_describe_kernels(environ)}")


def _install(package: str) -> NextStep:
    command = (sys.executable, "-m", "pip", "install", package)
    return NextStep(command, "install what is missing", "status 0")


def _describe_kernels(environ: Environ) -> str:
    """Return what would compute the statistics of tensors on a CPU, and on a GPU."""
    try:
        from otel_torch.statistics import cpu_kernel, gpu_kernel  # these import torch

        cpu_kernel.choose(Settings.from_env(environ).kernel)
        return f"{cpu_kernel.describe()}; on a GPU: {gpu_kernel.try_out()}"
    except (ImportError, UnusableSelection) as error:
        return f"nothing: {error}"


def find_ways(environ: Environ) -> Iterator[CheckResult]:
    """Yield which way each part takes that relies on private names of torch or the SDK."""
    from otel_torch import torch_private  # imports torch
    from otel_torch.statistics import cpu_kernel
    from otel_torch.telemetry.light_span import are_light_spans_made

    kernel, ways = cpu_kernel.load(), torch_private.ways()
    objects = None if kernel is None else kernel.objects
    is_in_c = objects is not None and torch_private.module_call() is not None
    calls = "in C" if is_in_c else "in Python, 4 to 10 µs a call slower"
    yield CheckResult("way", is_in_c or None, f"recorded calls: {calls}")
    is_light = are_light_spans_made()
    spans = "light" if is_light else "the SDK's, 4 times slower"
    yield CheckResult("way", is_light or None, f"spans of regions: {spans}")
    known = ", ".join(way.purpose for way in ways if way.is_open)
    yield CheckResult("way", True, f"torch is as known: {known}")
    for way in ways:
        if not way.is_open:
            text = f"torch is not as known: {way.purpose}: {way.otherwise}"
            yield CheckResult("way", None, text)


def find_switch(environ: Environ) -> Iterator[CheckResult]:
    """Yield whether a program started from here would be recorded."""
    value = environ.get("OTEL_TORCH_ENABLED", "").strip().lower()
    is_on = value in ("1", "true", "yes", "on")
    if _is_startup_file_active(environ):
        text = "the start-up file is active: OTEL_TORCH_ENABLED=1 records"
        yield CheckResult("start", True, text)
    else:
        step = NextStep(
            ("otel-torch", "run", *_PROGRAM),
            "record without the start-up file, which only an installation has",
            "a last line with the number of records",
        )
        text = "the start-up file is not active here"
        yield CheckResult("start", False if is_on else None, text, step)
    if not is_on:
        step = NextStep(
            _PROGRAM,
            "record a program",
            "a last line with the number of records",
            {"OTEL_TORCH_ENABLED": "1"},
        )
        yield CheckResult("start", None, "OTEL_TORCH_ENABLED is off: nothing is recorded", step)


def _is_startup_file_active(environ: Environ) -> bool:
    code = "import sys; print('otel_torch.startup' in sys.modules)"
    switched_on = {**environ, "OTEL_TORCH_ENABLED": "1"}
    process = subprocess.run(
        [sys.executable, "-c", code], env=switched_on, capture_output=True, text=True
    )
    return process.stdout.strip() == "True"


def find_settings(environ: Environ) -> Iterator[CheckResult]:
    """Yield the variables that are set, which of them win, what is wrong with them, and what they
    select.
    """
    for name, shown in _show_variables(environ).items():
        yield CheckResult("set", None, f"{shown}: {_describe_source(name, environ)}")
    if any(name in environ for name in Settings.names()):
        yield CheckResult(
            "set", None, "what a program passes to otel_torch.start() wins over these"
        )
    for variable, meant in misspelled_settings(environ):
        text = describe_misspelled(variable, meant)
        yield CheckResult("set", False, text, _rename(meant) if meant else None)
    problems: list[str] = []
    selection = None
    try:
        selection = _describe_selection(Settings.from_env(environ, problems.append))
    except UnusableSelection as error:
        problems.append(f"{error}; a program runs on unrecorded")
    for problem in problems:
        yield CheckResult("set", False, problem)
    if selection is not None:
        yield CheckResult("record", None, selection)


def _rename(variable: str) -> NextStep:
    why = "set the variable that was probably meant"
    return NextStep(_PROGRAM, why, "the setting is followed", {variable: "VALUE"})


def _show_variables(environ: Environ) -> dict[str, str]:
    """Return our variables with their values, and only the names of OpenTelemetry's."""
    shown = {name: f"{name}={environ[name]}" for name in Settings.names() if name in environ}
    for name in environ:
        if name.startswith("OTEL_") and not name.startswith("OTEL_TORCH_"):
            shown[name] = f"{name} (value not shown)"
    return dict(sorted(shown.items()))


def _describe_source(name: str, environ: Environ) -> str:
    """Return where the value comes from that a variable would set."""
    overridden = Settings.overridden(environ) | find_overridden(environ)
    if name in overridden:
        return f"not used, because {overridden[name]} is set"
    problems: list[str] = []
    try:
        Settings.from_env({name: environ[name]}, problems.append)
    except UnusableSelection:
        return "not used, and nothing is recorded"
    if any("; using " in problem for problem in problems):
        return "not used, the default is"
    return "from the environment"


def _describe_selection(settings: Settings) -> str:
    if not settings.activations:
        return "regions and steps only, no activations"
    parts = [
        f"modules {_quote(settings.modules, 'all')}",
        f"models {_quote(settings.models, 'all')}",
    ]
    if settings.exclude:
        parts.append(f"without {_quote(settings.exclude, '')}")
    parts.append("all steps" if settings.steps.all else "selected steps")
    return f"{', '.join(settings.capture)} of {', '.join(parts)}: {', '.join(settings.stats)}"


def _quote(pattern: re.Pattern[str] | None, default: str) -> str:
    return f"/{pattern.pattern}/" if pattern else default


def find_recording(environ: Environ) -> Iterator[CheckResult]:
    """Yield whether the recording can be written, and the free space."""
    settings = _usable_settings(environ)
    if settings is None:
        return
    if settings.jsonl is None:
        yield CheckResult("recording", None, "OTEL_TORCH_JSONL is off: none is written")
        return
    if is_url(settings.jsonl):
        yield _check_url(settings.jsonl, environ)
        return
    path = _absolute_path(settings.jsonl, environ)
    if os.path.isdir(path):
        text = f"{settings.jsonl}: is a folder; OTEL_TORCH_JSONL names a file"
        yield CheckResult("recording", False, text)
    else:
        yield _check_folder("recording", settings.jsonl, os.path.dirname(path), settings)


def find_otlp_files(environ: Environ) -> Iterator[CheckResult]:
    """Yield whether the folder of the OTLP files can be written, and the free space."""
    settings = _usable_settings(environ)
    if settings is not None and settings.otlp_file is not None:
        folder = _absolute_path(settings.otlp_file, environ)
        yield _check_folder("otlp files", settings.otlp_file, folder, settings)


def _check_url(setting: str, environ: Environ) -> CheckResult:
    reason = check_place(fill_placeholders(setting, this_job(environ)))
    if reason is None:
        text = f"{setting}: can be written, once the recording in {tempfile.gettempdir()} has ended"
        return CheckResult("recording", True, text)
    return CheckResult("recording", False, f"{setting}: cannot be written: {reason}")


def _absolute_path(template: str, environ: Environ) -> str:
    return os.path.abspath(fill_placeholders(template, this_job(environ)))


def _check_folder(about: str, setting: str, folder: str, settings: Settings) -> CheckResult:
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        return CheckResult(about, False, f"{setting}: {folder} cannot be written to")
    free_gb, limit_gb = shutil.disk_usage(folder).free / 1e9, settings.max_bytes / 1e9
    text = f"{setting}: {free_gb:.1f} GB free, at most {limit_gb:g} GB written"
    return CheckResult(about, True, text)


def find_endpoints(environ: Environ) -> Iterator[CheckResult]:
    """Yield where each OpenTelemetry signal would go."""
    if is_sdk_disabled(environ):
        yield CheckResult("export", None, "OTEL_SDK_DISABLED is true: nothing is exported")
        return
    if (file := find_config_file(environ)) is not None:
        yield _check_config_file(file)
        return
    for signal in OTEL_SIGNALS:
        yield CheckResult("export", None, f"{signal}: {_describe_destination(signal, environ)}")
    settings = _usable_settings(environ)
    signals = settings.signals if settings is not None else ()
    if exporters_by_signal(environ) and "log_events" in signals and "span_events" not in signals:
        step = NextStep(
            _PROGRAM,
            "if the endpoint is Jaeger, send the activations on the spans",
            "events on the spans of steps",
            {"OTEL_TORCH_ENABLED": "1", "OTEL_TORCH_SIGNALS": "spans,span_events"},
        )
        text = "activations: with the logs, which Jaeger does not store"
        yield CheckResult("export", None, text, step)


def _check_config_file(file: str) -> CheckResult:
    if not os.path.isfile(file):
        return CheckResult("export", False, f"OTEL_CONFIG_FILE: {file} is no file")
    return CheckResult(
        "export",
        None,
        f"as {file} says (OTEL_CONFIG_FILE), if opentelemetry-instrument starts the program; "
        "the OTEL_EXPORTER_… variables are not used",
    )


def _describe_destination(signal: str, environ: Environ) -> str:
    variable = f"OTEL_{signal.upper()}_EXPORTER"
    exporter = environ.get(variable, "").strip()
    endpoint = environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT")
    endpoint = endpoint or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if exporter == "none":
        return f"not exported, {variable} is none"
    if endpoint:
        return f"to {show_endpoint(endpoint)}"
    if exporter:
        return f"to the exporter that {variable} names"
    return "no endpoint is named, so nothing is sent"


def find_delivery(environ: Environ) -> Iterator[CheckResult]:
    """Send one span, one event and one metric point, and yield whether each was accepted. A signal
    that OTEL_TORCH_SIGNALS does not select cannot be at fault.
    """
    try:
        from otel_torch.telemetry.probe import probe
    except ImportError as error:
        yield CheckResult("delivery", False, f"not tried: {error}")
        return
    settings = _usable_settings(environ) or Settings.from_env({})
    selected = {CARRIERS[signal] for signal in settings.signals}
    for result in probe(environ):
        text = f"{result.signal}: {result.detail}"
        if result.signal in selected:
            yield CheckResult("delivery", result.accepted, text)
        else:
            yield CheckResult("delivery", None, f"{text}; OTEL_TORCH_SIGNALS does not ask for it")


CHECKS: tuple[Callable[[Environ], Iterator[CheckResult]], ...] = (
    find_versions,
    find_ways,
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


def run_checks(environ: Environ) -> list[CheckResult]:
    """Return the results of all checks in order. A check that raises is a result, and the others
    still run.
    """
    results: list[CheckResult] = []
    for check in CHECKS:
        try:
            results.extend(check(environ))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            results.append(CheckResult(check.__name__, False, text))
    return results


def next_steps(results: Sequence[CheckResult]) -> list[NextStep]:
    """Return what to do about the results: first what cannot work, then this check again.

    >>> next_steps([CheckResult("set", False, "OTEL_TORCH_STEPS='soon'")])[0].line
    'otel-torch doctor'
    """
    is_fine = all(result.ok is not False for result in results)
    shown = (result for result in results if is_fine or result.ok is False)
    steps = [result.next_step for result in shown if result.next_step is not None]
    return steps if is_fine else [*steps, _CHECK_AGAIN]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the report. Return 0, or 2 if a setting cannot work."""
    results = run_checks(dict(os.environ))
    is_fine = all(result.ok is not False for result in results)
    steps = next_steps(results)
    if arguments.json:
        report = {
            "schema": "otel_torch.doctor/1",
            "ok": is_fine,
            "findings": [
                {"about": result.about, "ok": result.ok, "text": result.text} for result in results
            ],
            "next": [step.as_json() for step in steps],
        }
        print(json.dumps(report, indent=2))
    else:
        for result in results:
            print(f"{_MARKS[result.ok]} {result.about:<10} {result.text}")
        if steps:
            print("", *advice_lines(steps), sep="\n")
    return 0 if is_fine else 2
