"""The page of OpenTelemetry names has those that the code has, and what arrives obeys it."""

import ast
import importlib
import importlib.util
import pathlib
import re
import runpy
from types import SimpleNamespace

import pytest

from otel_torch.bootstrap import FRAMEWORKS
from tests.otlp_receiver import Receiver
from tests.support import run_python

ROOT = pathlib.Path(__file__).parents[2]
MADE = runpy.run_path(str(ROOT / "docs" / "make_opentelemetry_names.py"))
PAGE = SimpleNamespace(**MADE)
METRICS = {
    name: (metric, signal) for signal, group in PAGE.METRICS for name, metric in group.items()
}
NAMESPACES = ("torch", "otel_torch", "dl", "fastvideo")
NAME = re.compile(rf"(?:{'|'.join(NAMESPACES)})(?:\.[a-z_]+)+(?:\.|::)?")


def test_the_page_is_made_from_the_tables():
    page = (ROOT / "docs" / "opentelemetry-names.md").read_text()
    assert page == PAGE.make_page(), "run `make docs`"


def is_module(name):
    """Return whether a literal names a module, or begins the names of some. Imports none."""
    package, *rest = name.rstrip(".").split(".")
    spec = importlib.util.find_spec(package)
    if spec is None:
        return False
    place = pathlib.Path(spec.origin).parent.joinpath(*rest)
    return place.is_dir() or place.with_suffix(".py").exists()


def framework_modules():
    """Return the names of modules that frameworks are known by."""
    return {
        module
        for framework in FRAMEWORKS
        for module in importlib.import_module(f"otel_torch.frameworks.{framework}").HOOKS
    }


def names_in_the_code():
    """Return the literals that look like a name of telemetry, by the files that hold them.

    Literals `otel_torch.…` outside of the telemetry are names of hooks and operators, literals
    `torch.…` of a comparison are types.
    """
    names = {}
    for path in sorted((ROOT / "otel_torch").rglob("*.py")):
        if "parity" in path.parts:
            continue
        is_telemetry = "telemetry" in path.parts
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            if NAME.fullmatch(node.value) and (
                is_telemetry or not node.value.startswith("otel_torch.")
            ):
                names.setdefault(node.value, set()).add(str(path.relative_to(ROOT)))
    return names


def names_on_the_page():
    """Return every name of the page in our namespaces, up to where a part of it is variable."""
    tables = (PAGE.ATTRIBUTES, PAGE.SPANS, PAGE.EVENTS, METRICS)
    return {
        name.partition("<")[0]
        for table in tables
        for name in table
        if name.startswith(tuple(f"{space}." for space in NAMESPACES))
    }


def test_code_and_page_have_the_same_names():
    in_code, on_page, modules = names_in_the_code(), names_on_the_page(), framework_modules()
    unknown = {
        name: paths
        for name, paths in in_code.items()
        if name not in on_page | modules
        and not is_module(name)
        # the code completes the name
        and not any(full.startswith(f"{name.rstrip('.')}.") for full in on_page)
    }
    assert unknown == {}
    completed = {*PAGE.ACTIVATION_METRICS, "torch.training."}
    completed |= {f"fastvideo.{field}" for field in PAGE._REQUEST_FIELDS}
    assert on_page - in_code.keys() == completed


def test_the_phases_are_those_of_the_glossary():
    (phases,) = re.findall(
        r"^\| phase \| (.*) \|$", (ROOT / "docs" / "architecture.md").read_text(), re.M
    )
    assert {*PAGE.PHASES, "train"} == set(phases.split(", "))


# -- what arrives

TRAIN = """
import torch
from torch import nn

import otel_torch

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
decayed, rest = [model[0].weight], [model[0].bias, *model[2].parameters()]
optimizer = torch.optim.AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0.0}])
for step in range(3):
    for part in torch.ones(2, 8, 4) * (step + 1):
        loss = model(part).square().mean() * (float("nan") if step == 2 else 1)
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad(), otel_torch.region("check"):
    model(torch.ones(2, 4))
try:
    model(torch.ones(2, 3))
except RuntimeError:
    pass
"""
TYPES = {
    "string": lambda value: type(value) is str,
    "boolean": lambda value: type(value) is bool,
    "int": lambda value: type(value) is int,
    "double": lambda value: type(value) is float,
    "int[]": lambda value: {*map(type, value)} <= {int},
    "double[]": lambda value: {*map(type, value)} <= {float},
    "string[]": lambda value: {*map(type, value)} <= {str},
}
FOREIGN = re.compile(r"service\.name|telemetry\.sdk\..*")


