"""Writes docs/semantic-conventions.md: `make docs`.

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

PAGE = pathlib.Path(__file__).with_name("semantic-conventions.md")

REQUIRED, RECOMMENDED, OPT_IN = "`Required`", "`Recommended`", "`Opt-In`"
DEVELOPMENT, STABLE = "Development", "Stable"
LEVELS = "https://opentelemetry.io/docs/specs/semconv/general/attribute-requirement-level/"


def if_(condition):
    """Return the requirement level of an attribute that only some signals of a kind have."""
    return f"`Conditionally Required` if {condition}"


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
        heading: of its section, without the kind.
        text: the section's first lines.
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
        "the optimizer), so it MUST NOT become the current span.",
        {
            "torch.step": REQUIRED,
            "torch.loop": REQUIRED,
            "torch.model": if_("the step belongs to one model"),
            **TRAINING_STEP,
        },
    ),
    "torch.forward": Signal(
        "a forward pass",
        "The outermost forward pass of a model. Forward passes of its modules are events and metrics, not spans.",
        {"torch.model": REQUIRED, "torch.phase": REQUIRED},
    ),
    "torch.backward": Signal("a backward pass", "One call of `backward`.", REGION),
    "torch.optimizer.step": Signal("an update", "One update of an optimizer.", REGION),
    "fastvideo.region::<name>": Signal(
        "a registered region",
        "A stretch of code that the program names. The prefix is configurable.",
        REGION,
    ),
    "torch.interleave": Signal(
        "a forward pass that other code takes part in",
        "Implementation-specific: a run of `otel_torch.interleave`.",
        {"torch.model": REQUIRED},
    ),
    "torch.step.events": Signal(
        "further events of a step",
        "Span events that do not fit on the span of their step, whose size backends limit. Not needed with log events.",
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
        "A range of `record_function`, or an unregistered region, that the user selects. Beyond 100 distinct names the span SHOULD be "
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
        "The statistics of one tensor of one module call. The time of the event MUST be that of the tensor. It SHOULD be a log record "
        "with this event name, severity `INFO`, and the trace and span of its step; it MAY be a span event of the step's span.",
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
        "Messages may hold a user's data.",
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
            "They SHOULD be recorded once a step. NaN and Inf MUST NOT be points of a gauge; they are counted in "
            f"`{NONFINITE.metric}`.",
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
            "Boundaries as above.",
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
            "`torch.call` and `torch.loop` MUST NOT be attributes of a metric: they have no bound. Instrumentations SHOULD limit the "
            "number of series and count what the limit drops.",
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
            "Whatever does not arrive MUST be counted. Spans, log records and data points SHOULD also be counted by the "
            "[metrics of the SDK](https://opentelemetry.io/docs/specs/semconv/otel/sdk-metrics/), with the reason as `error.type`.",
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

# ---- the page

HEAD = """\
<!-- made by docs/make_semantic_conventions.py; change it there, then run `make docs` -->
# Semantic conventions for training and activations

**Status**: [Development](https://opentelemetry.io/docs/specs/otel/document-status/)

A proposal, in the form of OpenTelemetry's [semantic conventions](https://opentelemetry.io/docs/specs/semconv/), for two things that
these do not cover: how a training goes (loss, norms, rates), and what the numbers inside a model do. `gen_ai.*` describes requests to a
model, seen from outside; a proposal for [inference of other models](https://github.com/open-telemetry/semantic-conventions/issues/3420)
does so too, and one for [reinforcement learning](https://github.com/open-telemetry/semantic-conventions-genai/issues/88) describes its
stages. otel_torch sends exactly what is written here. [OpenTelemetry names](opentelemetry-names.md) explains the same names to a user.

MUST, SHOULD and MAY are those of [RFC 2119](https://www.rfc-editor.org/rfc/rfc2119).

## Rules

- **Numbers that are not finite.** In an attribute, NaN and infinities MUST be the strings `"NaN"`, `"Infinity"` and `"-Infinity"`: JSON
  has no such numbers, and backends fail on them. A metric MUST NOT have such points, and counts them.
- **A step is an attribute, not a name.** Names of spans and metrics MUST NOT hold a number, a module or a parameter group.
- **Steps as metric attributes** are unbounded in training. There `torch.step` SHOULD be left out, and each point has the time of its
  step. In a loop with a known end (denoising) it MAY be an attribute.
- **Events are log records.** OpenTelemetry
  [phases out the API of span events](https://opentelemetry.io/blog/2026/deprecating-span-events/) in favor of log records with an event
  name; span events remain a way to show them in a trace.
- **Tensors MUST NOT be sent**, nor command lines: they may hold a user's data. Of a tensor only its statistics are sent.

All spans are of kind `INTERNAL`.
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


def attribute_table(levels):
    """Return the table of the attributes of a signal."""
    rows = []
    for name, level in levels.items():
        row = ATTRIBUTES[name]
        cells = (row.type, row.text, row.examples, level, row.stability)
        rows.append([f"`{name}`", *map(cell, cells)])
    level = f"[Requirement level]({LEVELS})"
    return table(["Attribute", "Type", "Description", "Examples", level, "Stability"], rows)


def signal_section(kind, name, signal):
    """Return the section of a span or an event."""
    heading = f"\n### {kind}: {signal.heading}\n\n"
    named = f"**Status**: {DEVELOPMENT}. **{kind} name**: `{name}`.\n\n{signal.text}\n"
    return (
        heading + named + ("\n" + attribute_table(signal.attributes) if signal.attributes else "")
    )


def metric_section(signal, metrics):
    """Return the section of metrics that have the same attributes."""
    rows = [
        [f"`{name}`", row.instrument, cell(row.unit and f"`{row.unit}`"), row.text, DEVELOPMENT]
        for name, row in metrics.items()
    ]
    head = ["Name", "Instrument", "Unit (UCUM)", "Description", "Stability"]
    text = f"{signal.text}\n\n" if signal.text else ""
    tables = f"{table(head, rows)}\n{attribute_table(signal.attributes)}"
    return f"\n### Metrics {signal.heading}\n\n{text}{tables}"


def make_page() -> str:
    """Return the whole page."""
    statistics = [
        [f"`torch.stat.{name}`", row.type, row.text, row.examples, row.stability]
        for name, row in STATISTICS.items()
    ]
    phases = [[f"`{name}`", text, DEVELOPMENT] for name, text in PHASES.items()]
    return "".join([
        HEAD,
        "\n## Spans\n",
        *(signal_section("Span", name, span) for name, span in SPANS.items()),
        "\n### Attributes of any span\n\n",
        attribute_table(ANY_SPAN),
        "\n## Events\n",
        *(signal_section("Event", name, event) for name, event in EVENTS.items()),
        "\n### Statistics\n\nA `double` that is not finite is a string.\n\n",
        table(["Attribute", "Type", "Description", "Examples", "Stability"], statistics),
        "\n### Phases\n\n`torch.phase` MUST be one of these:\n\n",
        table(["Value", "Description", "Stability"], phases),
        "\n## Metrics\n",
        *(metric_section(signal, metrics) for signal, metrics in METRICS),
        "\n## Resource\n\nOf an instrumentation's own providers. Those of the program keep their resource.\n\n",
        attribute_table(RESOURCE),
        TAIL,
    ])  # fmt: skip


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
