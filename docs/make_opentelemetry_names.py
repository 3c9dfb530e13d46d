"""Writes docs/opentelemetry-names.md: `make docs`.

Training metrics and statistics come from the package's own tables. The other names are literals in
its code; `tests/telemetry/test_attributes.py` compares them with the tables here, and with what
arrives at a receiver.
"""

import pathlib
from dataclasses import dataclass

from otel_torch.frameworks.fastvideo import _REQUEST_FIELDS
from otel_torch.records import FINGERPRINTS
from otel_torch.statistics.table import DEFINITIONS
from otel_torch.telemetry.attributes import ACTIVATION, NOT_GAUGES
from otel_torch.telemetry.sinks.metric_sink import _DURATION_BOUNDS_S
from otel_torch.training_quantities import NONFINITE, ROWS, SCOPE_ATTRIBUTES, STEP_DURATION

PAGE = pathlib.Path(__file__).with_name("opentelemetry-names.md")

REQUIRED, RECOMMENDED, OPT_IN = "required", "recommended", "opt-in"
DEVELOPMENT, STABLE = "Development", "Stable"
LEVELS = "https://opentelemetry.io/docs/specs/semconv/general/attribute-requirement-level/"


def if_(condition):
    """Return the requirement level of an attribute that only some signals of a kind have."""
    return f"if {condition}"


@dataclass(frozen=True)
class Attribute:
    """What an attribute holds. `type`: as in the specification; several are separated by `or`."""

    type: str
    text: str
    examples: str
    stability: str = DEVELOPMENT


@dataclass(frozen=True)
class Signal:
    """A span, an event or a group of metrics.

    Args:
        heading: what it is, without the kind.
        text: what else there is to know of it.
        attributes: requirement level by name.
    """

    heading: str
    text: str
    attributes: dict[str, str]


@dataclass(frozen=True)
class Metric:
    """One metric: its instrument, its unit in UCUM, and what it measures."""

    instrument: str
    unit: str
    text: str


# ---- attributes

STATISTICS = {
    "abs_mean": Attribute("double", "Mean of the absolute values", "`0.495`"),
    "sum": Attribute("double", "Sum, accumulated in 64 bits", "`-12.5`"),
    "min": Attribute("double", "Smallest element", "`-3.1`"),
    "max": Attribute("double", "Largest element", "`2.8`"),
    "mean": Attribute("double", "Mean", "`0.002`"),
    "std": Attribute("double", "Unbiased standard deviation", "`0.62`"),
    "nonfinite": Attribute("int", "Number of NaN and infinite elements", "`0`; `128`"),
    "rms": Attribute("double", "Root of the mean of squares", "`0.62`"),
    "l2": Attribute("double", "L2 norm", "`17.2`"),
    "zeros": Attribute("int", "Number of zero elements", "`0`; `384`"),
    "numel": Attribute("int", "Number of elements", "`768`"),
    "histogram": Attribute("int[]", "Number of magnitudes in each of 64 bins", "`[0, 0, 5, …]`"),
    "shape": Attribute("int[]", "Shape of the tensor", "`[1, 32, 24]`"),
    "dtype": Attribute("string", "Data type of the elements", "`torch.bfloat16`"),
}
# those of a comparison of recordings are never exported
assert STATISTICS.keys() == DEFINITIONS.keys() - FINGERPRINTS

NUMBER = "double or string"  # a string where it is not finite
QUANTITIES = {
    name: Attribute(NUMBER, quantity.text, "`0.125`; `NaN`") for name, quantity in ROWS.items()
}
QUANTITIES["broken_law"] = Attribute("string[]", ROWS["broken_law"].text, '`["same_batch"]`')