@pytest.fixture(scope="module")
def arrived(tmp_path_factory):
    with Receiver() as receiver:
        run_python(
            tmp_path_factory.mktemp("conventions"),
            TRAIN,
            OTEL_TORCH_SIGNALS="spans,span_events,log_events,metrics",
            OTEL_TORCH_STATS=",".join(PAGE.STATISTICS),
            OTEL_TORCH_REGIONS="registered,check",
            **receiver.environment(),
        )
    return receiver


def row_of(table, name):
    """Return the row of a name, the first one that fits if its part in <> is variable."""
    if name in table:
        return table[name]
    patterns = {re.sub(r"<\w+>", ".+", re.escape(row)): row for row in table if "<" in row}
    return table[next(row for pattern, row in patterns.items() if re.fullmatch(pattern, name))]


def assert_obeys(attributes, levels):
    """Check the attributes of one item: none is missing or unknown, and each has its type."""
    required = {name for name, level in levels.items() if level == PAGE.REQUIRED}
    assert required <= attributes.keys()
    for name, value in attributes.items():
        row_of(levels, name)
        row = row_of(PAGE.ATTRIBUTES, name)
        if name.startswith("torch.stat."):
            row = PAGE.STATISTICS[name.removeprefix("torch.stat.")]
        types = row.type.split(" or ")
        is_spelled = "double" in types and value in ("NaN", "Infinity", "-Infinity")
        assert is_spelled or any(TYPES[kind](value) for kind in types), f"{name}={value!r}"


def test_spans_and_their_events_obey_the_page(arrived):
    spans = arrived.spans()
    names = {"torch.run", "torch.step", "torch.forward", "torch.backward", "torch.optimizer.step"}
    assert {span["name"] for span in spans} == names | {"check"}
    events = [event for span in spans for event in span["events"]]
    assert {"torch.module.activation", "exception"} == {event["name"] for event in events}
    for span in spans:
        assert_obeys(
            span["attributes"], row_of(PAGE.SPANS, span["name"]).attributes | PAGE.ANY_SPAN
        )
    for event in events:
        assert_obeys(event["attributes"], PAGE.EVENTS[event["name"]].attributes)


def test_log_events_and_span_events_are_the_same(arrived):
    def content(time, attributes):
        return time, sorted(attributes.items(), key=str)

    events = [event for span in arrived.spans() for event in span["events"]]
    on_spans = [
        content(event["time"], event["attributes"])
        for event in events
        if event["name"] == PAGE.ACTIVATION
    ]
    in_logs = [content(log["time"], log["attributes"]) for log in arrived.log_records()]
    assert len(in_logs) > 10
    assert sorted(on_spans, key=str) == sorted(in_logs, key=str)


def test_log_records_obey_the_page(arrived):
    logs = arrived.log_records()
    traces = {(span["trace_id"], span["span_id"]) for span in arrived.spans("torch.step")}
    assert {log["event_name"] for log in logs} == {"torch.module.activation"}
    for log in logs:
        assert_obeys(log["attributes"], PAGE.EVENTS[log["event_name"]].attributes)
        assert log["severity"] == 9 and (log["trace_id"], log["span_id"]) in traces


KINDS = {"counter": "sum", "exponential histogram": "exponential_histogram"}


def test_metrics_obey_the_page(arrived):
    points = arrived.metric_points()
    training = {"loss", "learning_rate", "gradient_norm_clipped", "update_ratio", "nonfinite"}
    names = {point["name"] for point in points}
    assert {f"torch.training.{name}" for name in training} <= names
    assert {name for name in names if name.startswith("torch.module.")} == {
        *PAGE.ACTIVATION_METRICS
    }
    for point in points:
        metric, signal = METRICS[point["name"]]
        kind = KINDS.get(metric.instrument, metric.instrument)
        assert (point["kind"], point["unit"]) == (kind, metric.unit), point["name"]
        assert_obeys(point["attributes"], signal.attributes)


def test_the_resource_obeys_the_page(arrived):
    for item in [*arrived.spans(), *arrived.log_records(), *arrived.metric_points()]:
        own = {
            name: value for name, value in item["resource"].items() if not FOREIGN.fullmatch(name)
        }
        assert_obeys(own, PAGE.RESOURCE)
