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

1. an argument of `otel_torch.start()`
2. our variable, also if it is empty
3. FastVideo's variable
4. the default

`otel-torch doctor` checks all of this before a run, and says of every variable that is set whether it is used, or what wins over it.

Endpoints, protocols, headers, service name, sampling and resource are the standard `OTEL_*` variables of OpenTelemetry
(`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_SERVICE_NAME`, …). Providers that the program sets up itself win over them. `OTEL_SDK_DISABLED=true`,
and next `OTEL_CONFIG_FILE` ([declarative configuration](getting-started.md#other-ways-to-start)), win over all variables of exporters.

| variable | default | meaning | FastVideo's |
|---|---|---|---|
"""

TAIL = """
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