ATTRIBUTES = {
    "torch.branch": Attribute("string", "The branch of classifier-free guidance", "`cond`; `uncond`"),
    "torch.call": Attribute("int", "How often the module had already run in this step", "`0`; `1`"),
    "torch.device.duration": Attribute("double", "Time on the device, in seconds", "`0.0124`"),
    "torch.interleave.asked": Attribute("string", "What the body of `interleave` asked a module for", "`output`"),
    "torch.interleave.waited": Attribute("double", "How long the body waited, in seconds", "`0.003`"),
    "torch.loop": Attribute("int", "Number of the pass of the main loop: the second video of a process is 1", "`0`; `1`"),
    "torch.model": Attribute("string", "Class of the outermost module; further instances are numbered", "`LlamaForCausalLM`; `Net#2`"),
    "torch.module": Attribute("string", "Canonical path of a module in its model, without wrapper components; empty for the model itself", "`model.layers.0.mlp`"),
    "torch.law": Attribute("string", "Name of a law of training", "`same_batch`"),
    "torch.param_group": Attribute("string", "Name of an optimizer's parameter group, or its number", "`decay`; `0`"),
    "torch.phase": Attribute("string", "What the program was doing: see [phases](#phases)", "`forward`; `eval`"),
    "torch.region": Attribute("string", "Registered name of a region, or the name of its span", "`profiler_region_model_loading`"),
    "torch.stat.<statistic>": Attribute("by statistic", "One attribute for each of the [statistics](#statistics)", "`torch.stat.abs_mean`"),
    "torch.step": Attribute("int", "Number of the iteration of the main loop, from 0: an optimizer step, a denoise step", "`0`; `1200`"),
    "torch.tensor": Attribute("string", "Which tensor of a module: outputs, inputs, parameters and their gradients", "`out`; `in[0]`; `out.logits`; `param.weight`"),
    "torch.training.samples": Attribute("int", "Samples of the step's batches", "`256`"),
    "torch.training.tokens": Attribute("int", "Tokens of the step's batches", "`524288`"),
    "torch.training.device_memory": Attribute("int", "Peak of the memory allocated on the device so far, in bytes", "`21474836480`"),
    "torch.training.<quantity>.values": Attribute("double[] or string[]", "All values of a quantity that a step has several times; the last 100", "`[3.0, 2.0]`"),
    **{quantity.metric: QUANTITIES[name] for name, quantity in ROWS.items()},
    "otel_torch.linked_traces": Attribute("int", "Number of traces that the run's span links to", "`1200`"),
    "otel_torch.run.id": Attribute("string", "Name of the run, shared by all of its processes", "`4711.0`"),
    "otel_torch.unfinished": Attribute("boolean", "The span was still open when the program ended", "`true`"),
    "dl.local_rank": Attribute("int", "Rank among the processes of the host", "`0`; `7`"),
    "dl.rank": Attribute("int", "Rank among all processes of the run", "`0`; `63`"),
    "dl.world_size": Attribute("int", "Number of processes of the run", "`1`; `64`"),
    "fastvideo.stage": Attribute("string", "A stage's name in its pipeline", "`denoising_stage`"),
    **{
        f"fastvideo.{field}": Attribute("int or double", f"`{field}` of the request", "`480`; `5.0`")
        for field in _REQUEST_FIELDS
    },
    "what": Attribute("string", "What was lost", "`record`; `span`; `metric_point`"),
    "reason": Attribute("string", "Why", "`refused`; `queue_full`"),
    "exception.message": Attribute("string", "The exception's message", "`CUDA out of memory`", STABLE),
    "exception.type": Attribute("string", "The exception's class", "`torch.OutOfMemoryError`", STABLE),
    "host.name": Attribute("string", "Name of the host", "`node-17`"),
    "process.pid": Attribute("int", "Process id", "`4242`"),
    "service.instance.id": Attribute("string", "A new id for every process", "`627cc493-…`", STABLE),
}  # fmt: skip

# ---- spans

REGION = {"torch.region": REQUIRED}
TRAINING_STEP = {
    **{quantity.metric: RECOMMENDED for quantity in ROWS.values()},
    "torch.training.<quantity>.values": if_("the step has several values of a quantity"),
    **dict.fromkeys(SCOPE_ATTRIBUTES, RECOMMENDED),
}

