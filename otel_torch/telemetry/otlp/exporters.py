"""Reads from the standard OpenTelemetry variables which exporters each signal has. Imports nothing
of OpenTelemetry.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from otel_torch.process.console import say_once
from otel_torch.settings import split_list
from otel_torch.telemetry.otlp.answer import explain_path

OTEL_SIGNALS = ("traces", "metrics", "logs")
# the OpenTelemetry signal that carries each signal of OTEL_TORCH_SIGNALS
CARRIERS = {"spans": "traces", "span_events": "traces", "log_events": "logs", "metrics": "metrics"}
_EXPORTER_BY_PROTOCOL = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}


def exporters_by_signal(environ: Mapping[str, str] = os.environ) -> dict[str, list[str]]:
    """Return the exporter names of each OpenTelemetry signal; a signal without any is absent.

    Exporters are chosen as the SDK chooses them, except that an endpoint alone implies `otlp`. A
    configuration file takes the place of all these variables.

    >>> exporters_by_signal(
    ...     {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4317", "OTEL_LOGS_EXPORTER": "none"}
    ... )
    {'traces': ['otlp_proto_grpc'], 'metrics': ['otlp_proto_grpc']}
    >>> exporters_by_signal({})
    {}
    """
    if is_sdk_disabled(environ) or find_config_file(environ):
        return {}
    exporters = {}
    for signal in OTEL_SIGNALS:
        resolve = _make_resolver(signal, environ)
        resolved = [resolve(name) for name in _read_exporter_names(signal, environ)]
        names = [name for name in resolved if name]
        if names:
            exporters[signal] = names
    return exporters


def find_otlp_exporter(signal: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the OTLP exporter for a signal's endpoint, whatever OTEL_<SIGNAL>_EXPORTER says; None
    if there is no endpoint or its protocol is not supported.

    >>> endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4317"}
    >>> find_otlp_exporter("logs", endpoint | {"OTEL_LOGS_EXPORTER": "console"})
    'otlp_proto_grpc'
    """
    return _make_resolver(signal, environ)("otlp") if _has_endpoint(signal, environ) else None


def is_sdk_disabled(environ: Mapping[str, str] = os.environ) -> bool:
    return environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def find_config_file(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the file of OpenTelemetry's declarative configuration, if OTEL_CONFIG_FILE names one.

    https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/#declarative-configuration
    """
    return environ.get("OTEL_CONFIG_FILE", "").strip() or None


def find_overridden(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the standard variables of exporters that are set but not used, each with what wins.

    >>> find_overridden({"OTEL_CONFIG_FILE": "otel.yaml", "OTEL_TRACES_EXPORTER": "console"})
    {'OTEL_TRACES_EXPORTER': 'OTEL_CONFIG_FILE'}
    >>> find_overridden({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1"})
    {}
    """
    if is_sdk_disabled(environ):
        winner = "OTEL_SDK_DISABLED"
    elif find_config_file(environ):
        winner = "OTEL_CONFIG_FILE"
    else:
        return {}
    chosen = {f"OTEL_{signal.upper()}_EXPORTER" for signal in OTEL_SIGNALS}
    names = [name for name in environ if name in chosen or name.startswith("OTEL_EXPORTER_")]
    return dict.fromkeys(names, winner)


def _has_endpoint(signal: str, environ: Mapping[str, str]) -> bool:
    names = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return any(environ.get(name, "").strip() for name in names)


def _check_endpoint(signal: str, environ: Mapping[str, str]) -> None:
    """Report an endpoint of all signals whose path is that of one."""
    own = environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "").strip()
    shared = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip()
    if shared and not own and (mistake := explain_path(f"{shared}/v1/{signal}", signal)):
        say_once(mistake)


def _read_exporter_names(signal: str, environ: Mapping[str, str]) -> list[str]:
    names = split_list(environ.get(f"OTEL_{signal.upper()}_EXPORTER", ""))
    if names:
        return [name for name in names if name.lower() != "none"]
    return ["otlp"] if _has_endpoint(signal, environ) else []


def _make_resolver(signal: str, environ: Mapping[str, str]) -> Callable[[str], str | None]:
    """Return a function that replaces `otlp` by the exporter of the configured protocol."""
    variables = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    variable, protocol = "", "grpc"
    for name in variables:
        if environ.get(name, "").strip():
            variable, protocol = name, environ[name].strip()
            break

    def resolve(name: str) -> str | None:
        if name != "otlp":
            return name
        if protocol not in _EXPORTER_BY_PROTOCOL:
            say_once(
                f"{variable}={protocol!r} is not supported, {signal} are not sent; "
                f"use {' or '.join(_EXPORTER_BY_PROTOCOL)}"
            )
        elif protocol != "grpc":
            _check_endpoint(signal, environ)
        return _EXPORTER_BY_PROTOCOL.get(protocol)

    return resolve
