"""Writes docs/configuration.md from the table of settings: `make docs`."""

import dataclasses
import pathlib

from otel_torch.settings import Settings

PAGE = pathlib.Path(__file__).with_name("configuration.md")

HEAD = """\
<!-- made by docs/make_configuration.py from otel_torch/settings.py; change it there, then run `make docs` -->
# Configuration

Every setting is an environment variable, so that you edit no program. Switches are on for `1`, `true`, `yes` and `on`, and
off for `0`, `false`, `no`, `off` and an empty value, in upper or lower case. If one of these variables is unset, the FastVideo
variable in the last column is read instead.

- A bad value is reported in one line on stderr, with the variable, the value and what is allowed. The default is used.
- A bad entry in a list is reported and skipped.
- If a regular expression is invalid, or a list has no usable entry, the program runs unrecorded: to record anything other
  than what you asked for would mislead.

Of several sources the first one in this list wins, for each setting by itself:

1. an argument of `otel_torch.start()` or `OtelTorchInstrumentor().instrument()`, or the file of
   [declarative configuration](#one-file-for-everything)
2. our variable, also if it is empty
3. FastVideo's variable
4. the default

`otel-torch doctor` checks all of this before a run, and says of every variable that is set whether it is used, or what wins over it.

Endpoints, protocols, headers, service name, sampling and resource are the standard `OTEL_*` variables of OpenTelemetry
(`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_SERVICE_NAME`, …). Providers that the program sets up itself win over them. `OTEL_SDK_DISABLED=true`,
and next `OTEL_CONFIG_FILE` ([declarative configuration](#one-file-for-everything)), win over all variables of exporters.

| variable | default | meaning | FastVideo's |
|---|---|---|---|
"""

TAIL = r"""
## Steps, ranks, regions

- Steps: `0,2,10-20,*/10` selects steps 0 and 2, steps 10 to 20, and every tenth step. Each model counts its own steps,
  from 0. The record format says [what a step is](record-format.md).
- Ranks: `0`, `0,8`, `first_per_node`, `all`. A rank that neither writes a recording nor exports gets no hooks.
- Regions: `registered` selects all registered regions. Any other entry is a name, a short name or a wildcard, and also
  matches the program's `torch.profiler.record_function` ranges: `registered,my_range*`.

## Files

`OTEL_TORCH_JSONL` may contain `<run>`, `<rank>` and `<pid>`. The path always holds the newest run: the file of an earlier run
is renamed to `NAME.1.jsonl` (and so on), together with its metadata. If there are several ranks and no placeholder, `.rank<rank>`
is inserted before `.jsonl`. A second process of the same run and rank gets `.pid<pid>`. A process that records nothing
writes no file.

## When `opentelemetry-instrument` records

`opentelemetry-instrument python train.py` records a program that imports torch although `OTEL_TORCH_ENABLED` is unset or empty: the
wrapper is the switch. It sets `OTEL_TORCH_ENABLED=1`, and the settings of a file, in the environment, so that processes that the
program starts are recorded alike. It needs the extra `instrument`, and it does not record if

- `OTEL_TORCH_ENABLED` is `0`, `false`, `no` or `off`,
- `OTEL_PYTHON_DISABLED_INSTRUMENTATIONS` has `torch` or `*`, and no file has a section `torch`,
- the file that `OTEL_CONFIG_FILE` names has `torch: {enabled: false}`.

In code, `OtelTorchInstrumentor().instrument()` does the same as the wrapper, and `uninstrument()` ends it.

## One file for everything

OpenTelemetry's [declarative configuration](https://opentelemetry.io/docs/specs/otel/configuration/) puts exporters and our settings
into one file. A setting is its variable's name in lower case without `OTEL_TORCH_`; a list may be a list. A name that does not exist is
reported in one line with the one that is meant, and skipped.

```yaml
file_format: "1.1"
resource:
  attributes:
    - {name: service.name, value: my-model}
tracer_provider:
  processors:
    - batch: {exporter: {otlp_http: {endpoint: "http://localhost:4318/v1/traces"}}}
logger_provider:
  processors:
    - batch:
        max_queue_size: 65536  # of the records of some steps
        exporter: {otlp_http: {endpoint: "http://localhost:4318/v1/logs"}}
meter_provider:
  readers:
    - periodic: {exporter: {otlp_http: {endpoint: "http://localhost:4318/v1/metrics"}}}
instrumentation/development:
  python:
    torch:
      modules: ^blocks\.\d+$
      steps: [0, "*/2"]
      stats: [abs_mean, nonfinite, shape]
      jsonl: run.jsonl
```

```bash
pip install 'otel-torch[instrument]' opentelemetry-distro opentelemetry-configuration
OTEL_CONFIG_FILE=otel.yaml opentelemetry-instrument python train.py
```

The SDK reads the file, with `opentelemetry-configuration` 0.66b2 in schema 1.1, and makes the providers that are used. Their queues are
the SDK's: one for log records holds 2,048 by default, and drops the oldest when a step has more. Without the wrapper or without
a distribution nobody reads the file; then nothing is sent, which one line says. The SDK says that the instrumentor is
"already instrumented" where the file has a section for it, because the wrapper calls every instrumentor once more.

## The trace of a run

`TRACEPARENT` and `TRACESTATE` are OpenTelemetry's
[environment carrier](https://opentelemetry.io/docs/specs/otel/context/env-carriers/), in the format of W3C Trace Context. If a launcher,
a scheduler or a CI job sets `TRACEPARENT`, the span `torch.run` of every rank becomes a child of that span. If it is unset, all ranks
derive the same trace id from the run id, and a process whose spans have begun sets it for the processes that it starts, until it ends.
`BAGGAGE` and `OTEL_PROPAGATORS` are not read.
"""


def make_page() -> str:
    """Return the whole page."""
    rows = []
    for field in dataclasses.fields(Settings):
        row = field.metadata
        alias = f"`{row['alias']}`" if row["alias"] else ""
        default = row["shown"].replace("|", r"\|")
        default = f"`{default}`" if default == row["default"] else default
        text = row["help"].replace("|", r"\|")
        rows.append(f"| `{row['name']}` | {default} | {text} | {alias} |\n")
    return HEAD + "".join(rows) + TAIL


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
