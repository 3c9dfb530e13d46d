"""OTLP requests as protobuf messages: their classes, counting their items, and cutting them into
smaller requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple


class RequestShape(NamedTuple):
    """How a signal's request is nested. `items` of metrics are metrics, which hold data points."""

    json_key: str
    service: str
    resources: str
    scopes: str
    items: str


SHAPES = {
    "traces": RequestShape("resourceSpans", "Trace", "resource_spans", "scope_spans", "spans"),
    "metrics": RequestShape(
        "resourceMetrics", "Metrics", "resource_metrics", "scope_metrics", "metrics"
    ),
    "logs": RequestShape("resourceLogs", "Logs", "resource_logs", "scope_logs", "log_records"),
}


@cache
def request_class(signal: str, kind: str = "Request") -> Any:
    """Return the protobuf class of a signal's Export…ServiceRequest, or of its `Response`."""
    service = SHAPES[signal].service
    module = import_module(
        f"opentelemetry.proto.collector.{service.lower()}.v1.{service.lower()}_service_pb2"
    )
    return getattr(module, f"Export{service}Service{kind}")


def count_items(signal: str, request: Any) -> int:
    """Return the number of spans, log records or data points in a request."""
    return sum(map(len, _item_lists(signal, request)))


def take_items(signal: str, request: Any, first: int, last: int) -> Any:
    """Return a request with the items [first, last), each with its resource and scope.

    >>> logs = [{"log_records": [{"severity_number": n} for n in range(4)]}]
    >>> request = request_class("logs")(resource_logs=[{"scope_logs": logs}, {"scope_logs": logs}])
    >>> part = take_items("logs", request, 3, 5)
    >>> len(part.resource_logs), count_items("logs", part)
    (2, 2)
    """
    part = request_class(signal)()
    part.CopyFrom(request)
    start = 0  # of the current list, counted over the request
    for items in _item_lists(signal, part):
        length = len(items)
        del items[max(0, min(length, last - start)) :]
        del items[: max(0, first - start)]
        start += length
    _drop_empty(signal, part)
    return part


def _item_lists(signal: str, request: Any) -> Iterator[Any]:
    """Yield the lists of spans, log records or data points of a request, in order."""
    shape = SHAPES[signal]
    for resource in getattr(request, shape.resources):
        for scope in getattr(resource, shape.scopes):
            if signal != "metrics":
                yield getattr(scope, shape.items)
                continue
            for metric in scope.metrics:
                yield from _point_lists(metric)


def _point_lists(metric: Any) -> Iterator[Any]:
    kind = metric.WhichOneof("data")
    if kind is not None:
        yield getattr(metric, kind).data_points


def _drop_empty(signal: str, request: Any) -> None:
    """Remove metrics, scopes and resources without items."""
    shape = SHAPES[signal]
    resources = getattr(request, shape.resources)
    for resource in resources:
        scopes = getattr(resource, shape.scopes)
        for scope in scopes:
            if signal == "metrics":
                _drop(scope.metrics, lambda metric: not any(map(len, _point_lists(metric))))
        _drop(scopes, lambda scope: not getattr(scope, shape.items))
    _drop(resources, lambda resource: not getattr(resource, shape.scopes))


def _drop(messages: Any, is_unwanted: Callable[[Any], bool]) -> None:
    for index in reversed(range(len(messages))):
        if is_unwanted(messages[index]):
            del messages[index]
