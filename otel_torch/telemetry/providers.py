"""Finds the OpenTelemetry providers that the program itself has installed.

A program may install them after us, because torch is imported first, so they are looked up
whenever they are needed. They are never replaced nor shut down. Private names of the API and the
SDK are read in this file.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
from collections.abc import Callable
from typing import Any

# (module of the API, its function that returns the provider)
_GETTERS = {
    "traces": ("opentelemetry.trace", "get_tracer_provider"),
    "metrics": ("opentelemetry.metrics", "get_meter_provider"),
    "logs": ("opentelemetry._logs", "get_logger_provider"),
}


def find_provider(signal: str) -> Any | None:
    """Return the program's own provider of a signal, if any. Imports nothing and takes a
    microsecond.

    The API's providers are placeholders; any other is real, whether the SDK's or a wrapper of it.
    """
    name, getter = _GETTERS[signal]
    api: Any = sys.modules.get(name)
    if api is None:
        return None
    get: Callable[[], Any] | None = getattr(api, getter, None)
    if get is None:  # the API is being imported
        return None
    provider = get()
    if type(provider).__module__.startswith(name):
        return None
    return provider


def watch_tracer_provider() -> Callable[[], object]:
    """Return a function whose result changes, by identity, when the program installs another
    provider. It is called at the start of every region, so it reads the API's private variable.
    """
    api = sys.modules.get("opentelemetry.trace")
    name = "_TRACER_PROVIDER"
    if api is None:
        return lambda: getattr(sys.modules.get("opentelemetry.trace"), name, None)
    if not hasattr(api, name):  # another version of the API
        return lambda: find_provider("traces")
    return functools.partial(operator.attrgetter(name), api)


def read_event_limit(span: Any) -> int | None:
    """Return how many events a span of the program keeps before it silently drops the oldest; None
    without a limit. The limit is private to the SDK; if unreadable, it is the specification's 128.
    """
    return getattr(getattr(span, "_limits", None), "max_events", 128)


def is_always_sampling(sampler: Any, parent: str) -> bool:
    """Return whether a sampler is known to record and sample every span with such a parent, so that
    it need not be called. Known for the SDK's constant sampler, alone and in `ParentBased`.

    Args:
        parent: `root` for none, else one of `local_parent_sampled`, `remote_parent_not_sampled` …

    >>> from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, DEFAULT_ON, TraceIdRatioBased
    >>> samplers = DEFAULT_ON, ALWAYS_OFF, TraceIdRatioBased(1)
    >>> [is_always_sampling(sampler, "local_parent_sampled") for sampler in samplers]
    [True, False, False]
    """
    from opentelemetry.sdk.trace.sampling import Decision, ParentBased, StaticSampler

    if type(sampler) is ParentBased:
        sampler = getattr(sampler, f"_{parent}", None)
    return (
        type(sampler) is StaticSampler
        and getattr(sampler, "_decision", None) is Decision.RECORD_AND_SAMPLE
    )


def is_sdk_counting_spans() -> bool:
    """Return whether the SDK makes metrics of its own spans. Then each span must be started by its
    tracer.
    """
    value = os.environ.get("OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED", "")
    return value.strip().lower() == "true"
