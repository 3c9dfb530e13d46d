"""Records of a training as a receiver gets them: attributes of the step's span and metrics of their
own, no activations.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from otel_torch.training_quantities import (
    DEVICE_MEMORY,
    NONFINITE,
    RATES,
    ROWS,
    SCOPE_ATTRIBUTES,
    STEP_DURATION,
)
from tests.otlp_receiver import Receiver
from tests.telemetry_support import drive

PAGE = (Path(__file__).parents[3] / "docs" / "opentelemetry-names.md").read_text()
ALL_SIGNALS = "spans,span_events,log_events,metrics"
TRAIN = """
def train(tensor, value, module="", step=0, call=0):
    stats = {"abs_mean": abs(value), "mean": value}
    return Record(module, tensor, step, call, 0, "Net", "train", None, stats, time.time_ns())

nan, inf = float("nan"), float("inf")
"""


def values(receiver: Receiver, metric: str) -> list[tuple[dict[str, object], object]]:
    """Return (attributes, value) of a metric's points, without the model, in order of time."""
    points = sorted(receiver.metric_points(metric), key=lambda point: point["time"])
    assert all(point["attributes"].pop("torch.model") == "Net" for point in points)
    return [(point["attributes"], point["value"]) for point in points]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_values_of_a_model_are_attributes_of_its_step_and_no_events(tmp_path, receiver, protocol):
    drive(tmp_path, TRAIN + """
run_step(3, [record(mean=0.5), train("loss", 2.5), train("grad_norm", 0.75), train("grad_norm", 0.5, "layer"),
             train("lr[0]", 0.1)], training=True)
finish()
""", OTEL_TORCH_SIGNALS=ALL_SIGNALS, **receiver.environment(protocol))  # fmt: skip
    (step,) = receiver.spans("torch.step")
    assert step["attributes"] == {
        "torch.step": 3,
        "torch.loop": 0,
        "torch.model": "Net",
        "torch.training.loss": 2.5,
        "torch.training.gradient_norm": 0.75,
        "torch.training.learning_rate": 0.1,
    }
    assert [event["attributes"]["torch.phase"] for event in step["events"]] == ["forward"]
    assert [log["attributes"]["torch.phase"] for log in receiver.log_records()] == ["forward"]
    activations = [
        point for point in receiver.metric_points() if point["name"].startswith("torch.module")
    ]
    assert {point["attributes"]["torch.phase"] for point in activations} == {"forward"}


def test_several_values_of_a_step_are_listed_beside_the_one_that_stands_for_it(tmp_path, receiver):
    drive(tmp_path, TRAIN + """
run_step(0, [train("loss", 3.0), train("loss", 2.0, call=1), train("loss", nan, call=2),
             train("lr[decay]", 0.1), train("lr[rest]", 0.01)], training=True)
finish()
""", **receiver.environment())  # fmt: skip
    (step,) = receiver.spans("torch.step")
    attributes = {
        key.removeprefix("torch.training."): value
        for key, value in step["attributes"].items()
        if key.startswith("torch.training.")
    }
    assert attributes == {
        "loss": "NaN",
        "loss.values": ["3.0", "2.0", "NaN"],
        "learning_rate": 0.1,
        "learning_rate.values": [0.1, 0.01],
    }


def test_a_list_of_values_has_the_last_hundred(tmp_path, receiver):
    drive(tmp_path, TRAIN + """
run_step(0, [train("loss", float(call), call=call) for call in range(250)], training=True)
finish()
""", **receiver.environment())  # fmt: skip
    (step,) = receiver.spans("torch.step")
    assert step["attributes"]["torch.training.loss"] == 249.0
    assert step["attributes"]["torch.training.loss.values"] == [float(n) for n in range(150, 250)]


def test_each_quantity_is_a_metric_with_its_unit_and_description(tmp_path, receiver):
    rows = [f'train("{name}", 1.0, step=step)' for name in ROWS]
    drive(tmp_path, TRAIN + f"""
for step in range(2):
    run_step(step, [{", ".join(rows)}], training=True)
finish()
""", **receiver.environment())  # fmt: skip
    for quantity in ROWS.values():
        points = receiver.metric_points(quantity.metric)
        assert {(point["unit"], point["description"]) for point in points} == {
            (quantity.unit, quantity.text)
        }
        kind, total = ("sum", 2) if quantity.kind == "counter" else ("gauge", 1.0)
        assert {point["kind"] for point in points} == {kind}
        assert points[-1]["value"] == total
        assert kind == "sum" or len({point["time"] for point in points}) == 2


@pytest.mark.parametrize("mode", ["time", "label"])
def test_a_point_names_the_model_the_module_or_the_group(tmp_path, receiver, mode):
    drive(tmp_path, TRAIN + """
run_step(7, [train("update_ratio", 0.5, step=7), train("update_ratio", 0.25, "layer", step=7), train("lr[decay]", 0.1, step=7),
             train("loss", 3.0, step=7), train("loss", 2.0, step=7, call=1)], training=True)
finish()
""", OTEL_TORCH_METRIC_STEP=mode, **receiver.environment())  # fmt: skip
    step = {"torch.step": 7} if mode == "label" else {}
    assert values(receiver, "torch.training.update_ratio") == [
        (step, 0.5),
        ({"torch.module": "layer"} | step, 0.25),
    ]
    assert values(receiver, "torch.training.learning_rate") == [
        ({"torch.param_group": "decay"} | step, 0.1)
    ]
    assert values(receiver, "torch.training.loss") == [(step, 2.0)]


