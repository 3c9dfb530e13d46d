"""An OTLP receiver in this process, on free ports: gRPC with the usual limit of 4 MiB, and HTTP.

    with Receiver() as receiver:
        run_the_program(OTEL_EXPORTER_OTLP_ENDPOINT=receiver.grpc_endpoint)
    receiver.spans()

Received data is read as plain dicts. The receiver can fail in four ways: `Receiver("reject")` rejects
`rejecting` items of each request, `"unavailable"` answers UNAVAILABLE or 503, `"refuse"` answers
INVALID_ARGUMENT or 400, `"never"` does not answer until it is closed. `mode` may change at run time.
"""

from __future__ import annotations

import gzip
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2 as logs
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as traces

_SIGNALS: dict[str, tuple[str, Any, Any, str]] = {
    "traces": ("trace.v1.TraceService", traces.ExportTraceServiceRequest, traces.ExportTraceServiceResponse, "rejected_spans"),
    "metrics": (
        "metrics.v1.MetricsService", metrics.ExportMetricsServiceRequest, metrics.ExportMetricsServiceResponse,
        "rejected_data_points",
    ),
    "logs": ("logs.v1.LogsService", logs.ExportLogsServiceRequest, logs.ExportLogsServiceResponse, "rejected_log_records"),
}  # fmt: skip
_GRPC_ERRORS = {
    "unavailable": grpc.StatusCode.UNAVAILABLE,
    "refuse": grpc.StatusCode.INVALID_ARGUMENT,
}
_HTTP_ERRORS = {"unavailable": 503, "refuse": 400}


