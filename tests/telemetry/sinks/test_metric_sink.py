"""Metrics as a receiver gets them: every step's value, NaN and Inf counted, series bounded."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from otel_torch.records import Losses
from otel_torch.telemetry import self_observation
from otel_torch.telemetry.otlp.queue_items import iterate_metrics
from tests.otlp_receiver import Receiver
from tests.telemetry_support import drive

GAUGE = "torch.module.activation.mean"


def values(receiver, name=GAUGE):
    """Return (module, step label, value), sorted by time."""
    points = sorted(receiver.metric_points(name), key=lambda point: point["time"])
    return [
        (p["attributes"]["torch.module"], p["attributes"].get("torch.step"), p["value"])
        for p in points
    ]


STEPS = (
    "for n in range(5): run_step(n, [record(step=n, mean=float(n))], bounded={bounded})\nfinish()"
)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize(("mode", "bounded", "labelled"), [
    ("label", False, True), ("time", True, False), ("auto", True, True), ("auto", False, False),
])  # fmt: skip
def test_every_steps_value_is_delivered_in_each_mode(
    tmp_path, receiver, protocol, mode, bounded, labelled
):
    drive(
        tmp_path,
        STEPS.format(bounded=bounded),
        OTEL_TORCH_METRIC_STEP=mode,
        **receiver.environment(protocol),
    )
    assert values(receiver) == [("layer", n if labelled else None, float(n)) for n in range(5)]
    points = receiver.metric_points(GAUGE)
    assert {(point["kind"], point["unit"]) for point in points} == {("gauge", "")}
    assert len({point["time"] for point in points}) == 5
    assert [point["value"] for point in receiver.metric_points("torch.step")] == list(range(5))


def test_a_point_has_the_contracts_attributes(tmp_path, receiver):
    drive(tmp_path, "run_step(0, [record(mean=1.0)]); finish()", **receiver.environment())
    (point,) = receiver.metric_points(GAUGE)
    assert point["attributes"] == {
        "torch.model": "Net",
        "torch.module": "layer",
        "torch.tensor": "out",
        "torch.phase": "forward",
    }
    assert point["resource"]["dl.rank"] == 0


def test_of_several_calls_the_gauge_keeps_the_last_and_the_histogram_takes_all(tmp_path, receiver):
    drive(tmp_path, """
run_step(0, [record(call=0, mean=1.0, abs_mean=2.0), record(call=1, mean=3.0, abs_mean=6.0)])
finish()
""", **receiver.environment())  # fmt: skip
    assert values(receiver) == [("layer", None, 3.0)]
    histogram = receiver.metric_points("torch.module.activation.magnitude")[-1]
    assert (histogram["kind"], histogram["count"], histogram["sum"]) == (
        "exponential_histogram",
        2,
        8.0,
    )
    assert (histogram["min"], histogram["max"]) == (2.0, 6.0)


def test_nonfinite_values_are_counted_and_not_sent_as_gauges(tmp_path, receiver):
    drive(tmp_path, """
nan = float("nan")
run_step(0, [record(step=0, mean=nan, abs_mean=nan, min=-1.0, nonfinite=3)])
run_step(1, [record(step=1, mean=0.5, abs_mean=0.5, min=-1.0, nonfinite=2, numel=7)])
finish()
""", **receiver.environment())  # fmt: skip
    assert values(receiver) == [("layer", None, 0.5)]
    assert [value for *_, value in values(receiver, "torch.module.activation.min")] == [-1.0, -1.0]
    counter = receiver.metric_points("torch.module.activation.nonfinite")[-1]
    assert (counter["value"], counter["unit"], counter["kind"]) == (5, "{element}", "sum")
    assert receiver.metric_points("torch.module.activation.magnitude")[-1]["count"] == 1
    assert not receiver.metric_points("torch.module.activation.numel")
    assert [
        p["kind"]
        for p in receiver.metric_points()
        if p["name"] == "torch.module.activation.nonfinite"
    ] == ["sum"]


def test_regions_have_a_histogram_of_their_duration(tmp_path, receiver):
    drive(tmp_path, """
for seconds in (1, 2):
    scope = Scope("region", "fastvideo.region::r", attributes={"torch.region": "r"}, start_ns=10**9)
    recorder.open(scope); scope.end_ns = (1 + seconds) * 10**9; recorder.close(scope)
finish()
""", **receiver.environment())  # fmt: skip
    point = receiver.metric_points("torch.region.duration")[-1]
    assert (point["unit"], point["attributes"], point["count"], point["sum"]) == (
        "s",
        {"torch.region": "r"},
        2,
        3.0,
    )


def test_series_beyond_the_limit_are_not_sent_but_counted_and_said(tmp_path, receiver):
    done = drive(tmp_path, """
