"""Every figure of docs/cluster.md on many ranks follows from its inputs: limits are those of the
shipped files and of the code, measured figures are in the tables that `python -m
tests.benchmarks.growth` writes, and computed figures are computed here again.

`python -m tests.test_growth` writes the computed tables.
"""

from __future__ import annotations

import inspect
import json
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import otel_torch
from otel_torch.settings import RankSelection, Settings
from otel_torch.telemetry.attributes import gauge_values
from otel_torch.telemetry.otlp import export_queue
from otel_torch.telemetry.sinks import trace_size
from tests.benchmarks.__main__ import rewritten
from tests.benchmarks.growth import SIGNALS, records_of
from tests.benchmarks.ranks import Spent, comparing_table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "cluster.md"
SHIPPED = ROOT / "collector-config"
DEFAULT = next(iter(SIGNALS))
RANKS = (1, 8, 64, 1024)
# what is recorded, and which ranks send: words, the input with the records of a step, one step in
# how many, OTEL_TORCH_RANKS
SELECTIONS = (
    ("all, every rank sends", "records of a step, all modules", 1, "all"),
    ("all, by default", "records of a step, all modules", 1, "auto"),
    ("blocks, every 10th step", "records of a step, blocks", 10, "auto"),
)


# -- reading


def rows(page: str, part: str) -> list[list[str]]:
    """Return the cells of a part's table without its header."""
    lines = [line for line in section(page, part).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def first_section() -> str:
    """Return the page up to its second section, which is not about many ranks."""
    text, heading, _ = PAGE.read_text().partition("\n## Without access to a collector\n")
    assert heading
    return text


def section(page: str, part: str) -> str:
    """Return the text between the markers of a part."""
    return page.partition(f"<!-- {part} -->")[2].partition(f"<!-- end of {part} -->")[0].strip()


def number(cell: str) -> float:
    """Return the number at the start of a cell; `1,020` is 1020."""
    match = re.match(r"-?[\d,]+(\.\d+)?", cell)
    assert match, cell
    return float(match[0].replace(",", ""))


def inputs_of(page: str) -> dict[str, float]:
    """Return the page's assumptions and measured figures by name."""
    inputs = {cells[0]: number(cells[1]) for cells in rows(page, "inputs")}
    for name, raw, packed, agent, gateway in rows(page, "signals"):
        inputs |= {f"{name}, B": number(raw), f"{name}, B gzip": number(packed)}
        if agent != "–":
            inputs |= {f"{name}, agent s": number(agent), f"{name}, gateway s": number(gateway)}
    for name, _, records, count, _, _, each, cpu in rows(page, "backends"):
        inputs |= {
            f"{name}, memory": number(each),
            f"{name}, s": number(cpu),
            f"{name}, count": number(count) / number(records),
        }
    return inputs


def shipped(name: str, *keys: str) -> float:
    """Return a number in a shipped file; for `${VARIABLE:-number}`, the default."""
    value: Any = yaml.safe_load((SHIPPED / name).read_text())
    for key in keys:
        value = value[key]
    text = str(value).partition(":-")[2].rstrip("}") if "${" in str(value) else str(value)
    return float(text.removesuffix("MB")) * (1e6 if text.endswith("MB") else 1)


def senders(ranks: int, which: str, per_node: float) -> int:
    """Return how many ranks of a job send."""
    chosen = RankSelection.parse(which, print)
    node = int(per_node)
    return sum(
        chosen.includes(rank=rank, local_rank=rank % node, world_size=ranks)
        for rank in range(ranks)
    )


# -- computing


def table(header: Sequence[str], lines: Sequence[Sequence[object]], left_columns: int = 1) -> str:
    """Return a Markdown table, the first columns left-aligned and the others right-aligned."""
    rule = "|" + "---|" * left_columns + "--:|" * (len(header) - left_columns)
    return "\n".join(
        [
            "| " + " | ".join(header) + " |",
            rule,
            *("| " + " | ".join(map(str, line)) + " |" for line in lines),
        ]
    )


def short(value: float) -> str:
    """Two digits that mean something, or all before the point.

    >>> short(0.0123), short(3.21), short(57.2), short(1234.5), short(3e-5)
    ('0.012', '3.2', '57', '1,234', '< 0.001')
    """
    return "< 0.001" if value < 0.001 else f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def example_table(given: Mapping[str, float]) -> str:
    """Return the load of a job and the share of each limit."""
    seconds, node = given["seconds a step"], given["ranks a node"]
    lines = []
    for words, records_name, every, which in SELECTIONS:
        for ranks in RANKS if which == "all" else RANKS[2:]:  # below that, all send
            sending = senders(ranks, which, node)
            sending_here = sending / ranks * min(node, ranks)  # on one node
            records = given[records_name]
            rate = sending * records / seconds / every
            series = sending * records * given["series a record"]
            lines.append([
                words, f"{ranks:,}", f"{sending:,}", short(rate), f"{series:,.0f}",
                short(rate * given["gauges a record"]),
                short(rate * given[f"{DEFAULT}, B"] / 1e6), short(rate * given[f"{DEFAULT}, B gzip"] / 1e6),
                short(series * given["prometheus, memory"] / 1e9),
                short(rate / sending * sending_here * given[f"{DEFAULT}, agent s"] / 1e6),
                short(rate * given[f"{DEFAULT}, gateway s"] / 1e6),
                short(rate * given["loki, count"] / 1e6),
            ])  # fmt: skip
    header = [
        "recorded", "ranks", "that send", "records/s", "series", "samples/s", "to the agents, MB/s", "to the gateway, MB/s",
        "Prometheus, GB", "an agent, cores", "the gateway, cores", "Loki, MB/s",
    ]  # fmt: skip
    return table(header, lines)


def limits(given: Mapping[str, float]) -> list[tuple[str, str, float, str, float]]:
    """Return (limit, where it is set, its value, unit, load of one sending rank), with all modules
    in every step.
    """
    records, seconds = given["records of a step, all modules"], given["seconds a step"]
    rate = records / seconds
    logged, traced = given["loki, count"] / 1e6, given["span events, B"] / 1e6  # MB a record
    memory = records * given["series a record"] * given["prometheus, memory"] / 1e9
    traces = shipped(
        "jaeger.yaml", "extensions", "jaeger_storage", "backends", "memory", "memory", "max_traces"
    )
    consumers = shipped(
        "collector-gateway.yaml",
        "exporters",
        "otlp_http/prometheus",
        "sending_queue",
        "num_consumers",
    )

    def loki(name: str) -> float:
        return shipped("loki.yaml", "limits_config", name)

    def own(name: str) -> float:
        return given[f"Loki's own `{name}`"]

    def tempo(name: str) -> float:
        return shipped("tempo.yaml", "overrides", "defaults", "ingestion", name) / 1e6

    answer, burst, speed = (
        "max_entries_limit_per_query",
        "ingestion_burst_size_mb",
        "ingestion_rate_mb",
    )
    streams, one_at_a_time = (
        "max_global_streams_per_user",
        "Prometheus is sent one request at a time (`num_consumers`)",
    )
    return [
        (f"Loki `{answer}`, a step of all ranks", "`loki.yaml`", loki(answer), "lines", records),
        (f"Loki `{burst}`, a step at once", "`loki.yaml`", loki(burst), "MB", records * logged),
        (f"Loki `{burst}`, without the file", "Loki's own", own(burst), "MB", records * logged),
        (f"Loki `{speed}`", "`loki.yaml`", loki(speed), "MB/s", rate * logged),
        (f"Loki `{speed}`, without the file", "Loki's own", own(speed), "MB/s", rate * logged),
        (f"Loki `{streams}`", "Loki's own", own(streams), "streams", 1),
        (
            "Tempo `burst_size_bytes`, a step at once",
            "`tempo.yaml`",
            tempo("burst_size_bytes"),
            "MB",
            records * traced,
        ),
        (
            "Tempo `rate_limit_bytes`",
            "`tempo.yaml`",
            tempo("rate_limit_bytes"),
            "MB/s",
            rate * traced,
        ),
        (
            "Prometheus: memory of its host",
            "assumed",
            given["memory for Prometheus, GB"],
            "GB",
            memory,
        ),
        (
            one_at_a_time,
            "`collector-gateway.yaml`",
            consumers,
            "core",
            rate * given["prometheus, s"] / 1e6,
        ),
        (
            "gateway: processor",
            "assumed",
            given["cores for the gateway"],
            "cores",
            rate * given[f"{DEFAULT}, gateway s"] / 1e6,
        ),
        ("Jaeger `max_traces`, the last ten steps", "`jaeger.yaml`", traces, "traces", 10),
    ]


def in_order(given: Mapping[str, float]) -> list[tuple[int, tuple[str, str, float, str, float]]]:
    """Return (largest number of sending ranks, limit), the first limit reached first."""
    return sorted(
        ((int(limit[2] / limit[4]), limit) for limit in limits(given)), key=lambda entry: entry[0]
    )


def numbered(given: Mapping[str, float]) -> dict[str, int]:
    """Return the limits that a job reaches with the shipped files, in the order in which it reaches
    them.
    """
    names = [name for _, (name, *_) in in_order(given) if not name.endswith("without the file")]
    return {name: place for place, name in enumerate(names, 1)}


def limits_table(given: Mapping[str, float]) -> str:
    """Return up to how many ranks each limit holds; by default all ranks send up to 16, beyond that
    one per node.
    """
    lines, places = [], numbered(given)
    for most, (name, place, value, unit, needs) in in_order(given):
        job = most if most <= 16 else int(most * given["ranks a node"])
        lines.append(
            [
                name,
                place,
                places.get(name, "–"),
                f"{value:,.0f} {unit}",
                f"{short(needs)} {unit}",
                f"{most:,}",
                f"{job:,}",
            ]
        )
    words = (
        "limit",
        "set by",
        "no.",
        "is",
        "a sending rank needs",
        "holds up to, ranks that send",
        "up to a job of, by default",
    )
    return table(words, lines, 2)


def first_table(given: Mapping[str, float]) -> str:
    """Return the numbers of the limits that a job exceeds."""
    places, node = numbered(given), given["ranks a node"]

    def over(words: str, sending: int) -> str:
        """Return the load of one recorded step of a selection, with one step recorded out of so
        many.
        """
        records, every = next(
            (given[name], every)
            for selection_words, name, every, _ in SELECTIONS
            if selection_words == words
        )
        selected = {
            "records of a step, all modules": records,
            "seconds a step": given["seconds a step"] * every,
        }
        exceeded = sorted(
            places[limit[0]]
            for most, limit in in_order({**given, **selected})
            if sending > most and limit[0] in places
        )
        return ", ".join(map(str, exceeded)) or "none"

    lines = [
        [
            f"{ranks:,}",
            *(over(words, senders(ranks, which, node)) for words, *_, which in SELECTIONS),
        ]
        for ranks in RANKS
    ]
    return table(["ranks", *(words for words, *_ in SELECTIONS)], lines)


def one_rank(given: Mapping[str, float]) -> list[tuple[str, str, float, float, str]]:
    """Return (limit, where it is set, its value, load of one rank's step, unit) of the limits that
    do not grow with ranks.
    """
    records, seconds = given["records of a step, all modules"], given["seconds a step"]
    events_b = given["span events, B"]
    loki, tempo = ("loki.yaml", "limits_config"), ("tempo.yaml", "overrides", "defaults")
    batch = ("exporters", "otlp_grpc/gateway", "sending_queue", "batch", "max_size")
    receiver = ("receivers", "otlp", "protocols", "grpc", "max_recv_msg_size_mib")
    return [
        ("`OTEL_TORCH_METRIC_SERIES` of a process", "default", Settings.from_env({}).metric_series,
         records * given["series a record"], "series"),
        ("`OTEL_TORCH_MAX_BYTES` of a process; an hour of its recording", "default", Settings.from_env({}).max_bytes / 1e6,
         3600 / seconds * records * given["a line of JSONL, B"] / 1e6, "MB"),
        ("a trace, which is a step of a rank", "our own", trace_size.TRACE_BYTES / 1e6, records * events_b / 1e6, "MB"),
        ("Tempo `max_bytes_per_trace`", "`tempo.yaml`", shipped(*tempo, "global", "max_bytes_per_trace") / 1e6,
         records * events_b / 1e6, "MB"),
        ("what waits in a process", "our own", export_queue.QUEUE_BYTES / 1e6, records * given[f"{DEFAULT}, B"] / 1e6, "MB"),
        ("Loki `per_stream_rate_limit`; a rank is a stream", "`loki.yaml`", shipped(*loki, "per_stream_rate_limit") / 1e6,
         records / seconds * given["loki, count"] / 1e6, "MB/s"),
        ("Loki `per_stream_rate_limit_burst`", "`loki.yaml`", shipped(*loki, "per_stream_rate_limit_burst") / 1e6,
         records * given["loki, count"] / 1e6, "MB"),
        ("Loki `ingestion_burst_size_mb`; a batch of the gateway, `max_size`", "`loki.yaml`",
         shipped(*loki, "ingestion_burst_size_mb"),
         shipped("collector-gateway.yaml", "exporters", "otlp_http/loki", "sending_queue", "batch", "max_size") / 1e6, "MB"),
        ("Loki `max_structured_metadata_size` of a line", "Loki's own", given["Loki's own `max_structured_metadata_size`, kB"],
         given["loki, count"] / 1e3, "kB"),
        ("gRPC `max_recv_msg_size_mib`; our messages", "`collector-agent.yaml`", shipped("collector-agent.yaml", *receiver),
         export_queue.BATCH_BYTES / 2**20, "MiB"),
        ("the same; an agent's batches, `max_size`", "`collector-gateway.yaml`", shipped("collector-gateway.yaml", *receiver),
         shipped("collector-agent.yaml", *batch) / 2**20, "MiB"),
    ]  # fmt: skip


def one_rank_table(given: Mapping[str, float]) -> str:
    lines = [
        [
            name,
            place,
            f"{value:,.0f} {unit}",
            f"{short(needs)} {unit}",
            f"{100 * needs / value:.2g} %",
        ]
        for name, place, value, needs, unit in one_rank(given)
    ]
    return table(["limit", "set by", "is", "needed", "share"], lines, 2)


def away_table(given: Mapping[str, float]) -> str:
    """Return how long a queue on disk lasts for the largest signal, which is metrics."""
    agent = shipped(
        "collector-agent.yaml", "exporters", "otlp_grpc/gateway", "sending_queue", "queue_size"
    )
    gateway = shipped(
        "collector-gateway.yaml", "exporters", "otlp_grpc/jaeger", "sending_queue", "queue_size"
    )
    seconds, node = given["seconds a step"], given["ranks a node"]
    each = given["records of a step, all modules"] / seconds * given["metrics, B"]
    few = given["records of a step, blocks"] / seconds / 10 * given["metrics, B"]
    lines = []
    for signal, size, sending in (
        ("agent: the gateway is away", agent, 1), ("agent: the gateway is away", agent, int(node)),
        ("gateway: Prometheus is away", gateway, 8), ("gateway: Prometheus is away", gateway, 128),
        ("gateway: Prometheus is away", gateway, 1024),
    ):  # fmt: skip
        hours = [f"{short(size / rate / sending / 60)}" for rate in (each, few)]
        lines.append([signal, f"{size / 2**30:.0f} GiB", f"{sending:,}", *hours])
    return table(
        [
            "",
            "queue of a signal",
            "ranks that send",
            "minutes, all modules",
            "minutes, blocks of every 10th step",
        ],
        lines,
    )


def levers_table(given: Mapping[str, float]) -> str:
    """Return the factor by which each setting reduces the load."""
    everything, blocks = given["records of a step, all modules"], given["records of a step, blocks"]
    whole = given[f"{DEFAULT}, B"]
    node, series = given["ranks a node"], given["series a record"]
    lines = [
        ["`OTEL_TORCH_MODULES='^blocks\\.\\d+$'`", "blocks and nothing in them", *[short(everything / blocks)] * 2],
        ["`OTEL_TORCH_STEPS='*/10'`", "every tenth step", "10", "1"],
        ["`OTEL_TORCH_RANKS=first_per_node`", "one rank of a node sends; `auto` beyond 16 ranks", *[short(node)] * 2],
        ["`OTEL_TORCH_STATS=abs_mean,nonfinite`", "one gauge and the histogram; bytes not measured", "–", short(series / 2)],
        ["`OTEL_TORCH_SIGNALS=metrics`", "no spans and no events", short(whole / given["metrics, B"]), "1"],
        ["`OTEL_TORCH_SIGNALS=spans,span_events`", "no metrics", short(whole / given["span events, B"]), "none left"],
    ]  # fmt: skip
    return table(["setting", "leaves", "bytes ÷", "series ÷"], lines, 2)


COMPUTED: dict[str, Callable[[Mapping[str, float]], str]] = {
    "example": example_table, "limits": limits_table, "first": first_table,
    "one rank": one_rank_table, "away": away_table, "levers": levers_table,
}  # fmt: skip


def made(page: str) -> str:
    """Return the page with its computed tables regenerated."""
    given = inputs_of(page)
    return rewritten(page, **{part: make(given) for part, make in COMPUTED.items()})


# -- tests


def test_every_computed_figure_is_what_the_inputs_come_to() -> None:
    assert PAGE.read_text() == made(PAGE.read_text()), "run: python -m tests.test_growth"


def test_a_wrong_figure_or_another_input_would_be_seen() -> None:
    """The test above relies on this: every part exists, and each input is used."""
    page = PAGE.read_text()
    assert made(page.replace("| seconds a step | 5 |", "| seconds a step | 6 |")) != made(page)
    for name, changed in (
        ("seconds a step", "example"),
        ("series a record", "one rank"),
        ("ranks a node", "levers"),
    ):
        given = inputs_of(page)
        before = COMPUTED[changed](given)
        assert COMPUTED[changed](given | {name: given[name] * 2}) != before


def test_what_a_record_becomes_is_what_the_code_makes_of_it() -> None:
    given = inputs_of(PAGE.read_text())
    (record,) = records_of(0, 1, random.Random(0))
    statistics = set(Settings.from_env({}).stats)
    assert set(record.stats) == statistics
    assert given["gauges a record"] == len(gauge_values(record))
    assert given["series a record"] == len(gauge_values(record)) + 1  # the histogram of magnitudes


def test_the_ratios_of_the_measured_tables_are_their_own() -> None:
    """The benchmark wrote them; no single cell was edited."""
    page = PAGE.read_text()
    for _, _, records, count, unit, memory, each, _ in rows(page, "backends"):
        assert number(memory) * 1e6 / number(
            count if unit == "series" else records
        ) == pytest.approx(number(each), rel=0.02)
    parts = {
        name: [number(cell) for cell in cells if cell != "–"]
        for name, *cells in rows(page, "signals")
    }
    # the run's and the steps' spans are in both
    assert parts[DEFAULT][0] == pytest.approx(
        parts["span events"][0] + parts["metrics"][0], rel=0.02
    )
    runs = rows(page, "growth")
    ranks, offered = [number(cells[0]) for cells in runs], [number(cells[1]) for cells in runs]
    assert ranks[0] == 1 and ranks == sorted(ranks)
    assert offered == pytest.approx([count * offered[0] for count in ranks])
    for *_, lost, uncounted, twice, saturated in runs:
        # where nothing is saturated everything arrives once, and nothing is ever lost without a
        # word
        assert number(uncounted) == 0
        assert (number(lost), number(twice)) == (0, 0) or saturated != "nothing"


def test_a_thousand_compared_ranks_are_computed_from_the_measured_ones() -> None:
    page = PAGE.read_text()
    spent: dict[str, dict[int, Spent]] = {}
    for words, count, how, *numbers in rows(page, "comparing"):
        if how == "measured":
            spent.setdefault(words, {})[int(number(count))] = Spent(*map(number, numbers))
    assert len(spent) == 3
    assert section(page, "comparing") == comparing_table(spent)


def test_the_prose_computes_nothing() -> None:
    """Figures are in tables, where they are checked; sentences have names and our limits only."""
    assert (
        export_queue.QUEUE_BYTES == 64 * 2**20
        and senders(16, "auto", 8) == 16
        and senders(24, "auto", 8) == 3
    )
    page = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|<!--.*?-->", "", first_section(), flags=re.S)
    setting = section(first_section(), "setting")
    prose = [line for line in page.replace(setting, "").splitlines() if not line.startswith("|")]
    allowed = {"Wan 2.1 14B", "40 blocks of 40 heads", "720p", "64 MiB", "10⁶ bytes", "2²⁰"}
    for words in allowed:
        prose = [line.replace(words, "") for line in prose]
    assert [line for line in prose if re.search(r"\d", line)] == []


def test_the_scan_of_the_page_says_how_many_records_there_are() -> None:
    """Scan the model and inputs of the page's command in this process."""
    torch, diffusers = pytest.importorskip("torch"), pytest.importorskip("diffusers")
    (block,) = re.findall(r"```sh\n(.*?)```", first_section(), re.S)
    shapes = {
        name: tuple(map(int, shape.split("x")))
        for name, shape in re.findall(r"--input (\w+)=([\dx]+)", block)
    }
    assert json.loads(re.findall(r"'(\{.*\})'", block)[0]) == {
        "_class_name": "WanTransformer3DModel"
    }
    with torch.device("meta"):
        model = diffusers.WanTransformer3DModel()
        inputs = {name: torch.empty(shape) for name, shape in shapes.items()}
    scanned = otel_torch.scan(model, **inputs | {"timestep": torch.tensor([500])})
    given = inputs_of(PAGE.read_text())
    assert scanned.cost.records == given["records of a step, all modules"]
    (blocks,) = re.findall(r"--modules '(.*)'", block)
    assert scanned.select(modules=blocks).cost.records == given["records of a step, blocks"]


@pytest.mark.fastvideo
def test_fastvideo_configures_the_model_as_diffusers_does() -> None:
    """Its modules may be counted with diffusers' model."""
    wan = pytest.importorskip("fastvideo.configs.models.dits.wanvideo")
    diffusers = pytest.importorskip("diffusers")
    parameters = inspect.signature(diffusers.WanTransformer3DModel.__init__).parameters.values()
    defaults = {limit.name: limit.default for limit in parameters if limit.name != "self"}
    assert {name: getattr(wan.WanVideoArchConfig(), name) for name in defaults} == defaults


def main() -> int:
    """Regenerate the computed tables of the page."""
    PAGE.write_text(made(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
