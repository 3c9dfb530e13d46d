"""Generates the dashboards from the metric names, with Grafana's foundation SDK: `make dashboards`.

Each panel is an entry of a table, with its title and its queries. In dashboards written by hand,
forty queries would soon name metrics that are no longer sent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import (
    bargauge,
    dashboard,
    heatmap,
    logs,
    loki,
    prometheus,
    stat,
    statushistory,
    table,
    tempo,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import (
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    VariableOption,
    VariableRefresh,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from otel_torch.records import FINGERPRINTS
from otel_torch.settings import STATISTICS

FOLDER = Path(__file__).parent / "dashboards"
SOURCES = {kind: DataSourceRef(kind, kind) for kind in ("prometheus", "loki", "tempo")}

# metric names in Prometheus
GAUGE = "torch_module_activation_${statistic}"
ABS_MEAN = "torch_module_activation_abs_mean"
NONFINITE = "torch_module_activation_nonfinite_total"
MAGNITUDE = "torch_module_activation_magnitude"
REGION = "torch_region_duration_seconds"
TRAINING = "torch_training_"
# statistics without a gauge
NOT_GAUGES = FINGERPRINTS | {"nonfinite", "numel", "histogram", "shape", "dtype"}
GAUGES = [name for name in STATISTICS if name not in NOT_GAUGES]

SELECTION = 'job=~"$job", otel_torch_run_id=~"$run", dl_rank=~"$rank"'
MODULES = f'{SELECTION}, torch_module=~"$module", torch_tensor=~"$tensor"'
PLACE = "torch_model, torch_module, torch_tensor, torch_phase"
MODEL = f'{SELECTION}, torch_model=~"$model"'
TOTAL = f'{MODEL}, torch_module=""'
MODEL_MODULES = f'{MODEL}, torch_module!="", torch_module=~"$module"'


@dataclass(frozen=True)
class Query:
    """A query to a data source. `form` is the format of Prometheus's answer: time_series, table or
    heatmap.
    """

    text: str
    legend: str = ""
    source: str = "prometheus"
    form: str = "time_series"


@dataclass(frozen=True)
class Panel:
    """A panel. `kind` is the visualization; `width` is in 24ths of the page."""

    title: str
    kind: str
    queries: tuple[Query, ...]
    description: str = ""
    width: int = 12
    height: int = 9
    unit: str = ""
    transformations: tuple[tuple[str, dict[str, Any]], ...] = ()
    is_colored: bool = False


@dataclass(frozen=True)
class Board:
    """A dashboard.

    Attributes:
        variables: (name, label, query, whether several values can be selected).
        choices: (name, label, values).
        texts: (name, label, default).
    """

    uid: str
    title: str
    description: str
    rows: dict[str, tuple[Panel, ...]]
    variables: tuple[tuple[str, str, str, bool], ...]
    choices: tuple[tuple[str, str, tuple[str, ...]], ...] = ()
    texts: tuple[tuple[str, str, str], ...] = field(default=())


def label_values(metric: str, label: str, selector: str = "") -> str:
    """Return the query for the values of a label."""
    return f"label_values({metric}{{{selector}}}, {label})"


def by(labels: str, metric: str, selector: str = SELECTION, operator: str = "sum") -> str:
    """Return the aggregation of a metric by labels."""
    return f"{operator} by ({labels}) ({metric}{{{selector}}})"


def quantile(level: float, histogram: str) -> str:
    """Return a quantile of a histogram."""
    return f"histogram_quantile({level}, {histogram})"


def single_query(text: str, form: str = "table") -> tuple[Query]:
    """Return the query of a panel with one query."""
    return (Query(text, form=form),)


# the pattern of "All" where it is not `.*`: Loki refuses a selector that matches any stream
ALL = {"job": ".+"}
_OF_RUN = 'job=~"$job", otel_torch_run_id=~"$run"'


def run_variables(metric: str) -> tuple[tuple[str, str, str, bool], ...]:
    """Return the variables that select service, run and rank among the series of a metric."""
    return (
        ("job", "service", label_values(metric, "job"), True),
        ("run", "run", label_values(metric, "otel_torch_run_id", 'job=~"$job"'), True),
        ("rank", "rank", label_values(metric, "dl_rank", _OF_RUN), True),
    )


_RUN = run_variables(ABS_MEAN)
_MATRIX = {
    "columnField": "torch_step",
    "rowField": "torch_module",
    "valueField": "Value",
    "emptyValue": "null",
}
_STEP_OF = f"{PLACE}, torch_step, dl_rank"
_MAGNITUDES = by("torch_module", MAGNITUDE, MODULES)

ACTIVATIONS = Board(
    "otel-torch-activations",
    "Activations",
    "One statistic of every module, step by step; magnitudes; NaN and Inf; one run compared with another.",
    {
        "NaN and Inf": (
            Panel(
                "NaN and Inf elements",
                "stat",
                (Query(f"sum({NONFINITE}{{{MODULES}}})"),),
                "In total, for the selection above.",
                width=6,
                height=6,
            ),
            Panel(
                "Their places",
                "table",
                single_query(f"topk(50, {by(PLACE, NONFINITE, MODULES)})"),
                "The modules with the most, counted so far. The first one is in the recording: `otel-torch show`.",
                width=18,
                height=6,
            ),
        ),
        "Module by step": (
            Panel(
                "$statistic over time",
                "statushistory",
                (Query(by("torch_module", GAUGE, MODULES, "max"), "{{torch_module}}"),),
                "Training and other unbounded loops: a step's value is a sample at the step's time.",
                width=24,
                height=14,
                is_colored=True,
            ),
            Panel(
                "$statistic, module by step",
                "table",
                single_query(by("torch_module, torch_step", GAUGE, MODULES, "max")),
                "Bounded loops, where the step is a label: one row per module, one column per step.",
                width=24,
                height=14,
                transformations=(("groupingToMatrix", _MATRIX),),
                is_colored=True,
            ),
            Panel(
                "$statistic",
                "timeseries",
                (
                    Query(
                        f"{GAUGE}{{{MODULES}}}", "{{torch_module}} {{torch_tensor}} {{torch_step}}"
                    ),
                ),
                width=24,
            ),
        ),
        "Magnitudes": (
            Panel(
                "Magnitudes of the selected modules",
                "heatmap",
                single_query(f"sum({MAGNITUDE}{{{MODULES}}})", "heatmap"),
                "abs_mean of each record so far, as a native histogram.",
            ),
            Panel(
                "Median and 99th percentile",
                "timeseries",
                (
                    Query(quantile(0.5, _MAGNITUDES), "{{torch_module}} median"),
                    Query(quantile(0.99, _MAGNITUDES), "{{torch_module}} 99 %"),
                ),
            ),
            Panel(
                "Modules that jumped",
                "table",
                single_query(
                    f"topk(20, max by ({PLACE}) (max_over_time({ABS_MEAN}{{{MODULES}}}[$__range]))"
                    f" / quantile by ({PLACE}) (0.5, quantile_over_time(0.5, {ABS_MEAN}{{{MODULES}}}[$__range])))"
                ),
                "The largest abs_mean divided by the median.",
                width=24,
            ),
        ),
        "Runs compared": (
            Panel(
                "$statistic of $run, relative to $other",
                "table",
                single_query(
                    f'topk(100, abs({GAUGE}{{job=~"$job", otel_torch_run_id=~"$run", torch_module=~"$module"}}'
                    f" / on ({_STEP_OF}) group_left "
                    + by(
                        _STEP_OF,
                        GAUGE,
                        'otel_torch_run_id=~"$other", torch_module=~"$module"',
                        "max",
                    )
                    + " - 1))"
                ),
                "The relative difference of each module, largest first. `otel-torch diff` finds where a port first diverges.",
                width=24,
                height=12,
            ),
        ),
        "Events": (
            Panel(
                "Activation events",
                "logs",
                (
                    Query(
                        '{service_name=~"$job"} | torch_module=~"$module" | torch_tensor=~"$tensor"',
                        source="loki",
                    ),
                ),
                "Needs log_events in OTEL_TORCH_SIGNALS, as by default. Each event links to the trace "
                "of its step.",
                width=24,
                height=10,
            ),
        ),
    },
    (
        *_RUN,
        ("other", "other run", label_values(ABS_MEAN, "otel_torch_run_id"), True),
        ("tensor", "tensor", label_values(ABS_MEAN, "torch_tensor", 'job=~"$job"'), True),
    ),
    (("statistic", "statistic", tuple(GAUGES)),),
    (("module", "module (regular expression)", ".*"),),
)

_REGION_SUM, _REGION_COUNT = (
    by("torch_region", f"{REGION}_sum"),
    by("torch_region", f"{REGION}_count"),
)
_SPANS = 'service_name=~"$job"'
_SPAN_TIMES = by("span_name", "traces_span_metrics_duration_seconds", _SPANS)

REGIONS = Board(
    "otel-torch-regions",
    "Regions",
    "Time by registered region, stage and step, and by rank; from the program's histogram and from its spans.",
    {
        "Regions": (
            Panel(
                "Time in each region",
                "bargauge",
                (Query(_REGION_SUM, "{{torch_region}}"),),
                unit="s",
            ),
            Panel("Executions", "bargauge", (Query(_REGION_COUNT, "{{torch_region}}"),)),
            Panel(
                "Mean and 95th percentile",
                "timeseries",
                (
                    Query(f"{_REGION_SUM} / {_REGION_COUNT}", "{{torch_region}} mean"),
                    Query(
                        quantile(0.95, by("le, torch_region", f"{REGION}_bucket")),
                        "{{torch_region}} 95 %",
                    ),
                ),
                unit="s",
            ),
            Panel(
                "By rank",
                "bargauge",
                (
                    Query(
                        by("dl_rank, torch_region", f"{REGION}_sum"),
                        "rank {{dl_rank}} {{torch_region}}",
                    ),
                ),
                "Shows a rank that waits for others.",
                unit="s",
            ),
        ),
        "Steps": (
            Panel(
                "Current step of each rank",
                "timeseries",
                (Query(f"torch_step{{{SELECTION}}}", "{{torch_model}} rank {{dl_rank}}"),),
            ),
            Panel(
                "Duration of spans",
                "timeseries",
                (
                    Query(quantile(0.5, _SPAN_TIMES), "{{span_name}} median"),
                    Query(quantile(0.95, _SPAN_TIMES), "{{span_name}} 95 %"),
                ),
                "Measured by the Collector, with exemplars that link to traces.",
                unit="s",
            ),
            Panel(
                "Spans",
                "bargauge",
                (
                    Query(
                        by("span_name", "traces_span_metrics_calls_total", _SPANS), "{{span_name}}"
                    ),
                ),
            ),
        ),
        "Host against device": (
            Panel(
                "Regions with a measured device time",
                "table",
                (
                    Query(
                        '{resource.service.name =~ "$job" && span.torch.device.duration != nil}'
                        " | select(span.torch.device.duration)",
                        source="tempo",
                    ),
                ),
                "A span's duration is the host's; torch.device.duration is the device's, in seconds.",
                width=24,
                height=10,
            ),
        ),
    },
    _RUN,
)


def training(name: str, selector: str = TOTAL) -> str:
    """Return a metric of a training."""
    return f"{TRAINING}{name}{{{selector}}}"


def module_panels(title: str, name: str, description: str) -> tuple[Panel, Panel]:
    """Return a map of modules by time, and the modules with the largest values now."""
    values = f"max by (torch_module) ({training(name, MODEL_MODULES)})"
    return (
        Panel(
            title,
            "statushistory",
            (Query(values, "{{torch_module}}"),),
            description,
            width=16,
            height=12,
            is_colored=True,
        ),
        Panel(
            f"{title}: largest in the selected time",
            "table",
            single_query(
                f"topk(20, max by (torch_module) (max_over_time({training(name, MODEL_MODULES)}[$__range])))"
            ),
            width=8,
            height=12,
        ),
    )


_STEP_TIME = f"{TRAINING}step_duration_seconds"
_OF_RANK = "{{torch_model}} rank {{dl_rank}}"
_OF_GROUP = "{{torch_model}} group {{torch_param_group}}"
_NONFINITE_VALUES = f"{TRAINING}nonfinite_total{{{MODEL}}}"

TRAINING_BOARD = Board(
    "otel-torch-training",
    "Training",
    "Loss, learning rate, gradient norm and updates of a training program, by step and by module; its speed and memory.",
    {
        "Loss": (
            Panel(
                "Loss",
                "timeseries",
                (Query(training("loss"), _OF_RANK),),
                "Of several backward passes in a step the last.",
                width=16,
                height=10,
            ),
            Panel(
                "Learning rate",
                "timeseries",
                (Query(training("learning_rate"), _OF_GROUP),),
                width=8,
                height=10,
            ),
        ),
        "Gradients": (
            Panel(
                "Gradient norm",
                "timeseries",
                (
                    Query(training("gradient_norm"), f"{_OF_RANK} before clipping"),
                    Query(training("gradient_norm_clipped"), f"{_OF_RANK} after clipping"),
                ),
                "L2 norm of all gradients. An infinite one has no point: see NaN and Inf.",
                width=24,
            ),
            *module_panels(
                "Gradient norm by module",
                "gradient_norm",
                "L2 norm of the gradients of each module's own parameters.",
            ),
        ),
        "Updates": (
            Panel(
                "Update ratio",
                "timeseries",
                (Query(training("update_ratio"), _OF_RANK),),
                "L2 norm of what the optimizer changed, over that of the parameters. About 0.001 is usual.",
                width=8,
            ),
            Panel(
                "Parameter norm",
                "timeseries",
                (Query(training("parameter_norm"), _OF_RANK),),
                width=8,
            ),
            Panel(
                "Weight decay",
                "timeseries",
                (Query(training("weight_decay"), _OF_GROUP),),
                width=8,
            ),
            *module_panels(
                "Update ratio by module",
                "update_ratio",
                "L2 norm of what the optimizer changed, over that of the module's parameters.",
            ),
        ),
        "Dead units": module_panels(
            "Dead units by module",
            "dead_units_ratio",
            "Share of the units behind a ReLU that were zero in every sample of a batch.",
        ),
        "NaN and Inf, loss scale": (
            Panel(
                "NaN and Inf",
                "stat",
                (Query(f"sum({_NONFINITE_VALUES}) or vector(0)"),),
                "Values of a training that were not finite. Infinite gradients of a skipped step are usual in fp16.",
                width=4,
            ),
            Panel(
                "Their places",
                "table",
                single_query(
                    f"topk(50, sum by (torch_model, torch_module, torch_tensor) ({_NONFINITE_VALUES}))"
                ),
                width=8,
            ),
            Panel(
                "Loss scale and skipped steps",
                "timeseries",
                (
                    Query(training("loss_scale"), f"{_OF_RANK} scale"),
                    Query(training("skipped_steps_total"), f"{_OF_RANK} skipped so far"),
                ),
                "Of the gradient scaler. A scale that falls to 1 and below means that every step overflows.",
                width=12,
            ),
        ),
        "Speed and memory": (
            Panel(
                "Duration of a step",
                "timeseries",
                (
                    Query(
                        quantile(0.5, by("le, torch_model", f"{_STEP_TIME}_bucket", MODEL)),
                        "{{torch_model}} median",
                    ),
                    Query(
                        quantile(0.95, by("le, torch_model", f"{_STEP_TIME}_bucket", MODEL)),
                        "{{torch_model}} 95 %",
                    ),
                ),
                "From its first forward to the optimizer's update.",
                width=8,
                unit="s",
            ),
            Panel(
                "Throughput",
                "timeseries",
                (
                    Query(training("throughput_samples_per_second", MODEL), f"{_OF_RANK} samples"),
                    Query(training("throughput_tokens_per_second", MODEL), f"{_OF_RANK} tokens"),
                ),
                "Per second of a step, on each rank.",
                width=8,
            ),
            Panel(
                "Device memory",
                "timeseries",
                (Query(training("device_memory_bytes", MODEL), _OF_RANK),),
                "The largest that torch has allocated so far.",
                width=8,
                unit="bytes",
            ),
        ),
    },
    (
        *run_variables(f"{TRAINING}loss"),
        ("model", "model", label_values(f"{TRAINING}loss", "torch_model", _OF_RUN), True),
    ),
    texts=(("module", "module (regular expression)", ".*"),),
)

_COLLECTOR = 'job="otel-collector"'
_ITEMS = {"spans": "spans", "metric_points": "points", "log_records": "log records"}


def _collector_queries(counter: str, suffix: str = "") -> tuple[Query, ...]:
    """Return a query per kind of item for one of the Collector's counters."""
    return tuple(
        Query(f"sum(otelcol_{counter}_{items}_total{{{_COLLECTOR}}}){suffix}", label)
        for items, label in _ITEMS.items()
    )