def test_nonfinite_values_are_counted_and_not_sent_as_gauges(tmp_path, receiver):
    drive(tmp_path, TRAIN + """
for step, loss in enumerate((nan, 1.0, inf)):
    run_step(step, [train("loss", loss, step=step), train("grad_norm", -inf if step else 1.0, "layer", step)], training=True)
finish()
""", **receiver.environment())  # fmt: skip
    assert [value for _, value in values(receiver, "torch.training.loss")] == [1.0]
    counts = {
        point["attributes"]["torch.tensor"]: (
            point["attributes"].get("torch.module"),
            point["value"],
        )
        for point in receiver.metric_points(NONFINITE.metric)
    }
    assert counts == {"loss": (None, 2), "grad_norm": ("layer", 2)}
    assert {point["unit"] for point in receiver.metric_points(NONFINITE.metric)} == {"{value}"}
    assert not receiver.metric_points("torch.module.activation.nonfinite")


def test_skipped_steps_are_counted_from_zero(tmp_path, receiver):
    drive(tmp_path, TRAIN + """
for step in range(4): run_step(step, [train("skipped", float(step == 2), step=step)], training=True)
run_step(4, [train("loss", 1.0, step=4)], training=True)
finish()
""", **receiver.environment())  # fmt: skip
    assert values(receiver, "torch.training.skipped_steps")[-1] == ({}, 1)


STEP_OF_TWO_SECONDS = """
scope = Scope("step", "torch.step", False, {"torch.step": 5, "torch.model": "Net"}, start_ns=10**9, training=True)
recorder.open(scope)
scope.attributes |= {"torch.training.samples": 8, "torch.training.tokens": 1024, "torch.training.device_memory": 4096}
scope.end_ns = 3 * 10**9
recorder.close(scope)
"""


def test_duration_throughput_and_memory_come_from_the_scope_of_the_step(tmp_path, receiver):
    drive(tmp_path, STEP_OF_TWO_SECONDS + "run_step(0, [record(mean=1.0)]); finish()",
          **receiver.environment())  # fmt: skip
    duration = receiver.metric_points(STEP_DURATION.metric)[-1]
    assert (duration["unit"], duration["description"]) == ("s", STEP_DURATION.text)
    assert (duration["count"], duration["sum"]) == (1, 2.0)  # the other step is no training step
    assert duration["attributes"] == {"torch.model": "Net"}
    sent = {name: values(receiver, quantity.metric) for name, quantity in SCOPE_ATTRIBUTES.items()}
    samples, tokens = sorted(RATES)
    assert sent == {samples: [({}, 4.0)], tokens: [({}, 512.0)], DEVICE_MEMORY: [({}, 4096.0)]}
    (step,) = [span for span in receiver.spans("torch.step") if span["start"] == 10**9]
    assert step["attributes"]["torch.training.samples"] == 8


def test_values_of_a_model_are_sent_however_many_series_its_modules_have(tmp_path, receiver):
    done = drive(tmp_path, TRAIN + """
run_step(0, [record(f"layer.{n}", mean=1.0) for n in range(50)])
run_step(1, [train("loss", 2.5, step=1), train("grad_norm", 1.0, "layer.0", step=1)], training=True)
finish()
""", OTEL_TORCH_METRIC_SERIES="20", **receiver.environment())  # fmt: skip
    assert values(receiver, "torch.training.loss") == [({}, 2.5)]
    assert values(receiver, "torch.training.gradient_norm") == []
    assert "31 metric points (series_limit)" in done.stderr


def test_the_programs_own_meter_provider_gets_the_same_metrics(tmp_path, receiver):
    drive(tmp_path, TRAIN + """
from opentelemetry import metrics
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
reader = PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=os.environ["PROGRAM"]), export_interval_millis=3600_000)
metrics.set_meter_provider(MeterProvider([reader]))
run_step(0, [train("loss", 2.5), train("skipped", 1.0), train("grad_norm", nan)], training=True)
""" + STEP_OF_TWO_SECONDS + "finish()", PROGRAM=receiver.grpc_endpoint)  # fmt: skip
    loss = receiver.metric_points("torch.training.loss")[-1]
    assert (loss["value"], loss["description"]) == (2.5, ROWS["loss"].text)
    assert values(receiver, "torch.training.skipped_steps")[-1] == ({}, 1)
    assert values(receiver, NONFINITE.metric)[-1] == ({"torch.tensor": "grad_norm"}, 1)
    assert values(receiver, "torch.training.throughput.samples")[-1] == ({}, 4.0)
    assert receiver.metric_points(STEP_DURATION.metric)[-1]["count"] == 2


def test_the_page_of_names_has_every_metric_with_its_unit():
    quantities = [*ROWS.values(), *SCOPE_ATTRIBUTES.values(), NONFINITE, STEP_DURATION]
    table = re.findall(r"^\| `(torch\.training\.[\w.]+)` \| (\w+), (\S+) \|", PAGE, re.M)
    assert table == [
        (each.metric, each.kind, f"`{each.unit}`" if each.unit else "none") for each in quantities
    ]


def test_broken_laws_are_named_on_the_step_and_in_the_metric(tmp_path, receiver):
    drive(tmp_path, TRAIN + """
run_step(4, [record(mean=0.5), train("broken_law[same_batch]", 1.0), train("broken_law[not_held]", 1.0)],
         training=True)
finish()
""", OTEL_TORCH_SIGNALS=ALL_SIGNALS, OTEL_TORCH_METRIC_STEP="label", **receiver.environment("http"))  # fmt: skip
    (step,) = receiver.spans("torch.step")
    assert step["attributes"]["torch.training.broken_laws"] == ["same_batch", "not_held"]
    points = values(receiver, "torch.training.broken_laws")
    assert [(attributes["torch.law"], value) for attributes, value in points] == [
        ("same_batch", 1.0), ("not_held", 1.0)
    ]  # fmt: skip