SPANS = {
    "torch.run": Signal(
        "the run",
        "One process's part of a run. It SHOULD be the root of all other spans of the process, and all processes of a run SHOULD "
        "share its trace. Where a step starts a trace of its own, the two spans SHOULD link to each other.",
        {
            "otel_torch.run.id": REQUIRED,
            "dl.rank": REQUIRED,
            "otel_torch.linked_traces": if_("there are such traces"),
        },
    ),
    "torch.step": Signal(
        "a step",
        "One iteration of the main loop: an optimizer step with its forward and backward passes, or a denoise step. A training step "
        "SHOULD be the root of its own trace: one trace of a long run exceeds what backends accept. The span is not lexical (it ends in "
        "the optimizer), so it MUST NOT become the current span. A training step has [its values](#attributes-of-a-training-step), too; with "
        "FastVideo or registered regions, also a region `…_training_step` in it.",
        {
            "torch.step": REQUIRED,
            "torch.loop": REQUIRED,
            "torch.model": if_("the step belongs to one model"),
            **TRAINING_STEP,
        },
    ),
    "torch.forward": Signal(
        "a forward pass",
        "The outermost forward pass of a model, unless a region that was entered at a call site contains it. Forward passes of its modules "
        "are events and metrics, not spans.",
        {"torch.model": REQUIRED, "torch.phase": REQUIRED},
    ),
    "torch.backward": Signal(
        "a backward pass",
        "One call of `backward`, in a program that neither imports FastVideo nor registers a region. In any other program it is the "
        "registered region `…_training_backward`.",
        REGION,
    ),
    "torch.optimizer.step": Signal(
        "an update", "One update of an optimizer, likewise; else the region `…_training_optimizer`.", REGION
    ),
    "fastvideo.region::<name>": Signal(
        "a registered region",
        "A stretch of code that the program names, as in `fastvideo.region::profiler_region_model_loading`; `OTEL_TORCH_REGION_PREFIX` "
        "changes the prefix.",
        REGION,
    ),
    "torch.interleave": Signal(
        "a forward pass that other code takes part in",
        "Implementation-specific: a run of `otel_torch.interleave`, with an event for each wait.",
        {"torch.model": REQUIRED},
    ),
    "torch.step.events": Signal(
        "further events of a step",
        "Span events that do not fit on the span of their step, which takes 1 MB of them. Not needed with log events.",
        {},
    ),
    "fastvideo.generate": Signal("a video", "Implementation-specific, in FastVideo's parent process.", {}),
    "fastvideo.pipeline::<class>": Signal(
        "a pipeline",
        "Implementation-specific: the forward pass of a FastVideo pipeline.",
        {f"fastvideo.{field}": RECOMMENDED for field in _REQUEST_FIELDS},
    ),
    "fastvideo.stage::<class>": Signal(
        "a stage",
        "Implementation-specific: a stage of a FastVideo pipeline.",
        {"fastvideo.stage": if_("the pipeline names it")},
    ),
    "otel_torch.doctor": Signal("a test", "Sent by `otel-torch doctor` to see whether spans arrive.", {}),
    "<range>": Signal(
        "a range",
        "A range of `record_function`, or an unregistered region, that `OTEL_TORCH_REGIONS` selects. Beyond 100 distinct names the span SHOULD be "
        "named `record_function`.",
        REGION,
    ),
}  # fmt: skip
ANY_SPAN = {
    "torch.device.duration": if_("it was measured"),
    "otel_torch.unfinished": if_("true"),
}

# ---- events

EVENTS = {
    ACTIVATION: Signal(
        "a tensor",
        "The [statistics](#statistics) of one tensor of one module call. The time of the event MUST be that of the tensor. It SHOULD be a "
        "log record with this event name, severity `INFO`, and the trace and span of its step (`log_events`, the default); it MAY be an "
        "event of the step's span (`span_events`): [which of the two](backends/jaeger.md#span-events-or-log-events).",
        {
            "torch.model": REQUIRED,
            "torch.module": REQUIRED,
            "torch.tensor": REQUIRED,
            "torch.step": REQUIRED,
            "torch.call": REQUIRED,
            "torch.loop": REQUIRED,
            "torch.phase": REQUIRED,
            "torch.branch": if_("the framework names it"),
            "torch.stat.<statistic>": RECOMMENDED,
        },
    ),
    "exception": Signal(
        "an exception",
        "An exception that left a span, as [OpenTelemetry defines it](https://opentelemetry.io/docs/specs/semconv/exceptions/). "
        "Its span has the status ERROR. Messages may hold a user's data: `OTEL_TORCH_EXCEPTIONS=message`.",
        {"exception.type": REQUIRED, "exception.message": OPT_IN},
    ),
    "torch.interleave.wait": Signal(
        "a wait",
        "Implementation-specific: the body of `interleave` waited for a module.",
        {
            "torch.module": REQUIRED,
            "torch.interleave.asked": REQUIRED,
            "torch.interleave.waited": REQUIRED,
        },
    ),
    "fastvideo.profiler.enable_collection": Signal(
        "the profiler begins", "On a region's span: the torch profiler begins to collect.", {}
    ),
    "fastvideo.profiler.disable_collection": Signal(
        "the profiler ends", "On a region's span: the torch profiler ends to collect.", {}
    ),
}  # fmt: skip