HEALTH = Board(
    "otel-torch-telemetry-health",
    "Telemetry health",
    "Whether all data arrives: what programs lost, and what the Collector accepted, sent and has queued.",
    {
        "Programs": (
            Panel(
                "Lost by programs",
                "stat",
                (Query(f"sum(otel_torch_records_dropped_total{{{SELECTION}}}) or vector(0)"),),
                "All that did not arrive.",
                width=6,
                height=7,
            ),
            Panel(
                "Losses by reason",
                "table",
                single_query(by("job, what, reason", "otel_torch_records_dropped_total")),
                "The reasons are explained in docs/opentelemetry-names.md.",
                width=18,
                height=7,
            ),
        ),
        "Collector": (
            Panel(
                "Accepted",
                "timeseries",
                _collector_queries("receiver_accepted"),
                "Items since the Collector started.",
            ),
            Panel(
                "Refused",
                "timeseries",
                _collector_queries("receiver_refused", " or vector(0)"),
                "Items that it could not accept; senders retry, and count what they drop.",
            ),
            Panel(
                "Sent, by backend",
                "timeseries",
                tuple(
                    Query(
                        by("exporter", f"otelcol_exporter_sent_{items}_total", _COLLECTOR),
                        f"{{{{exporter}}}} {label}",
                    )
                    for items, label in _ITEMS.items()
                ),
            ),
            Panel(
                "Queued, by backend",
                "timeseries",
                (Query(by("exporter", "otelcol_exporter_queue_size", _COLLECTOR), "{{exporter}}"),),
                "In the queues to the backends.",
            ),
        ),
    },
    _RUN,
)