class Receiver:
    """Collects the requests of all three signals.

    Args:
        mode: `accept`, or a failure: see the module.
        rejecting: in mode `reject`, the number of items rejected in each request.
    """

    def __init__(self, mode: str = "accept", *, rejecting: int = 1) -> None:
        self.mode, self.rejecting = mode, rejecting
        # after this number of requests in `mode`, accept
        self.recover_after_failures: int | None = None
        self.requests: dict[str, list[Any]] = {signal: [] for signal in _SIGNALS}
        self.sizes: list[int] = []
        self.headers: list[dict[str, str]] = []
        self._closed = threading.Event()
        self._changed = threading.Condition()

    def __enter__(self) -> Receiver:
        self._pool = ThreadPoolExecutor(8)
        self._grpc = grpc.server(self._pool)
        for signal, (service, request, response, _) in _SIGNALS.items():
            handler = grpc.unary_unary_rpc_method_handler(
                lambda message, context, signal=signal: self._answer_grpc(signal, message, context),
                request_deserializer=request.FromString, response_serializer=response.SerializeToString,
            )  # fmt: skip
            name = f"opentelemetry.proto.collector.{service}"
            self._grpc.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(name, {"Export": handler}),)
            )
        self.grpc_endpoint = f"http://127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"
        self._grpc.start()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver._answer_http(self)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.http_endpoint = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        self._grpc.stop(0).wait(5)
        self._http.shutdown()
        self._http.server_close()
        self._pool.shutdown(wait=False)

    def environment(self, protocol: str = "grpc") -> dict[str, str]:
        """Return the standard variables that export to this receiver over `grpc` or `http`."""
        if protocol == "grpc":
            return {
                "OTEL_EXPORTER_OTLP_ENDPOINT": self.grpc_endpoint,
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            }
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.http_endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        }

    def wait_for(self, condition: Any, timeout: float = 60) -> bool:
        """Wait until `condition()` is true; return whether it was within `timeout` seconds."""
        with self._changed:
            return bool(self._changed.wait_for(condition, timeout))

    # -- received data

    def spans(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return the spans with name, trace_id, span_id, parent_id (hex), start, end (ns), attributes, events,
        links, status, message, resource and scope.
        """
        spans = [
            {
                "name": span.name,
                "trace_id": span.trace_id.hex(),
                "span_id": span.span_id.hex(),
                "parent_id": span.parent_span_id.hex(),
                "start": span.start_time_unix_nano,
                "end": span.end_time_unix_nano,
                "attributes": _attributes(span.attributes),
                "events": [
                    {
                        "name": event.name,
                        "time": event.time_unix_nano,
                        "attributes": _attributes(event.attributes),
                    }
                    for event in span.events
                ],
                "links": [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
                "status": ("UNSET", "OK", "ERROR")[span.status.code],
                "message": span.status.message,
                "dropped_events": span.dropped_events_count,
                **origin,
            }
            for origin, span in self._each("traces", "resource_spans", "scope_spans", "spans")
        ]
        return [span for span in spans if name is None or span["name"] == name]

    def events(self, name: str = "torch.module.activation") -> list[dict[str, Any]]:
        """Return the attributes of all span events with this name, in order of arrival."""
        return [
            event["attributes"]
            for span in self.spans()
            for event in span["events"]
            if event["name"] == name
        ]

    def log_records(self) -> list[dict[str, Any]]:
        """Return the log records with event_name, body, time, attributes, trace_id, span_id,
        severity, resource and scope.
        """
        return [
            {
                "event_name": record.event_name,
                "body": _value(record.body),
                "time": record.time_unix_nano,
                "attributes": _attributes(record.attributes),
                "trace_id": record.trace_id.hex(),
                "span_id": record.span_id.hex(),
                "severity": record.severity_number,
                **origin,
            }
            for origin, record in self._each("logs", "resource_logs", "scope_logs", "log_records")
        ]

    def metric_points(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return the data points with name, unit, kind (gauge, sum, histogram,
        exponential_histogram), time, attributes, resource, scope, and value (gauge, sum) or count,
        sum, min, max (histograms), in order of arrival.
        """
        rows = []
        for origin, metric in self._each("metrics", "resource_metrics", "scope_metrics", "metrics"):
            kind = metric.WhichOneof("data")
            for point in getattr(metric, kind).data_points:
                row = {
                    "name": metric.name,
                    "unit": metric.unit,
                    "description": metric.description,
                    "kind": kind,
                    "time": point.time_unix_nano,
                }
                row |= {"attributes": _attributes(point.attributes), **origin}
                if kind in ("gauge", "sum"):
                    row["value"] = getattr(point, point.WhichOneof("value"))
                else:
                    row |= {
                        "count": point.count,
                        "sum": point.sum,
                        "min": point.min,
                        "max": point.max,
                    }
                rows.append(row)
        return [row for row in rows if name is None or row["name"] == name]

    def _each(self, signal: str, *fields: str) -> Iterator[tuple[dict[str, Any], Any]]:
        for request in list(self.requests[signal]):
            for resource in getattr(request, fields[0]):
                for scope in getattr(resource, fields[1]):
                    origin = {
                        "resource": _attributes(resource.resource.attributes),
                        "scope": scope.scope.name,
                    }
                    for item in getattr(scope, fields[2]):
                        yield origin, item

    # -- answers

    def store(self, signal: str, request: Any, headers: dict[str, str]) -> None:
        """Keep an accepted request; subclasses override this."""
        with self._changed:
            self.requests[signal].append(request)
            self.sizes.append(request.ByteSize())
            self.headers.append(headers)
            self._changed.notify_all()

    def _respond(self, signal: str) -> Any:
        response = _SIGNALS[signal][2]()
        if self.mode == "reject":
            setattr(response.partial_success, _SIGNALS[signal][3], self.rejecting)
            response.partial_success.error_message = "not all of it"
        return response

    def choose_mode(self) -> None:
        """Set `mode` for the next request; subclasses override this."""
        if self.recover_after_failures is not None and self.mode != "accept":
            if not self.recover_after_failures:
                self.mode = "accept"
            self.recover_after_failures -= 1

    def _answer_grpc(self, signal: str, request: Any, context: Any) -> Any:
        self.choose_mode()
        if self.mode in _GRPC_ERRORS:
            context.abort(_GRPC_ERRORS[self.mode], "in this mode")
        if self.mode == "never":
            self._closed.wait()
        self.store(
            signal, request, {key: str(value) for key, value in context.invocation_metadata()}
        )
        return self._respond(signal)

    def _answer_http(self, handler: BaseHTTPRequestHandler) -> None:
        self.choose_mode()
        body = handler.rfile.read(int(handler.headers["content-length"]))
        decompress = {"gzip": gzip.decompress, "deflate": zlib.decompress}.get(
            handler.headers.get("content-encoding", ""), bytes
        )
        signal = handler.path.rsplit("/", 1)[-1]
        if self.mode == "never":
            self._closed.wait()
        status = _HTTP_ERRORS.get(self.mode, 200) if signal in _SIGNALS else 404
        response = b""
        if status == 200:
            self.store(
                signal,
                _SIGNALS[signal][1].FromString(decompress(body)),
                {k.lower(): v for k, v in handler.headers.items()},
            )
            response = self._respond(signal).SerializeToString()
        handler.send_response(status)
        handler.send_header("content-type", "application/x-protobuf")
        handler.send_header("content-length", str(len(response)))
        handler.end_headers()
        handler.wfile.write(response)


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return _attributes(value.kvlist_value.values)
    return getattr(value, kind) if kind else None