# ---- metrics

OF_MODULE = if_("the value is that of one module")
TRAINING_METRICS = {
    quantity.metric: Metric(quantity.kind, quantity.unit, quantity.text)
    for quantity in (*ROWS.values(), *SCOPE_ATTRIBUTES.values(), NONFINITE)
}
ACTIVATION_METRICS = {
    f"{ACTIVATION}.{name}": Metric("gauge", "", f"`{name}` of a tensor, of the last call in a step")
    for name, statistic in STATISTICS.items()
    if statistic.type in ("double", "int") and name not in NOT_GAUGES
} | {
    f"{ACTIVATION}.nonfinite": Metric("counter", "{element}", "Elements that are NaN or infinite"),
    f"{ACTIVATION}.magnitude": Metric("exponential histogram", "", "One sample a tensor: its `abs_mean`"),
}  # fmt: skip
METRICS = [
    (
        Signal(
            "of training",
            "They SHOULD be recorded once a step, in any program that calls `backward` and an optimizer ([what they "
            "measure](training.md#what-is-recorded)). NaN and Inf MUST NOT be points of a gauge; they are counted in "
            f"`{NONFINITE.metric}`. A point with `torch.module` is that of a module; one without is that of the whole model, which "
            "`OTEL_TORCH_METRIC_SERIES` neither counts nor drops.",
            {
                "torch.model": REQUIRED,
                "torch.module": OF_MODULE,
                "torch.law": if_("the value is that of a law of training"),
                "torch.param_group": if_("the value is that of a parameter group"),
                "torch.tensor": f"{if_('the metric is')} `{NONFINITE.metric}`: the name of the quantity's row, as `grad_norm`",
                "torch.step": OPT_IN,
            },
        ),
        TRAINING_METRICS,
    ),
    (
        Signal(
            "of a step's time",
            f"Explicit bucket boundaries SHOULD be {[float(bound) for bound in _DURATION_BOUNDS_S]}.",
            {"torch.model": REQUIRED},
        ),
        {STEP_DURATION.metric: Metric(STEP_DURATION.kind, STEP_DURATION.unit, STEP_DURATION.text)},
    ),
    (
        Signal(
            "of a region's time",
            "Boundaries as above. The region is its registered name, or the name of its span: `torch.step` (training steps only), "
            "`torch.backward`, `torch.optimizer.step`, a range or a FastVideo span.",
            {"torch.region": REQUIRED},
        ),
        {"torch.region.duration": Metric("histogram", "s", "Duration of a region")},
    ),
    (
        Signal("of progress", "", {"torch.model": if_("the step belongs to one model")}),
        {"torch.step": Metric("gauge", "", "The current step of the main loop")},
    ),
    (
        Signal(
            "of activations",
            "Of the last call of a step. `torch.call` and `torch.loop` MUST NOT be attributes of a metric: they have no bound. "
            "Instrumentations SHOULD limit the number of series (`OTEL_TORCH_METRIC_SERIES`) and count what the limit drops.",
            {
                "torch.model": REQUIRED,
                "torch.module": REQUIRED,
                "torch.tensor": REQUIRED,
                "torch.phase": REQUIRED,
                "torch.branch": if_("the framework names it"),
                "torch.step": OPT_IN,
            },
        ),
        ACTIVATION_METRICS,
    ),
    (
        Signal(
            "of losses",
            "Whatever does not arrive MUST be counted: [the reasons](#what-did-not-arrive).",
            {"what": REQUIRED, "reason": REQUIRED},
        ),
        {"otel_torch.records.dropped": Metric("counter", "{record}", "What did not arrive, and why")},
    ),
]  # fmt: skip

# ---- resource

RESOURCE = {
    "service.instance.id": REQUIRED,
    "host.name": RECOMMENDED,
    "process.pid": RECOMMENDED,
    "dl.rank": REQUIRED,
    "dl.local_rank": RECOMMENDED,
    "dl.world_size": REQUIRED,
    "otel_torch.run.id": REQUIRED,
}