BOARDS = (ACTIVATIONS, TRAINING_BOARD, REGIONS, HEALTH)
_KINDS: dict[str, Any] = {
    "stat": stat.Panel, "table": table.Panel, "timeseries": timeseries.Panel, "heatmap": heatmap.Panel,
    "statushistory": statushistory.Panel, "bargauge": bargauge.Panel, "logs": logs.Panel,
}  # fmt: skip


def _target(query: Query, number: int) -> Any:
    letter = chr(ord("A") + number)
    if query.source == "loki":
        return loki.Dataquery().expr(query.text).ref_id(letter).datasource(SOURCES["loki"])
    if query.source == "tempo":
        return (
            tempo.TempoQuery()
            .query(query.text)
            .query_type("traceql")
            .ref_id(letter)
            .datasource(SOURCES["tempo"])
        )
    target = (
        prometheus.Dataquery()
        .expr(query.text)
        .ref_id(letter)
        .format(PromQueryFormat(query.form))
        .datasource(SOURCES["prometheus"])
    )
    if query.legend:
        target = target.legend_format(query.legend)
    return target.instant() if query.form == "table" else target.range()


def _panel(panel: Panel) -> Any:
    built = _KINDS[panel.kind]().title(panel.title).span(panel.width).height(panel.height)
    built = built.datasource(SOURCES[panel.queries[0].source])
    if panel.description:
        built = built.description(panel.description)
    if panel.unit:
        built = built.unit(panel.unit)
    for number, query in enumerate(panel.queries):
        built = built.with_target(_target(query, number))
    for name, options in panel.transformations:
        built = built.with_transformation(DataTransformerConfig(name, options=options))
    if panel.is_colored:
        scheme = DynamicConfigValue("color", {"mode": "continuous-BlYlRd"})
        background = DynamicConfigValue(
            "custom.cellOptions", {"type": "color-background", "mode": "gradient"}
        )
        built = built.override_by_regexp(
            ".*", [scheme, background] if panel.kind == "table" else [scheme]
        )
    return built


