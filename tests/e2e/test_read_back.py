"""Unmodified programs, configured by environment only: everything that they recorded is read back
through Jaeger, Prometheus and Loki.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from otel_torch.settings import STATISTICS
from otel_torch.training_quantities import PHASE, ROWS, split_label
from tests.e2e import apis
from tests.e2e.conftest import Stack, start
from tests.e2e.stack import eventually
from tests.support import TURNS_NAN, environment, lines, metadata, run_python, run_ranks
from tests.telemetry.otlp.test_delivery import BURST, lost
from tests.telemetry_support import drive

pytestmark = pytest.mark.e2e

EXAMPLES = Path(__file__).parents[2] / "examples"
KEY = ("model", "module", "tensor", "loop", "step", "call", "phase")
SERIES = ("model", "module", "tensor", "phase")
ACTIVATION = "torch.module.activation"
ALL_SIGNALS = "spans,span_events,log_events,metrics"
Row = dict[str, Any]


def run(
    tmp_path: Path, stack: Stack, program: str | Path, service: str, **variables: str
) -> list[Row]:
    """Run a program with every signal on, and return the activations of its recording, whose
    metadata lists no losses.
    """
    variables = {"OTEL_TORCH_SIGNALS": ALL_SIGNALS} | stack.environment(service) | variables
    run_python(tmp_path, program, **variables)
    assert metadata(tmp_path / "run.jsonl")["lost"] == []
    return activations(tmp_path / "run.jsonl")


def activations(recording: Path) -> list[Row]:
    """Return the rows that are events: all but those of phase `train`."""
    return [row for row in lines(recording) if row["phase"] != PHASE]


def events_in_jaeger(stack: Stack, service: str, number: int) -> list[Row]:
    """Return the attributes of all activation events, once the expected number has arrived."""
    found: list[Row] = []

    def complete() -> bool:
        spans = apis.spans(stack.jaeger, service)
        found[:] = [
            attributes
            for span in spans
            for name, attributes in span["events"]
            if name == ACTIVATION
        ]
        return len(found) >= number and any(span["name"] == "torch.run" for span in spans)

    eventually(complete)
    return found


def events_in_loki(stack: Stack, service: str, number: int) -> list[tuple[str, dict[str, str]]]:
    found: list[tuple[str, dict[str, str]]] = []

    def complete() -> bool:
        found[:] = apis.log_events(stack.loki, f'{{service_name="{service}"}}')
        return len(found) >= number

    eventually(complete)
    return found


def samples(
    stack: Stack, service: str, statistic: str
) -> dict[tuple[str, ...], dict[str, list[float]]]:
    """Return {series: {step label, "" without one: values in order of time}} of a statistic."""
    found: dict[tuple[str, ...], dict[str, list[float]]] = defaultdict(dict)
    for labels, values in apis.series(
        stack.prometheus, f'torch_module_activation_{statistic}{{job="{service}"}}[1h]'
    ):
        series = tuple(labels.get(f"torch_{name}", "") for name in SERIES)
        assert labels.get("torch_step", "") not in found[series]
        found[series][labels.get("torch_step", "")] = values
    return dict(found)


def last_of_each_step(rows: list[Row], statistic: str) -> dict[tuple[str, ...], dict[int, float]]:
    """Return {series: {step: the value of its last call}} of finite values: what a gauge can show."""
    found: dict[tuple[str, ...], dict[int, float]] = defaultdict(dict)
    for row in rows:
        value = row.get(statistic)
        if isinstance(value, int | float) and math.isfinite(value):
            found[tuple(str(row[name]) for name in SERIES)][row["step"]] = float(value)
    return dict(found)


def numeric_statistics(rows: list[Row]) -> list[str]:
    """Return the statistics of the recording that are gauges."""
    present = {
        name for row in rows for name, value in row.items() if isinstance(value, int | float)
    }
    return [name for name in STATISTICS if name in present and name not in ("nonfinite", "numel")]


def test_a_generation_in_jaeger(tmp_path: Path, stack: Stack) -> None:
    rows = run(
        tmp_path,
        stack,
        EXAMPLES / "quickstart.py",
        "generation",
        OTEL_TORCH_SIGNALS="spans,span_events",
    )
    events = events_in_jaeger(stack, "generation", len(rows))
    spans = apis.spans(stack.jaeger, "generation")
    by_id = {span["span_id"]: span for span in spans}
    # every record is an event, every field and every statistic of it, with its type
    expected = {tuple(row[name] for name in KEY): row for row in rows}
    shown = {tuple(event[f"torch.{name}"] for name in KEY): event for event in events}
    assert len(events) == len(rows) and shown.keys() == expected.keys()
    for key, row in expected.items():
        statistics = {
            name.removeprefix("torch.stat."): value
            for name, value in shown[key].items()
            if "stat." in name
        }
        for name in ("abs_mean", "sum", "min", "max", "mean", "std", "nonfinite"):
            assert statistics[name] == row[name] and type(statistics[name]) in (int, float), (
                key,
                name,
            )
        assert statistics["dtype"] == row["dtype"]
    # parents and children in one trace
    parents = Counter(
        (span["name"], by_id[span["parent_id"]]["name"] if span["parent_id"] else "")
        for span in spans
    )
    denoising = "fastvideo.region::profiler_region_inference_denoising"
    assert parents[("torch.run", "")] == 1
    assert parents[(denoising, "torch.run")] == 1
    assert parents[("torch.step", denoising)] == 5
    assert parents[("torch.forward", "torch.step")] == 10
    assert len({span["trace_id"] for span in spans}) == 1
    steps = sorted(
        span["attributes"]["torch.step"] for span in spans if span["name"] == "torch.step"
    )
    assert steps == [0, 1, 2, 3, 4]
    # an event is on the span of its step
    for span in spans:
        steps_of_events = {
            event["torch.step"] for name, event in span["events"] if name == ACTIVATION
        }
        assert steps_of_events <= {span["attributes"].get("torch.step")}
    # its resource
    about = metadata(tmp_path / "run.jsonl")
    assert {span["resource"]["otel_torch.run.id"] for span in spans} == {about["run_id"]}
    assert {span["resource"]["dl.rank"] for span in spans} == {0}
    assert {span["trace_id"] for span in spans} == {about["trace_id"]}


def test_a_generation_in_what_stands_for_tempo(tmp_path: Path, stack: Stack) -> None:
    rows = run(
        tmp_path,
        stack,
        EXAMPLES / "quickstart.py",
        "for-tempo",
        OTEL_TORCH_SIGNALS="spans,span_events",
    )

    def events() -> int:
        mine = (
            span for span in stack.tempo.spans() if span["resource"]["service.name"] == "for-tempo"
        )
        return sum(event["name"] == ACTIVATION for span in mine for event in span["events"])

    eventually(lambda: events() >= len(rows))
    assert events() == len(rows)


def test_every_step_of_a_bounded_loop_in_prometheus_by_its_label(
    tmp_path: Path, stack: Stack
) -> None:
    rows = run(tmp_path, stack, EXAMPLES / "quickstart.py", "labelled")
    names = numeric_statistics(rows)
    assert set(names) == {"abs_mean", "sum", "min", "max", "mean", "std"}
    for name in names:
        expected = last_of_each_step(rows, name)
        eventually(
            lambda name=name, expected=expected: (
                samples(stack, "labelled", name).keys() >= expected.keys()
            )
        )
        shown = samples(stack, "labelled", name)
        # a series has one value, however often it was sent
        values = {
            series: {int(step): set(values) for step, values in steps.items()}
            for series, steps in shown.items()
        }
        assert values == {
            series: {step: {value} for step, value in steps.items()}
            for series, steps in expected.items()
        }
    # the resource is on every series
    about = metadata(tmp_path / "run.jsonl")
    for labels, _ in apis.series(stack.prometheus, 'torch_module_activation_mean{job="labelled"}'):
        assert (labels["dl_rank"], labels["otel_torch_run_id"]) == ("0", about["run_id"])
    # how large: one sample a record
    magnitudes = 'sum(torch_module_activation_magnitude{job="labelled"})'
    (_, [median]) = apis.series(stack.prometheus, f"histogram_quantile(0.5, {magnitudes})")[0]
    assert min(row["abs_mean"] for row in rows) <= median <= max(row["abs_mean"] for row in rows)
    (_, [count]) = apis.series(stack.prometheus, f"histogram_count({magnitudes})")[0]
    assert count == len(rows)
    # the region, as a histogram of its own and as the Collector counts spans
    regions = apis.series(stack.prometheus, 'torch_region_duration_seconds_count{job="labelled"}')
    assert {labels["torch_region"]: values for labels, values in regions}[
        "profiler_region_inference_denoising"
    ] == [1]
    # (a series of the connector's begins with a zero, so that its first spans are an increase)
    steps = 'sum(traces_span_metrics_calls_total{job="labelled", span_name="torch.step"})'
    eventually(
        lambda: [values for _, values in apis.series(stack.prometheus, steps)] not in ([], [[0.0]])
    )
    assert [values for _, values in apis.series(stack.prometheus, steps)] == [[5]]


def test_every_step_of_a_training_in_prometheus_at_its_time(tmp_path: Path, stack: Stack) -> None:
    rows = run(
        tmp_path,
        stack,
        EXAMPLES / "transformers_train.py",
        "training",
        OTEL_TORCH_CAPTURE="outputs,gradients",
    )
    assert len({row["step"] for row in rows}) == 7
    for name in numeric_statistics(rows):
        expected = {
            series: [steps[step] for step in sorted(steps)]
            for series, steps in last_of_each_step(rows, name).items()
        }

        def shown(name: str = name) -> dict[tuple[str, ...], list[float]]:
            return {series: steps[""] for series, steps in samples(stack, "training", name).items()}

        eventually(
            lambda expected=expected, shown=shown: (
                sum(map(len, shown().values())) >= sum(map(len, expected.values()))
            )
        )
        assert shown() == expected


def test_a_training_in_jaeger_is_a_trace_a_step(tmp_path: Path, stack: Stack) -> None:
    rows = run(
        tmp_path,
        stack,
        EXAMPLES / "transformers_train.py",
        "steps",
        OTEL_TORCH_SIGNALS="spans,span_events",
    )
    events = events_in_jaeger(stack, "steps", len(rows))
    assert Counter(tuple(event[f"torch.{name}"] for name in KEY) for event in events) == Counter(
        tuple(row[name] for name in KEY) for row in rows
    )
    spans = apis.spans(stack.jaeger, "steps")
    traces = {span["trace_id"] for span in spans if span["name"] == "torch.step"}
    assert len(traces) == 7 and not traces & {
        span["trace_id"] for span in spans if span["name"] == "torch.run"
    }


def test_the_values_of_a_training_in_jaeger_and_prometheus(tmp_path: Path, stack: Stack) -> None:
    run(tmp_path, stack, EXAMPLES / "transformers_train.py", "values")
    rows = [row for row in lines(tmp_path / "run.jsonl") if row["phase"] == PHASE]
    # every value of a model is an attribute of its step; of several in a step the last
    expected: dict[int, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if not row["module"]:
            metric = ROWS[split_label(row["tensor"]).quantity].metric
            expected[row["step"]][metric] = row["mean"]
    steps: dict[int, Row] = {}

    def complete() -> bool:
        steps.update(
            (span["attributes"]["torch.step"], span["attributes"])
            for span in apis.spans(stack.jaeger, "values")
            if span["name"] == "torch.step"
        )
        return steps.keys() >= expected.keys()

    eventually(complete)
    assert len(expected) == 6
    for step, values in expected.items():
        assert values.items() <= steps[step].items()
        losses = [row["mean"] for row in rows if (row["tensor"], row["step"]) == ("loss", step)]
        assert steps[step]["torch.training.loss.values"] == str(losses).replace(" ", "")
    # every step's loss is a sample, and so is every module's gradient norm
    losses = 'torch_training_loss{job="values"}[1h]'
    eventually(lambda: apis.series(stack.prometheus, losses))
    ((_, shown),) = apis.series(stack.prometheus, losses)
    assert shown == [values["torch.training.loss"] for values in expected.values()]
    norms: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row["tensor"] == "grad_norm":
            norms[row["module"]].append(row["mean"])
    found = apis.series(stack.prometheus, 'torch_training_gradient_norm{job="values"}[1h]')
    assert {labels.get("torch_module", ""): values for labels, values in found} == norms


def test_two_ranks_are_one_trace_in_jaeger_and_two_labels_in_prometheus(
    tmp_path: Path, stack: Stack
) -> None:
    run_ranks(
        tmp_path,
        EXAMPLES / "two_ranks.py",
        OTEL_TORCH_SIGNALS=ALL_SIGNALS,
        **stack.environment("ranks"),
    )
    expected = Counter(
        {rank: len(activations(tmp_path / f"run.rank{rank}.jsonl")) for rank in range(2)}
    )
    events_in_jaeger(stack, "ranks", expected.total())
    spans = apis.spans(stack.jaeger, "ranks")
    found: Counter[int] = Counter()
    for span in spans:
        found[span["resource"]["dl.rank"]] += sum(name == ACTIVATION for name, _ in span["events"])
    assert found == expected
    runs = [span for span in spans if span["name"] == "torch.run"]
    assert sorted(span["resource"]["dl.rank"] for span in runs) == [0, 1]
    assert len({span["trace_id"] for span in runs}) == 1
    ranks = 'count by (dl_rank) (torch_module_activation_mean{job="ranks"})'
    eventually(lambda: len(apis.series(stack.prometheus, ranks)) == 2)
    assert {labels["dl_rank"] for labels, _ in apis.series(stack.prometheus, ranks)} == {"0", "1"}


def test_log_events_in_loki(tmp_path: Path, stack: Stack) -> None:
    rows = run(
        tmp_path,
        stack,
        EXAMPLES / "transformers_train.py",
        "logged",
        OTEL_TORCH_SIGNALS="spans,log_events",
    )
    events = events_in_loki(stack, "logged", len(rows))
    assert len(events) == len(rows) and {line for line, _ in events} == {ACTIVATION}
    expected = {tuple(str(row[name]) for name in KEY): row for row in rows}
    # empty values are dropped: the root module's name
    shown = {tuple(labels.get(f"torch_{name}", "") for name in KEY): labels for _, labels in events}
    assert shown.keys() == expected.keys()
    for key, row in expected.items():
        for name in numeric_statistics(rows):
            value = row.get(name)
            said = shown[key].get(f"torch_stat_{name}")
            assert said == value or float(said or "nan") == value, (key, name)
    # found by their attributes, and their steps' spans by theirs
    module = '{service_name="logged", dl_rank="0"} | torch_module="model.layers.0" | torch_step="3" | torch_phase="eval"'
    (found,) = apis.log_events(stack.loki, module)
    eventually(
        lambda: any(
            span["span_id"] == found[1]["span_id"] for span in apis.spans(stack.jaeger, "logged")
        )
    )
    (span,) = [
        span
        for span in apis.spans(stack.jaeger, "logged")
        if span["span_id"] == found[1]["span_id"]
    ]
    assert (span["trace_id"], span["name"], span["attributes"]["torch.step"]) == (
        found[1]["trace_id"],
        "torch.step",
        3,
    )


def test_a_run_that_turns_nan_through_every_api(tmp_path: Path, stack: Stack) -> None:
    rows = run(tmp_path, stack, TURNS_NAN, "nan")
    assert [row["mean"] == "NaN" for row in rows if row["module"] == "0"] == [
        False,
        False,
        True,
        True,
    ]
    # with one NaN in an event Jaeger answers 500 for the whole service
    events = events_in_jaeger(stack, "nan", len(rows))
    means = {
        event["torch.step"]: event["torch.stat.mean"]
        for event in events
        if event["torch.module"] == "0"
    }
    assert [isinstance(means[step], float) for step in range(4)] == [True, True, False, False]
    assert (means[2], means[3]) == ("NaN", "NaN")
    logged = events_in_loki(stack, "nan", len(rows))
    assert {labels["torch_step"] for _, labels in logged if labels["torch_stat_mean"] == "NaN"} == {
        "2",
        "3",
    }
    # NaN and Inf have no point; their number is counted
    eventually(
        lambda: apis.series(
            stack.prometheus,
            'torch_module_activation_nonfinite_total{job="nan", torch_module="0"} == 4',
        )
    )
    shown = samples(stack, "nan", "mean")
    assert {
        series[1]: sum(len(set(values)) for values in steps.values())
        for series, steps in shown.items()
    }.get("0") == 1
    assert all(
        math.isfinite(value)
        for steps in shown.values()
        for values in steps.values()
        for value in values
    )


def test_a_burst_of_a_hundred_thousand_records_reaches_loki_and_prometheus(
    tmp_path: Path, stack: Stack
) -> None:
    """Through the queues, batches and limits of the backends."""
    prometheus, loki = stack.prometheus, stack.loki
    done = drive(
        tmp_path,
        BURST + "finish(120)",
        OTEL_TORCH_SIGNALS="log_events,metrics",
        **stack.environment("burst"),
    )
    assert lost(done) == {}

    def count(name: str) -> float:
        found = apis.series(prometheus, f'sum(count_over_time({name}{{job="burst"}}[1h]))')
        return found[0][1][0] if found else 0

    for name in ("abs_mean", "sum", "min", "max", "mean", "std"):
        eventually(
            lambda name=name: count(f"torch_module_activation_{name}") == 100_000, timeout=120
        )
    lines_there = 'sum(count_over_time({service_name="burst"}[1h]))'
    eventually(lambda: apis.log_count(loki, lines_there) == 100_000, timeout=120)


def test_the_collectors_own_counts_are_in_prometheus(tmp_path: Path, stack: Stack) -> None:
    """They tell what was forwarded and what was not, so alerts can use them."""
    rows = run(
        tmp_path, stack, EXAMPLES / "quickstart.py", "counted", OTEL_TORCH_SIGNALS="log_events"
    )
    events_in_loki(stack, "counted", len(rows))
    accepted = 'sum({__name__=~"otelcol_receiver_accepted_log_records.*"})'
    eventually(
        lambda: any(values[0] >= len(rows) for _, values in apis.series(stack.prometheus, accepted))
    )
    failed = '{__name__=~"otelcol_exporter_(send|enqueue)_failed_.*", exporter=~"otlp_http/.*"} > 0'
    assert apis.series(stack.prometheus, failed) == []


def test_what_was_written_where_no_collector_is_and_sent_later(
    tmp_path: Path, stack: Stack
) -> None:
    written = {
        "OTEL_TORCH_OTLP_FILE": str(tmp_path / "otlp"),
        "OTEL_SERVICE_NAME": "carried",
        "OTEL_TORCH_SIGNALS": ALL_SIGNALS,
    }
    run_python(tmp_path, EXAMPLES / "quickstart.py", **written)
    rows = lines(tmp_path / "run.jsonl")
    files = [str(path) for path in sorted((tmp_path / "otlp").glob("*.jsonl"))]
    subprocess.run(
        [sys.executable, "-m", "otel_torch", "send", *files], env=environment(tmp_path, **stack.environment("of-no-matter")),
        capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    assert len(events_in_jaeger(stack, "carried", len(rows))) == len(rows)
    assert len(events_in_loki(stack, "carried", len(rows))) == len(rows)
    expected = last_of_each_step(rows, "mean")
    eventually(lambda: samples(stack, "carried", "mean").keys() >= expected.keys())
    for series, steps in samples(stack, "carried", "mean").items():
        assert {int(step): values[0] for step, values in steps.items()} == expected[series]


def test_through_an_agent_and_a_gateway_that_comes_later(tmp_path: Path, stack: Stack) -> None:
    """As on many nodes: what the agent queued on disk reaches every backend once the gateway is up."""
    gateway = start(
        "collector", tmp_path / "gateway", FILES="collector-gateway.yaml", **stack.endpoints()
    )
    with start(
        "collector",
        tmp_path / "agent",
        FILES="collector-agent.yaml",
        GATEWAY_ENDPOINT=gateway.address,
    ) as agent:
        endpoint = agent.url("COLLECTOR_GRPC_PORT")
        rows = run(tmp_path, stack, TURNS_NAN, "nodes", OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)
        with gateway:
            events = events_in_jaeger(stack, "nodes", len(rows))
            logged = events_in_loki(stack, "nodes", len(rows))
            eventually(
                lambda: (
                    samples(stack, "nodes", "mean").keys() >= last_of_each_step(rows, "mean").keys()
                )
            )
    assert (len(events), len(logged)) == (len(rows), len(rows))
