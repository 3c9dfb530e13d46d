"""The providers that the program itself has installed. It may do so after us, as torch is imported
first: they are looked for whenever they are needed, and never replaced, nor shut down. What is
private to the API's and the SDK's is read here.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
from collections.abc import Callable
from typing import Any

# (the API's module, what it calls its provider)
_WHERE = {
    "traces": ("opentelemetry.trace", "get_tracer_provider"),
    "metrics": ("opentelemetry.metrics", "get_meter_provider"),
    "logs": ("opentelemetry._logs", "get_logger_provider"),
}


def find_provider(signal: str) -> Any | None:
    """The program's own provider of a signal, None where it has installed none. Imports nothing,
    costs a microsecond.

    The API's own providers are placeholders; any other is a real one, whether the SDK's or built
    around it.
    """
    name, getter = _WHERE[signal]
    api: Any = sys.modules.get(name)
    if api is None:
        return None
    get: Callable[[], Any] | None = getattr(api, getter, None)
    if get is None:  # the API is just being imported
        return None
    provider = get()
    if type(provider).__module__.startswith(name):
        return None
    return provider


def watch_tracer_provider() -> Callable[[], object]:
    """A function whose result tells one provider of the program's from the next, and from none, by
    identity. It is called where every region begins, so it reads the API's own variable.
    """
    api = sys.modules.get("opentelemetry.trace")
    name = "_TRACER_PROVIDER"
    if api is None:
        return lambda: getattr(sys.modules.get("opentelemetry.trace"), name, None)
    if not hasattr(api, name):  # another version of the API
        return lambda: find_provider("traces")
    return functools.partial(operator.attrgetter(name), api)


def read_event_limit(span: Any) -> int | None:
    """How many events a span of the program's keeps before it drops the oldest in silence; None is
    no limit.

    The SDK keeps this to itself: where it cannot be read, it is the specification's 128.
    """
    return getattr(getattr(span, "_limits", None), "max_events", 128)


def always_samples(sampler: Any, parent: str) -> bool:
    """Whether a sampler is known to record and sample every span under such a parent, so that it
    need not be asked each time. That is known of the SDK's own constant sampler, alone and behind
    `ParentBased`; of any other it is not.

    parent: `root`, where there is none, or as in `local_parent_sampled`,
    `remote_parent_not_sampled`.

    >>> from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, DEFAULT_ON, TraceIdRatioBased
    >>> [always_samples(one, "local_parent_sampled") for one in (DEFAULT_ON, ALWAYS_OFF, TraceIdRatioBased(1))]
    [True, False, False]
    """
    from opentelemetry.sdk.trace.sampling import Decision, ParentBased, StaticSampler

    if type(sampler) is ParentBased:
        sampler = getattr(sampler, f"_{parent}", None)
    return (
        type(sampler) is StaticSampler
        and getattr(sampler, "_decision", None) is Decision.RECORD_AND_SAMPLE
    )


def counts_spans(environ: Any = os.environ) -> bool:
    """Whether the SDK was told to make metrics of its own spans: then each has to be started by its
    tracer.
    """
    return (
        str(environ.get("OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED", "")).strip().lower() == "true"
    )