def make(board: Board) -> str:
    """Return a dashboard as JSON."""
    built = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags(["otel_torch"])
    )
    built = built.time("now-6h", "now").refresh("30s").timezone("browser").editable()
    for name, label, query, is_multiple in board.variables:
        variable = (
            dashboard.QueryVariable(name)
            .label(label)
            .query(query)
            .datasource(SOURCES["prometheus"])
        )
        variable = (
            variable.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(is_multiple)
            .include_all(is_multiple)
            .all_value(".*")
        )
        built = built.with_variable(variable.current(VariableOption(True, "All", "$__all")))
    for name, label, values in board.choices:
        default = VariableOption(True, values[0], values[0])
        built = built.with_variable(
            dashboard.CustomVariable(name).label(label).values(",".join(values)).current(default)
        )
    for name, label, value in board.texts:
        built = built.with_variable(
            dashboard.TextBoxVariable(name).label(label).default_value(value)
        )
    link = (
        dashboard.DashboardLink("otel_torch")
        .type(DashboardLinkType.DASHBOARDS)
        .tags(["otel_torch"])
        .keep_time(True)
        .include_vars(True)
    )
    built = built.links([link])
    for title, panels in board.rows.items():
        built = built.with_row(dashboard.Row(title))
        for panel in panels:
            built = built.with_panel(_panel(panel))
    return (
        json.dumps(
            json.loads(JSONEncoder(sort_keys=True).encode(built.build())), indent=1, sort_keys=True
        )
        + "\n"
    )


def queries(boards: Iterable[Board] = BOARDS) -> list[tuple[str, Panel, Query]]:
    """Return (dashboard, panel, query) of every query."""
    return [
        (board.title, panel, query)
        for board in boards
        for row in board.rows.values()
        for panel in row
        for query in panel.queries
    ]


def files() -> dict[Path, str]:
    """Return the text of each dashboard by its path."""
    return {
        FOLDER / f"{board.uid.removeprefix('otel-torch-')}.json": make(board) for board in BOARDS
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
        print(path.relative_to(Path(__file__).parents[2]))