# what the package's own descriptions, which backends show, do not say
NOTES = {
    "torch.training.loss": "of several backward passes in a step that of the last",
    "torch.training.learning_rate": "by `torch.param_group`",
    "torch.training.weight_decay": "by `torch.param_group`",
    "torch.training.optimizer_step": "by `torch.param_group`; only where updates are recorded",
    "torch.training.gradient_norm": "with `torch.module` that of one module's parameters",
    "torch.training.gradient_norm_clipped": "if the program clips them",
    "torch.training.broken_laws": "by `torch.law`: [the laws of training](training.md#the-laws-of-training)",
    "torch.training.parameter_norm": "with `torch.module` those of one module",
    "torch.training.update_ratio": "with `torch.module` of one module",
    "torch.training.dead_units": "by `torch.module`",
    "torch.training.throughput.samples": "those of the step, over its duration",
    "torch.training.throughput.tokens": "those of the step, over its duration",
    "torch.training.step.duration": "from the first forward to the optimizer's update",
    "torch.training.nonfinite": "by `torch.tensor`, the name of their row: `loss`, `grad_norm` …",
    "torch.step": "by `torch.model`",
    f"{ACTIVATION}.<statistic>": "NaN and Inf are skipped",
}  # fmt: skip

# ---- the page

HEAD = """\
<!-- made by docs/make_opentelemetry_names.py; change it there, then run `make docs` -->
# OpenTelemetry names

All spans, events, metrics and attributes that are exported. `OTEL_TORCH_SIGNALS` selects the kinds, and the standard `OTEL_*` variables the
destination. The instrumentation scope is always `otel_torch`, and all spans are of kind `INTERNAL`.

The names are a proposal, too, in the terms of OpenTelemetry's [semantic conventions](https://opentelemetry.io/docs/specs/semconv/), for two
things that these do not cover: how a training goes (loss, norms, rates), and what the numbers inside a model do. `gen_ai.*` describes
requests to a model, seen from outside; a proposal for [inference of other
models](https://github.com/open-telemetry/semantic-conventions/issues/3420) does so too, and one for [reinforcement
learning](https://github.com/open-telemetry/semantic-conventions-genai/issues/88) describes its stages. MUST, SHOULD and MAY are those of
[RFC 2119](https://www.rfc-editor.org/rfc/rfc2119).

## Rules

- **Numbers that are not finite.** In an attribute, NaN and infinities MUST be the strings `"NaN"`, `"Infinity"` and `"-Infinity"`: JSON
  has no such numbers, and backends fail on them (one makes Jaeger answer 500 for the whole service). A metric MUST NOT have such points,
  and counts them.
- **A step is an attribute, not a name.** Names of spans and metrics MUST NOT hold a number, a module or a parameter group.
- **Steps as metric attributes** are unbounded in training. There `torch.step` SHOULD be left out, and each point has the time of its
  step. In a loop with a known end (denoising) it MAY be an attribute (`OTEL_TORCH_METRIC_STEP`).
- **Events are log records.** OpenTelemetry
  [phases out the API of span events](https://opentelemetry.io/blog/2026/deprecating-span-events/) in favor of log records with an event
  name; span events remain a way to show them in a trace, and Jaeger, which stores traces only, shows nothing else.
- **Tensors MUST NOT be sent**, nor command lines: they may hold a user's data. Of a tensor only its statistics are sent.

An attribute is [required](LEVELS) unless its level
stands behind it; one with a condition is conditionally required. What each attribute holds is in [their table](#attributes).
""".replace("LEVELS", LEVELS)

OF_A_TRAINING_STEP = """
### Attributes of a training step

The span `torch.step` of a training step has the values of the whole model under the names of [their metrics](#metrics-of-training). Each is
a number, or a string where it is not finite; `torch.training.broken_laws` is the list of their names.

- Of several backward passes in a step, `torch.training.loss` is the last one's, and `torch.training.loss.values` lists all in order.
  Such a list has the last 100 values, and holds strings if one of them is not finite.
- Of several parameter groups, `torch.training.learning_rate` is the first one's, and `torch.training.learning_rate.values` lists all;
  the same goes for `torch.training.weight_decay.values`, and for every other value that a step has several times.
- `torch.training.samples` and `torch.training.tokens` are those of the step; `torch.training.device_memory` is the peak so far, in bytes.

Values of single modules are metrics only. No value of a training is an activation event.

**Size of traces.** Backends reject traces larger than about 5 MB, so ours stay below 4 MB. In the run's trace, the first process of a
run uses up to 2.5 MB, and a process that joins it (through [`TRACEPARENT`](configuration.md#the-trace-of-a-run), as a worker does) up to 1.5 MB, each divided by the number of
ranks. After that, and always in training, a step is the root of its own trace, with a link to `torch.run`. `torch.run` links to the
first 100 of these traces and counts all of them in `otel_torch.linked_traces`.
"""