run_step(0, [record(f"layer.{n}", mean=1.0) for n in range(50)])
finish()
""", OTEL_TORCH_METRIC_SERIES="20", OTEL_TORCH_METRIC_STEP="label", **receiver.environment())  # fmt: skip
    assert len(receiver.metric_points(GAUGE)) == 20
    assert "more than 20 metric series" in done.stderr and "OTEL_TORCH_METRIC_SERIES" in done.stderr
    assert "30 metric points (series_limit)" in done.stderr
    dropped = receiver.metric_points("otel_torch.records.dropped")[-1]
    assert (dropped["value"], dropped["unit"], dropped["attributes"]["reason"]) == (
        30,
        "{record}",
        "series_limit",
    )


def test_losses_have_the_names_of_the_conventions_too(tmp_path, receiver):
    with Receiver("refuse") as refusing:
        drive(tmp_path, """
for step in range(2): run_step(step, [record(f"layer.{n}", step) for n in range(5)])
recorder.drain(30)
finish()
""", **receiver.environment("http"),
              OTEL_EXPORTER_OTLP_LOGS_ENDPOINT=f"{refusing.http_endpoint}/v1/logs")  # fmt: skip
    (ours,) = receiver.metric_points("otel_torch.records.dropped")[-1:]
    assert (ours["value"], ours["attributes"]) == (10, {"what": "log_event", "reason": "refused"})
    found = {
        (point["name"], point["attributes"].get("error.type")): (point["value"], point["unit"])
        for point in receiver.metric_points()
        if point["name"].startswith("otel.sdk.")
    }
    # spans and points arrived, so nothing is said of them
    assert found == {("otel.sdk.exporter.log.exported", "refused"): (10, "{log_record}")}


def test_what_was_passed_to_the_exporter_was_processed():
    losses, reader = Losses(), InMemoryMetricReader()
    meter = MeterProvider([reader], shutdown_on_exit=False).get_meter("tests")
    self_observation.create_counters(meter, losses, lambda: {"span": 5, "log_event": 7})
    assert reader.get_metrics_data() is None
    losses.count("span", "queue_full", 2)
    losses.count("span", "rejected", 3)
    losses.count("metric_point", "shutdown", 4)
    losses.count("log_event", "no such reason", 1)
    losses.count("span_event", "refused", 1)
    losses.count("record", "disk", 1)
    found = {
        (metric.name, point.attributes.get("error.type")): point.value
        for metric in iterate_metrics(reader.get_metrics_data())
        for point in metric.data.data_points
    }
    assert found == {
        ("otel.sdk.processor.span.processed", "queue_full"): 2,
        ("otel.sdk.processor.span.processed", None): 5 + 3,
        ("otel.sdk.exporter.span.exported", "rejected"): 3,
        ("otel.sdk.exporter.span.exported", None): 5,
        ("otel.sdk.exporter.metric_data_point.exported", "shutdown"): 4,
    }


def test_every_metric_of_the_conventions_exists_with_its_unit():
    from opentelemetry.semconv._incubating.metrics import otel_metrics

    reader = InMemoryMetricReader()
    meter = MeterProvider([reader], shutdown_on_exit=False).get_meter("tests")
    for name, (unit, _, _) in self_observation.METRICS.items():
        create = getattr(otel_metrics, f"create_{name.replace('.', '_')}")
        create(meter).add(1)
        (metric,) = [
            metric for metric in iterate_metrics(reader.get_metrics_data()) if metric.name == name
        ]
        assert metric.unit == unit


def test_auto_goes_on_without_the_label_where_it_would_take_too_many_series(tmp_path, receiver):
    done = drive(tmp_path, """
for step in range(10):
    run_step(step, [record(f"layer.{n}", step, mean=float(step)) for n in range(10)], bounded=True)
finish()
""", OTEL_TORCH_METRIC_SERIES="60", **receiver.environment())  # fmt: skip
    sent = values(receiver)
    assert sorted({step for _, step, value in sent if step is not None}) == [0, 1, 2, 3, 4]
    assert sorted(value for _, step, value in sent if step is None) == sorted(
        float(step) for step in range(5, 10) for _ in range(10)
    )
    assert len(sent) == 100
    assert "without torch.step as an attribute" in done.stderr
    assert "lost" not in done.stderr


@pytest.mark.parametrize("views", ["[]", "[View(instrument_name='mine', name='yours')]"])
def test_the_programs_own_meter_provider_is_used_and_its_limit_is_said(tmp_path, receiver, views):
    """With views it has to make the metrics itself; else our queue sends what it would send."""
    done = drive(tmp_path, """
