"""Writes docs/configuration.md from the settings table, so that the two cannot differ: `make
docs`.
"""

import dataclasses
import pathlib

from otel_torch.settings import Settings

PAGE = pathlib.Path(__file__).with_name("configuration.md")

HEAD = """\
<!-- made by docs/make_configuration.py from otel_torch/settings.py; change it there, then run `make docs` -->
# Configuration

Everything is an environment variable, so that no program has to be edited. `1/true/yes/on` is on, `0/false/no/off` and
empty is off, in any case. Where a variable of ours is unset, the FastVideo variable in the last column is read instead.

A bad value is one line on stderr that names the variable, the value and what is allowed; the default is used. A bad entry
in a list is named and left out. Only where nothing usable remains of a selection (a regular expression, a list of steps)
does the program run on unrecorded: recording something else than what was asked for would mislead. `otel-torch doctor`
says all of this before a run.

Where things are sent, and how, is OpenTelemetry's own business: endpoints, protocols, headers, service name, sampling and
resource are the standard `OTEL_*` variables (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_SERVICE_NAME`, …). None is invented
twice.

| variable | default | meaning | FastVideo's |
|---|---|---|---|
"""

TAIL = """
## Steps, ranks, regions

- Steps: `0,2,10-20,*/10` are steps 0 and 2, steps 10 to 20, and every tenth from 0. They start at 0 and are counted a
  model; see [the record format](record-format.md) for what a step is.
- Ranks: `0`, `0,8`, `first_per_node`, `all`. A rank that neither writes a recording nor exports attaches no hook at all.
- Regions: `registered` are the registered regions; any other word is a name, a short name or a wildcard, and also takes
  the program's own `torch.profiler.record_function` ranges: `registered,my_range*`.

## Files

`<run>`, `<rank>` and `<pid>` in `OTEL_TORCH_JSONL` are replaced. The named path always holds the newest run: an earlier
run's file there is renamed `NAME.1.jsonl` (and so on), its metadata with it. With several ranks and no placeholder,
`.rank<rank>` goes in front of `.jsonl`; another process of the same run and rank gets `.pid<pid>`. A process that records
nothing writes no file.
"""


def make_page() -> str:
    """The whole page."""
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
