"""The providers that the program itself has installed. It may do so after us, as torch is imported first: they are looked for
whenever they are needed, and never replaced, nor shut down."""

from __future__ import annotations

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
    """The program's own provider of a signal, None where it has installed none. Imports nothing, costs a microsecond.

    The API's own providers are placeholders; any other is a real one, whether the SDK's or built around it.
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


def read_event_limit(span: Any) -> int | None:
    """How many events a span of the program's keeps before it drops the oldest in silence; None is no limit.

    The SDK keeps this to itself: where it cannot be read, it is the specification's 128.
    """
    return getattr(getattr(span, "_limits", None), "max_events", 128)