from opentelemetry import metrics
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.metrics.view import View
from opentelemetry.sdk.resources import Resource
reader = PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=os.environ["PROGRAM"]), export_interval_millis=3600_000)
provider = MeterProvider([reader], resource=Resource({"service.name": "the program"}), views=eval(os.environ["VIEWS"]))
metrics.set_meter_provider(provider)
for n in range(3): run_step(n, [record(step=n, mean=float(n), abs_mean=1.0)])
finish()
assert metrics.get_meter_provider() is provider
if provider._sdk_config.views: provider.shutdown()
""", PROGRAM=receiver.grpc_endpoint, VIEWS=views)  # fmt: skip
    sent = [value for *_, value in values(receiver)]
    assert sent == [2.0] if views != "[]" else [0.0, 1.0, 2.0]
    assert receiver.metric_points("torch.module.activation.magnitude")[-1]["count"] == 3
    assert {point["resource"]["service.name"] for point in receiver.metric_points()} == {
        "the program"
    }
    assert ("only the last value" in done.stderr) is (views != "[]")


def test_series_are_found_and_counted_in_the_thread_that_sends(tmp_path, receiver):
    done = drive(tmp_path, """
import threading
from otel_torch.telemetry.sinks import metric_sink
threads, take = set(), metric_sink.MetricSink._count_step
def taking(*arguments):
    threads.add(threading.current_thread().name)
    return take(*arguments)
metric_sink.MetricSink._count_step = taking
for n in range(3): run_step(n, [record(step=n, mean=float(n), abs_mean=1.0)])
finish()
print(threads)
""", **receiver.environment())  # fmt: skip
    assert done.stdout.strip() == "{'otel_torch-metrics'}"
    assert receiver.metric_points("torch.module.activation.magnitude")[-1]["count"] == 3


@pytest.mark.parametrize("spread", [0.1, 5.0])
def test_magnitudes_are_counted_as_the_sdk_would(spread):
    import random

    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation, View

    from otel_torch.telemetry.sinks.histograms import MagnitudeMetric

    draw = random.Random(0)
    values = [0.0, *(draw.lognormvariate(0, spread) for _ in range(1000)), 0.0]
    reader = InMemoryMetricReader()
    view = View(instrument_name="m", aggregation=ExponentialBucketHistogramAggregation())
    histogram = (
        MeterProvider([reader], views=[view], shutdown_on_exit=False)
        .get_meter("t")
        .create_histogram("m")
    )
    ours = MagnitudeMetric("m", "", 0, delta=False)
    for value in values:
        histogram.record(value)
        ours.add_all(["one"], [value])
    expected = (
        reader.get_metrics_data()
        .resource_metrics[0]
        .scope_metrics[0]
        .metrics[0]
        .data.data_points[0]
    )
    actual = ours.collect({"one": {}}, 1).data.data_points[0]
    for name in ("count", "scale", "zero_count", "min", "max"):
        assert getattr(actual, name) == getattr(expected, name)
    assert actual.sum == pytest.approx(expected.sum)
    trimmed = list(expected.positive.bucket_counts)
    while trimmed and not trimmed[-1]:
        trimmed.pop()
    assert (actual.positive.offset, list(actual.positive.bucket_counts)) == (
        expected.positive.offset,
        trimmed,
    )


@pytest.mark.parametrize("delta", [False, True])
def test_durations_are_counted_from_any_thread_as_the_sdk_would(delta):
    import threading

    from opentelemetry.sdk.metrics import Histogram, MeterProvider
    from opentelemetry.sdk.metrics.export import AggregationTemporality, InMemoryMetricReader

    from otel_torch.telemetry.sinks.histograms import DurationMetric

    bounds = [0.01, 0.1, 1]
    kinds = {
        Histogram: AggregationTemporality.DELTA if delta else AggregationTemporality.CUMULATIVE
    }
    reader = InMemoryMetricReader(preferred_temporality=kinds)
    meter = MeterProvider([reader], shutdown_on_exit=False).get_meter("t")
    histogram = meter.create_histogram(
        "d", "s", "how long", explicit_bucket_boundaries_advisory=bounds
    )
    ours = DurationMetric("d", "how long", "torch.region", bounds, 0, delta=delta)
    assert ours.collect(1) is None
    values = [0.0, 0.01, 0.05, 1.0, 7.0] * 1000

    def add_all():
        for value in values[:2500]:
            ours.add("r", value)

    for _ in range(2):
        for value in values:
            histogram.record(value, {"torch.region": "r"})
        threads = [threading.Thread(target=add_all) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (expected,) = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
        actual = ours.collect(2)
        assert (actual.name, actual.unit, actual.description) == (
            expected.name,
            expected.unit,
            expected.description,
        )
        assert actual.data.aggregation_temporality == expected.data.aggregation_temporality
        actual_point, expected_point = actual.data.data_points[0], expected.data.data_points[0]
        for name in ("attributes", "count", "min", "max"):
            assert getattr(actual_point, name) == getattr(expected_point, name), name
        for name in ("explicit_bounds", "bucket_counts"):
            assert list(getattr(actual_point, name)) == list(getattr(expected_point, name)), name
        assert actual_point.sum == pytest.approx(expected_point.sum)