LOST = """
## What did not arrive

Losses are counted in `otel_torch.records.dropped`, listed as `lost` in the recording's metadata, and printed in one line at exit.
`what` is `record`, `span`, `span_event`, `log_event`, `metric_point`, or what a limit has dropped from these, `attribute` or `link`. Spans, log events and metric points are also counted under the
names of OpenTelemetry's [conventions for the SDK](https://opentelemetry.io/docs/specs/semconv/otel/sdk-metrics/), with the reason as
`error.type`, so that a dashboard for exporters shows them. Where something was lost, the same metric counts without `error.type` what
was not:

| metric | counts |
|---|---|
| `otel.sdk.processor.span.processed`, `otel.sdk.processor.log.processed` | `queue_full`, `shutdown`: what never reached an exporter |
| `otel.sdk.exporter.span.exported`, `otel.sdk.exporter.log.exported` | `refused`, `unconfirmed`, `rejected`, `too_large`, `unencodable`, `disk`, `max_bytes`: exports that failed |
| `otel.sdk.exporter.metric_data_point.exported` | all of these, of metric points |

`reason` is one of:

| reason | meaning |
|---|---|
| `refused` | the endpoint could not be reached, or refused the message |
| `unconfirmed` | the message was sent, but not answered in time, or the connection broke |
| `rejected` | the receiver accepted the message and reported that it rejected a part of it |
| `queue_full` | more than 64 MB were queued, and the program was not delayed any further |
| `shutdown` | no time was left at the end of the program |
| `too_large`, `unencodable` | one item exceeds the limit of a message, or cannot be encoded |
| `event_limit` | `OTEL_SPAN_EVENT_COUNT_LIMIT` is set and a span has more events, or the program's own provider takes none |
| `attribute_limit`, `link_limit` | more than a standard limit, such as `OTEL_ATTRIBUTE_COUNT_LIMIT`, allows; the span or log record has the count, too |
| `series_limit` | more series than `OTEL_TORCH_METRIC_SERIES` |
| `disk`, `max_bytes` | not in the recording: the disk failed, or `OTEL_TORCH_MAX_BYTES` was reached |
| `not_walked` | outputs in which no tensor was found, of a class that may hold some; the classes are reported |
| `spread_over_ranks` | a parameter or gradient of which each rank keeps only a part, under a sharded optimizer (DeepSpeed ZeRO) |
| `recursion` | a module call nested so deeply that recording it would reach Python's recursion limit earlier than the program does |
| `error`, `unreadable`, `sink_failed`, `region_failed`, `after_the_end` | an error of otel_torch, reported in its own line when it happened; a record that came after the end |
"""

TAIL = """
## Open questions

- `torch.*` names a framework. Nothing in the training metrics depends on it: they may become `ml.training.*`.
- `dl.*` should be attributes of a resource or an entity that other conventions for distributed jobs share.
- `fastvideo.region::<name>` is a name of high cardinality for historical reasons; `torch.region` has the same information.
- An exception is a span event until the specification has an API that puts it into the span's attributes (OTEP 4430).
- `what` and `reason` have no namespace. OpenTelemetry's own metrics of an SDK use `error.type` for a reason.
- Activations have no unit that can be known, so these metrics have none; guidelines ask for `1`, which means a ratio.
"""

PHASES = {
    "forward": "A forward pass",
    "eval": "A forward pass without gradients, of a model that is trained",
    "recompute": "A forward pass repeated during the backward pass (activation checkpointing)",
    "backward": "Gradients",
    "attach": "Parameters before the first forward pass",
    "update": "Parameters after an optimizer's step",
    "warmup": "A framework's own forward pass on dummy inputs",
}


def cell(text):
    """Return a cell of a table, or a dash for an empty one."""
    return text.replace("|", r"\|") or "–"


def table(head, rows):
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def attributes_of(levels):
    """Return the attributes of a signal, with the levels of those that are not required."""
    shown = {name: level for name, level in levels.items() if name not in TRAINING_STEP}
    return ", ".join(
        f"`{name}`" if level == REQUIRED else f"`{name}` ({level})" for name, level in shown.items()
    )


def signal_table(kind, signals):
    """Return the table of spans or events."""
    rows = [
        [
            f"`{name}`",
            cell(f"**{signal.heading[0].upper()}{signal.heading[1:]}.** {signal.text}"),
            attributes_of(signal.attributes),
        ]
        for name, signal in signals.items()
    ]
    return table([kind, "What it is", "Attributes"], rows)


def metric_section(signal, metrics):
    """Return the section of metrics that have the same attributes."""
    rows = []
    for name, row in metrics.items():
        text = f"{row.text}; {NOTES[name]}" if name in NOTES else row.text
        unit = f"`{row.unit}`" if row.unit else "none"
        rows.append([f"`{name}`", f"{row.instrument}, {unit}", cell(text)])
    text = f"{signal.text}\n\n" if signal.text else ""
    head = ["Metric", "Instrument, unit (UCUM)", "Description"]
    attributes = f"Attributes: {attributes_of(signal.attributes)}."
    return f"\n### Metrics {signal.heading}\n\n{text}{table(head, rows)}\n{attributes}\n"


def shown_metrics(metrics):
    """Return the metrics with one row for all gauges of statistics."""
    gauges = [
        name
        for name in metrics
        if name.startswith(f"{ACTIVATION}.") and metrics[name].instrument == "gauge"
    ]
    if not gauges:
        return metrics
    text = "A statistic of a tensor: every numeric one but `nonfinite` and `numel`"
    rest = {name: row for name, row in metrics.items() if name not in gauges}
    return {f"{ACTIVATION}.<statistic>": Metric("gauge", "", text)} | rest


def attribute_rows(attributes):
    """Return the rows of a table of what attributes hold."""
    return [
        [f"`{name}`", row.type, cell(row.text), cell(row.examples)]
        for name, row in attributes.items()
    ]


def make_page() -> str:
    """Return the whole page."""
    quantities = {quantity.metric for quantity in ROWS.values()}
    listed = {name: row for name, row in ATTRIBUTES.items() if name not in quantities}
    stable = ", ".join(f"`{name}`" for name, row in ATTRIBUTES.items() if row.stability == STABLE)
    statistics = {f"torch.stat.{name}": row for name, row in STATISTICS.items()}
    head = ["Attribute", "Type", "Description", "Examples"]
    return "".join([
        HEAD,
        "\n## Spans\n\n",
        signal_table("Span", SPANS),
        f"\nOn any span: {attributes_of(ANY_SPAN)}.\n",
        OF_A_TRAINING_STEP,
        "\n## Events\n\n",
        signal_table("Event", EVENTS),
        "\n## Metrics\n",
        *(metric_section(signal, shown_metrics(metrics)) for signal, metrics in METRICS),
        "\nPrometheus uses underscores and suffixes: `torch_module_activation_abs_mean`, `torch_module_activation_nonfinite_total`,\n"
        "`torch_region_duration_seconds_bucket`.\n",
        "\n## Attributes\n\n",
        f"All are in [development](https://opentelemetry.io/docs/specs/otel/document-status/) but {stable}, which OpenTelemetry calls stable.\n\n",
        table(head, attribute_rows(listed)),
        "\n### Statistics\n\nA `double` that is not finite is a string.\n\n",
        table(head, attribute_rows(statistics)),
        "\n### Phases\n\n`torch.phase` MUST be one of these:\n\n",
        table(["Value", "Description"], [[f"`{name}`", text] for name, text in PHASES.items()]),
        "\n### Resource\n\n",
        f"{attributes_of(RESOURCE)}; `service.name`, `telemetry.sdk.*`, and the\nattributes of `OTEL_RESOURCE_ATTRIBUTES` and of resource "
        "detectors, except command lines. The program's own providers use their own resource.\n",
        LOST,
        TAIL,
    ])  # fmt: skip


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
