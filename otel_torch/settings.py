"""Every environment variable once: its name, FastVideo alias, default and meaning.

docs/configuration.md is made from this table.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from otel_torch.laws.table import NAMES as LAWS
from otel_torch.laws.table import SETTING as LAWS_OFF
from otel_torch.statistics.table import DEFINITIONS

_ON, _OFF = frozenset({"1", "true", "yes", "on"}), frozenset({"", "0", "false", "no", "off"})

# Prints one line for the user.
Report = Callable[[str], None]


class BadValue(ValueError):
    """A value that is not allowed and is replaced by the default. The message says what is."""


class UnusableSelection(BadValue):
    """A selection without a usable entry. To record anything else would mislead."""


def _switch(text: str, report: Report) -> bool:
    value = text.strip().lower()
    if value in _ON or value in _OFF:
        return value in _ON
    raise BadValue("use 1/true/yes/on or 0/false/no/off")


def _regex(text: str, report: Report) -> re.Pattern[str] | None:
    if not text:
        return None
    try:
        return re.compile(text)
    except re.error as error:
        raise UnusableSelection(f"not a regular expression: {error}") from None


def split_list(text: str) -> list[str]:
    """Return the entries of a comma-separated list.

    >>> split_list(" a, b,,")
    ['a', 'b']
    """
    return [word for word in (part.strip() for part in text.split(",")) if word]


def _list_of(*allowed: str, may_be_empty: bool = False) -> Callable[[str, Report], tuple[str, ...]]:
    """Return a parser of comma-separated lists. It reports unknown entries and skips them."""

    def parse(text: str, report: Report) -> tuple[str, ...]:
        selected: list[str] = []
        for word in split_list(text):
            name = word.lower()
            if name not in allowed:
                report(f"unknown entry {word!r} is skipped; use any of {', '.join(allowed)}")
            elif name not in selected:
                selected.append(name)
        if text.strip() and not selected and not may_be_empty:
            raise UnusableSelection(f"no usable entry; use any of {', '.join(allowed)}")
        return tuple(selected)

    return parse


def _captures(text: str, report: Report) -> tuple[str, ...]:
    """Parse OTEL_TORCH_CAPTURE; some entries include others."""
    selected = _list_of(*CAPTURES)(text, report)
    included = (name for entry in selected for name in INCLUDED_CAPTURES.get(entry, ()))
    return tuple(dict.fromkeys((*selected, *included)))


def _seed(text: str, report: Report) -> int | None:
    if text.strip().lower() in _OFF:
        return None
    if not text.strip().isdecimal():
        raise BadValue("use a whole number of at least 1, or off")
    return int(text)


def _percent(text: str, report: Report) -> float | None:
    word = text.strip().lower()
    if word in _OFF:
        return None
    if re.fullmatch(r"\d*\.?\d+\s*%?", word):
        percent = float(word.rstrip("% "))
        if 0 < percent <= 100:
            return percent
    raise BadValue("use a percentage above 0 and up to 100, such as 1 or 0.5, or off")


def _one_of(*allowed: str) -> Callable[[str, Report], str]:
    """Return a parser of a single word."""

    def parse(text: str, report: Report) -> str:
        value = text.strip().lower()
        if value not in allowed:
            raise BadValue(f"use {' or '.join(allowed)}")
        return value

    return parse


def _count(text: str, report: Report) -> int:
    if not text.strip().isdecimal():
        raise BadValue("use a whole number, 0 or more")
    return int(text)


_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


def _size(text: str, report: Report) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in _UNITS:
        raise BadValue("use a size such as 500MB, 10GB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


@dataclass(frozen=True)
class NumberSet:
    """A set of whole numbers, written as `0,2,10-20,*/10`. An empty text means all numbers.

    >>> steps = NumberSet.parse("0,2,10-20,*/50"); [n for n in range(101) if n in steps]
    [0, 2, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 50, 100]
    """

    single: frozenset[int] = frozenset()
    spans: tuple[tuple[int, int], ...] = ()
    every: tuple[int, ...] = ()
    all: bool = True

    @classmethod
    def parse(cls, text: str, report: Report = lambda message: None) -> NumberSet:
        """Parse the list. Bad entries are reported and skipped.

        Raises:
            UnusableSelection: no entry is usable.
        """
        single, spans, every = set(), [], []
        for word in split_list(text):
            if re.fullmatch(r"-?\d+", word):
                single.add(int(word))
            elif (match := re.fullmatch(r"(\d+)-(\d+)", word)) and int(match[1]) <= int(match[2]):
                spans.append((int(match[1]), int(match[2])))
            elif (match := re.fullmatch(r"\*/(\d+)", word)) and int(match[1]) > 0:
                every.append(int(match[1]))
            else:
                report(f"{word!r} is skipped; use entries such as 3, 10-20 or */10")
        if not split_list(text):
            return cls()
        if not (single or spans or every):
            raise UnusableSelection("no usable entry; use entries such as 0,2,10-20,*/10")
        return cls(frozenset(single), tuple(spans), tuple(every), all=False)

    def __contains__(self, number: int) -> bool:
        return (
            self.all
            or number in self.single
            or any(first <= number <= last for first, last in self.spans)
            or any(number >= 0 and number % step == 0 for step in self.every)
        )


@dataclass(frozen=True)
class RankSelection:
    """Some ranks of a job: `all`, `first_per_node`, numbers, or `auto` (all up to 16 ranks).

    >>> RankSelection.parse("auto", print).includes(rank=17, local_rank=1, world_size=64)
    False
    """

    text: str
    numbers: NumberSet | None = None

    @classmethod
    def parse(cls, text: str, report: Report) -> RankSelection:
        word = text.strip().lower()
        if word in ("all", "auto", "first_per_node"):
            return cls(word)
        return cls(word, NumberSet.parse(text, report))

    def includes(self, *, rank: int, local_rank: int, world_size: int) -> bool:
        """Return whether a rank is selected. The three numbers are those that torchrun sets."""
        if self.numbers is not None:
            return rank in self.numbers
        if self.text == "all" or (self.text == "auto" and world_size <= 16):
            return True
        return local_rank == 0


@dataclass(frozen=True)
class RegionSelection:
    """Some regions: the registered ones, and any that match a name, short name or wildcard.

    `used` collects the patterns that have matched.

    >>> RegionSelection.parse("training_*, vae decode", print).matches("training_step")
    True
    """

    registered: bool = True
    patterns: tuple[str, ...] = ()
    used: set[str] = field(default_factory=set, compare=False)

    @classmethod
    def parse(cls, text: str, report: Report) -> RegionSelection:
        entries = split_list(text)
        patterns = tuple(word for word in entries if word.lower() != "registered")
        return cls(len(patterns) < len(entries), patterns)

    def matches(self, *names: str) -> bool:
        """Return whether a pattern matches any of a region's names, long or short.

        Ignores case.
        """
        lowered = [name.lower() for name in names]
        hits = {
            pattern
            for pattern in self.patterns
            if any(fnmatch.fnmatchcase(name, pattern.lower()) for name in lowered)
        }
        self.used.update(hits)
        return bool(hits)


def _text(text: str, report: Report) -> str:
    return text


def _path(text: str, report: Report) -> str | None:
    return None if text.strip().lower() in _OFF else os.path.expanduser(text.strip())


# The statistics of a record in their order there.
STATISTICS = tuple(DEFINITIONS)
CAPTURES = (
    "outputs",
    "inputs",
    "gradients",
    "parameters",
    "updates",
    "parity",
    "training",
    "tokens",
    "graph",
)
# What a comparison needs of each tensor, in addition to what OTEL_TORCH_STATS selects.
PARITY_STATISTICS = (
    "abs_mean", "sum", "min", "max", "nonfinite", "l2", "numel", "shape", "dtype", "sketch",
)  # fmt: skip
_PARITY_CAPTURES = ("outputs", "inputs", "parameters", "parity")
INCLUDED_CAPTURES = {
    "parity": _PARITY_CAPTURES,
    "training": (*_PARITY_CAPTURES, "gradients", "updates"),
    "tokens": _PARITY_CAPTURES,
}
SIGNALS = ("spans", "span_events", "log_events", "metrics")


def _code_list(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _setting(
    name: str,
    parse: Callable[[str, Report], Any],
    default: str,
    text: str,
    alias: str | None = None,
    shown: str | None = None,
) -> Any:
    """Return the field of one variable. `shown` describes the default where that is empty."""
    return field(
        metadata={
            "name": name,
            "alias": alias,
            "parse": parse,
            "default": default,
            "help": text,
            "shown": shown if shown is not None else default,
        }
    )


@dataclass(frozen=True)
class Settings:
    """The parsed environment. The metadata of each field is one row of the documented table."""

    enabled: bool = _setting(
        "OTEL_TORCH_ENABLED",
        _switch,
        "off",
        "Master switch. Off means no hook on torch, no thread, no socket and no import of the "
        "OpenTelemetry SDK.",
    )
    activations: bool = _setting(
        "OTEL_TORCH_ACTIVATIONS",
        _switch,
        "on",
        "Record activations. Off leaves regions, steps and forwards.",
        alias="FASTVIDEO_TRACE_ACTIVATIONS",
    )
    models: re.Pattern[str] | None = _setting(
        "OTEL_TORCH_MODELS",
        _regex,
        "",
        "Regular expression, searched in the model's name.",
        shown="all",
    )
    modules: re.Pattern[str] | None = _setting(
        "OTEL_TORCH_MODULES",
        _regex,
        "",
        "Regular expression, searched in the canonical module name, which has no wrapper prefixes "
        "such as `module.` or `_orig_mod.`.",
        alias="FASTVIDEO_TRACE_LAYERS",
        shown="all",
    )
    exclude: re.Pattern[str] | None = _setting(
        "OTEL_TORCH_EXCLUDE",
        _regex,
        "",
        "Regular expression, searched in the canonical module name. Modules that match are not "
        "recorded.",
        shown="none",
    )
    stats: tuple[str, ...] = _setting(
        "OTEL_TORCH_STATS",
        _list_of(*STATISTICS),
        "abs_mean,sum,min,max,mean,std,nonfinite,shape,dtype",
        f"Statistics of each tensor: a comma-separated list of {_code_list(STATISTICS)}.",
        alias="FASTVIDEO_TRACE_STATS",
    )
    capture: tuple[str, ...] = _setting(
        "OTEL_TORCH_CAPTURE",
        _captures,
        "outputs",
        "Which tensors are recorded: a comma-separated list of `outputs`, `inputs`, `gradients`, "
        "`parameters` and `updates` (every parameter right after an optimizer's step). `parity` "
        "records everything that `otel-torch diff` needs: inputs, outputs, parameters and their "
        "sketches. `training` adds gradients and updates to that, and `tokens` a sketch of each "
        "token's row and which tokens each forward computes. `graph` records every operation of "
        "the program, with what it reads and makes and its line; without `OTEL_TORCH_STEPS` in the "
        "first step of each model; see "
        "[record-format.md](record-format.md#the-graph-of-operations).",
    )
    graph_inside: bool = _setting(
        "OTEL_TORCH_GRAPH_INSIDE",
        _switch,
        "on",
        "With `OTEL_TORCH_CAPTURE=graph`, also record what fused attention, norms and losses "
        "compute inside, by plain operations that run beside them; `off` keeps them whole.",
    )
    token_ids: bool = _setting(
        "OTEL_TORCH_TOKEN_IDS",
        _switch,
        "off",
        "With `OTEL_TORCH_CAPTURE=tokens`, record the ids of tokens instead of their hashes.",
    )
    training: bool = _setting(
        "OTEL_TORCH_TRAINING",
        _switch,
        "on",
        "Record the health of a training, as rows of phase `train`: loss, learning rate, gradient "
        "norm, update ratio and more; see [training.md](training.md).",
    )
    laws_off: tuple[str, ...] = _setting(
        LAWS_OFF,
        _list_of(*LAWS, may_be_empty=True),
        "",
        "Laws of training that are not checked, by name, such as `same_batch`; see "
        "[training.md](training.md#the-laws-of-training).",
        shown="none",
    )
    steps: NumberSet = _setting(
        "OTEL_TORCH_STEPS",
        NumberSet.parse,
        "",
        "Steps to record, such as `0,2,10-20,*/10`.",
        alias="FASTVIDEO_TRACE_STEPS",
        shown="all",
    )
    budget: float | None = _setting(
        "OTEL_TORCH_BUDGET",
        _percent,
        "",
        "How much recording may slow the steps down, in percent of their time. Of the steps that "
        "`OTEL_TORCH_STEPS` selects, only as many are recorded as the measured cost allows, plus "
        "the steps right after a value became NaN or Inf.",
        shown="off",
    )
    jsonl: str | None = _setting(
        "OTEL_TORCH_JSONL",
        _path,
        "otel-torch/<run>.rank<rank>.jsonl",
        "Path of the recording; `off` writes none. `<pid>`, `<rank>` and `<run>` are replaced, `~` "
        "is expanded, and missing folders are made. The file of an earlier run is renamed to "
        "`NAME.1.jsonl` (and so on), together with its metadata. A recording whose path is a URL "
        "(`s3://bucket/<rank>.jsonl`) is written into a temporary folder and uploaded at the end; "
        "this needs `otel-torch[remote]`.",
        alias="FASTVIDEO_TRACE_OUTPUT",
    )
    jsonl_ranks: RankSelection = _setting(
        "OTEL_TORCH_JSONL_RANKS",
        RankSelection.parse,
        "all",
        "Ranks that write a recording: `all`, `first_per_node`, `0`, `0,8`. A rank that neither "
        "writes nor exports gets no hooks.",
    )
    otlp_file: str | None = _setting(
        "OTEL_TORCH_OTLP_FILE",
        _path,
        "",
        "Folder for `traces.jsonl`, `metrics.jsonl` and `logs.jsonl`: the signals of "
        "`OTEL_TORCH_SIGNALS` as lines of OTLP JSON. For clusters that reach no collector: "
        "`otel-torch send` delivers the files later. Works with and without an endpoint. Ranks, "
        "placeholders and renaming are those of the recording.",
        shown="off",
    )
    tensors: str | None = _setting(
        "OTEL_TORCH_TENSORS",
        _path,
        "",
        "Folder for the whole tensors of the selected modules, as "
        "`<run>.rank<rank>/loop<L>.step<S>.safetensors`.",
        shown="off",
    )
    max_bytes: int = _setting(
        "OTEL_TORCH_MAX_BYTES",
        _size,
        "10GB",
        "How much one process may write to disk in total. At the limit, writing ends at the end of "
        "a step, with a message.",
    )
    signals: tuple[str, ...] = _setting(
        "OTEL_TORCH_SIGNALS",
        _list_of(*SIGNALS),
        "spans,log_events,metrics",
        f"Signals to send by OTLP: a comma-separated list of {_code_list(SIGNALS)}. Sent only if "
        "the standard `OTEL_*` variables name an endpoint or an exporter. Activations are "
        "`log_events`, or, for Jaeger and other stores of traces only, `span_events`.",
    )
    metric_step: str = _setting(
        "OTEL_TORCH_METRIC_STEP",
        _one_of("auto", "label", "time"),
        "auto",
        "How metrics carry the step. `label`: as an attribute. `time`: each step is a point at its "
        "own time. `auto`: `label` for loops of known length, as long as that makes no more series "
        "than `OTEL_TORCH_METRIC_SERIES`, else `time`.",
    )
    metric_series: int = _setting(
        "OTEL_TORCH_METRIC_SERIES",
        _count,
        "10000",
        "Most metric series of a process. Further series are not sent; they are counted and "
        "reported.",
    )
    regions: RegionSelection = _setting(
        "OTEL_TORCH_REGIONS",
        RegionSelection.parse,
        "registered",
        "Regions that become spans: `registered` for all registered ones, or names, short names "
        "and wildcards. These also match `torch.profiler.record_function` ranges.",
    )
    region_prefix: str = _setting(
        "OTEL_TORCH_REGION_PREFIX",
        _text,
        "fastvideo.region::",
        "Prefix of the span names of registered regions.",
    )
    ranks: RankSelection = _setting(
        "OTEL_TORCH_RANKS",
        RankSelection.parse,
        "auto",
        "Ranks that export by OTLP: `0`, `0,8`, `first_per_node`, `all`. `auto` is `all` up to 16 "
        "ranks, else `first_per_node`.",
    )
    run_id: str = _setting(
        "OTEL_TORCH_RUN_ID",
        _text,
        "",
        "Name of the run, the same in all its processes.",
        shown="the launcher's job id and restart count, else made by the first enabled process",
    )
    profiler_dir: str | None = _setting(
        "OTEL_TORCH_PROFILER_DIR",
        _path,
        "",
        "Folder for the traces of the torch profiler, which collects inside the selected regions "
        "only.",
        alias="FASTVIDEO_TORCH_PROFILER_DIR",
        shown="off",
    )
    profiler_regions: str = _setting(
        "OTEL_TORCH_PROFILER_REGIONS",
        _text,
        "",
        "Comma-separated list of the regions in which the torch profiler collects.",
        alias="FASTVIDEO_TORCH_PROFILE_REGIONS",
        shown="all",
    )
    profiler_record_shapes: bool = _setting(
        "OTEL_TORCH_PROFILER_RECORD_SHAPES",
        _switch,
        "off",
        "The profiler's `record_shapes`.",
        alias="FASTVIDEO_TORCH_PROFILER_RECORD_SHAPES",
    )
    profiler_with_profile_memory: bool = _setting(
        "OTEL_TORCH_PROFILER_WITH_PROFILE_MEMORY",
        _switch,
        "off",
        "The profiler's `profile_memory`.",
        alias="FASTVIDEO_TORCH_PROFILER_WITH_PROFILE_MEMORY",
    )
    profiler_with_stack: bool = _setting(
        "OTEL_TORCH_PROFILER_WITH_STACK",
        _switch,
        "off",
        "The profiler's `with_stack`.",
        alias="FASTVIDEO_TORCH_PROFILER_WITH_STACK",
    )
    profiler_with_flops: bool = _setting(
        "OTEL_TORCH_PROFILER_WITH_FLOPS",
        _switch,
        "off",
        "The profiler's `with_flops`.",
        alias="FASTVIDEO_TORCH_PROFILER_WITH_FLOPS",
    )
    noise: int | None = _setting(
        "OTEL_TORCH_NOISE",
        _seed,
        "",
        "Seed, a whole number of at least 1. Changes the outputs of all leaf modules by half a "
        "unit in the last place, to measure how large rounding errors can become: the floor of "
        "`otel-torch diff --noise`.",
        shown="off",
    )
    upcast: str = _setting(
        "OTEL_TORCH_UPCAST",
        _one_of("off", "float64"),
        "off",
        "`float64` runs every model in double precision, for the golden recording of `otel-torch "
        "diff --golden`. This changes the program's numbers, and takes twice the memory.",
    )
    operations: re.Pattern[str] | None = _setting(
        "OTEL_TORCH_OPERATIONS",
        _regex,
        "",
        "Regular expression, searched in the names of the recorded modules. Inside the forwards of "
        "those that match, the output of every ATen operation becomes a record of the module, such "
        "as `op[3].aten.mul.out`. Other modules cost nothing.",
        shown="none",
    )
    on_nonfinite: str = _setting(
        "OTEL_TORCH_ON_NONFINITE",
        _one_of("report", "zoom", "stop"),
        "report",
        "What follows the first NaN or Inf of the run. `report`: a line that names what produced "
        "it. `zoom`: also which operation, by a replay of the module's forward, else by recording "
        "the operations of its next call. `stop`: also, the program ends with "
        "`otel_torch.NonFiniteError`.",
    )
    isolate: str | None = _setting(
        "OTEL_TORCH_ISOLATE",
        _path,
        "",
        "Folder with a reference's whole tensors, recorded with `OTEL_TORCH_TENSORS` and "
        "`OTEL_TORCH_CAPTURE=parity`, and with the pairs from `otel-torch diff --save-isolation`. "
        "Every module then computes from the reference's inputs and returns the reference's "
        "outputs, so that each recorded error is the module's own.",
        shown="off",
    )
    graph_keep: str | None = _setting(
        "OTEL_TORCH_GRAPH_KEEP",
        _path,
        "",
        "Folder with a list of values of the graph, which receives them whole. `otel-torch bisect` "
        "sets it for a run of the reference.",
        shown="off",
    )
    graph_put: str | None = _setting(
        "OTEL_TORCH_GRAPH_PUT",
        _path,
        "",
        "Folder with whole values, which are put in place of those of the graph. `otel-torch "
        "bisect` sets it for a run of the port, to try whether everything after a fault matches "
        "then. This changes the program's numbers.",
        shown="off",
    )
    graph_parts: int = _setting(
        "OTEL_TORCH_GRAPH_PARTS",
        _count,
        "0",
        "Into how many parts along each axis the values of a graph are cut and measured, too: as "
        "many as there are ranks, or parts of a batch, in the program that it is compared with. "
        "`otel-torch bisect` sets it for one process beside several ranks.",
        shown="off",
    )
    graph_rows: bool = _setting(
        "OTEL_TORCH_GRAPH_ROWS",
        _switch,
        "off",
        "Measure each row of the values of a graph, too: beside a program that computes the same "
        "tokens in other batches. `otel-torch bisect` sets it where no output of one program has "
        "the size of the other's, or the programs split their tokens or batch differently.",
    )
    graph_axes: bool = _setting(
        "OTEL_TORCH_GRAPH_AXES",
        _switch,
        "off",
        "Measure each value of a graph that is computed also with each of its axes moved last: "
        "beside a program that lays its tensors out otherwise, such as with channels last. "
        "`otel-torch bisect` sets it where the programs differ, and have the same numbers in "
        "tensors of which the axes are in another order.",
    )
    graph_before: bool = _setting(
        "OTEL_TORCH_GRAPH_BEFORE",
        _switch,
        "off",
        "Record a graph from the first operation on, not from the first model: how weights are "
        "converted and inputs prepared, and programs that call no module. `otel-torch bisect` sets "
        "it where a program calls none, or what a model starts with differs.",
    )
    exchange: str | None = _setting(
        "OTEL_TORCH_EXCHANGE",
        _path,
        "",
        "File that says which code of another version runs in place of the program's own, and "
        "which attributes of torch are set. `otel-torch bisect` sets it between two versions. This "
        "changes the program's numbers.",
        shown="off",
    )
    nvtx: bool = _setting(
        "OTEL_TORCH_NVTX",
        _switch,
        "off",
        "Emit an NVTX range for every region.",
        alias="FASTVIDEO_NVTX_PROFILE",
    )
    exceptions: str = _setting(
        "OTEL_TORCH_EXCEPTIONS",
        _one_of("type", "message"),
        "type",
        "What spans say of an exception: its `type` only, or its `message` too.",
    )

    kernel: str = _setting(
        "OTEL_TORCH_KERNEL",
        _one_of("auto", "native", "triton", "torch"),
        "auto",
        "What computes the statistics. `auto` and `triton`: the compiled kernel on a CPU and the "
        "Triton kernel on a GPU, where they work. `native`: on a GPU plain torch. `torch`: plain "
        "torch everywhere, ten times slower on a CPU and two to eight times on a GPU.",
    )

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] | None = None, report: Report = lambda message: None
    ) -> Settings:
        """Read the environment, by default that of the process.

        Each bad value or entry is one line to `report`. A bad value falls back to its default.

        Raises:
            UnusableSelection: a regular expression or a list has nothing usable. The program should
                then run unrecorded.
        """
        environ = os.environ if environ is None else environ
        values = {}
        for row in dataclasses.fields(cls):
            meta = row.metadata
            name = meta["name"]
            if name not in environ and meta["alias"] and meta["alias"] in environ:
                name = meta["alias"]
            text = environ.get(name, meta["default"])
            if name != meta["name"] and not text.strip():
                text = meta["default"]  # an empty FastVideo variable means its default, as there
            try:
                values[row.name] = meta["parse"](
                    text, lambda message, name=name: report(f"{name}: {message}")
                )
            except UnusableSelection as error:
                raise UnusableSelection(f"{name}={text!r}: {error}") from None
            except BadValue as error:
                report(f"{name}={text!r}: {error}; using {meta['shown']!r}")
                values[row.name] = meta["parse"](meta["default"], lambda message: None)
        return cls(**values)

    @classmethod
    def overridden(cls, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that are set but not read, each with the one that wins over it.

        >>> Settings.overridden({"OTEL_TORCH_STEPS": "0", "FASTVIDEO_TRACE_STEPS": "0-3"})
        {'FASTVIDEO_TRACE_STEPS': 'OTEL_TORCH_STEPS'}
        """
        rows = [row.metadata for row in dataclasses.fields(cls)]
        pairs = [(row["alias"], row["name"]) for row in rows if row["alias"]]
        return {alias: name for alias, name in pairs if alias in environ and name in environ}

    @classmethod
    def names(cls) -> list[str]:
        """Return every variable that is read, with the FastVideo aliases."""
        return [
            row.metadata[key]
            for row in dataclasses.fields(cls)
            for key in ("name", "alias")
            if row.metadata[key]
        ]

    def chosen(self, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the variables in the table that are set.

        A recording's metadata has these and nothing else of the environment.
        """
        environ = os.environ if environ is None else environ
        return {name: environ[name] for name in self.names() if name in environ}


# the variable of each field
_VARIABLES: dict[str, str] = {
    row.name: row.metadata["name"] for row in dataclasses.fields(Settings)
}


def find_misspelled(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each OTEL_TORCH_ variable that does not exist.

    >>> list(find_misspelled({"OTEL_TORCH_MODUELS": "x"}))
    ['OTEL_TORCH_MODUELS is no setting; did you mean OTEL_TORCH_MODULES?']
    """
    for variable, meant in misspelled_settings(environ):
        yield describe_misspelled(variable, meant)


def describe_misspelled(variable: str, meant: str | None) -> str:
    """Return the line about a variable that does not exist. meant: The near one, if any."""
    hint = f"; did you mean {meant}?" if meant else ""
    return f"{variable} is no setting{hint}"


def misspelled_settings(environ: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
    """Yield each OTEL_TORCH_ variable that does not exist, with the one that was probably meant.

    >>> list(misspelled_settings({"OTEL_TORCH_MODUELS": "x", "OTEL_TORCH_Q": "x"}))
    [('OTEL_TORCH_MODUELS', 'OTEL_TORCH_MODULES'), ('OTEL_TORCH_Q', None)]
    """
    names = Settings.names()
    for variable in sorted(environ):
        if variable.startswith("OTEL_TORCH_") and variable not in names:
            near = _near_setting(variable)
            yield variable, _VARIABLES[near] if near else None


def options_to_variables(options: Mapping[str, Any], report: Report) -> dict[str, str]:
    """Return the variables that options in code or in a configuration file set.

    An option is a variable's name in lower case without its prefix. Its value may have the type
    that a file gives it. None sets nothing. An unknown option is a line to `report`.

    >>> options_to_variables({"steps": 3, "stats": ["mean", "std"], "nvtx": False}, print)
    {'OTEL_TORCH_STEPS': '3', 'OTEL_TORCH_STATS': 'mean,std', 'OTEL_TORCH_NVTX': 'off'}
    >>> options_to_variables({"moduels": "x"}, print)
    moduels is no setting and is skipped; did you mean modules?
    {}
    """
    chosen = {}
    for option, value in options.items():
        if option not in _VARIABLES:
            near = _near_setting(option)
            hint = f"; did you mean {near}?" if near else ""
            report(f"{option} is no setting and is skipped{hint}")
        elif isinstance(value, Mapping):
            report(f"{option} is skipped; use a text, a number or a list, not a mapping")
        elif value is not None:
            chosen[_VARIABLES[option]] = _write(value)
    return chosen


def _write(value: Any) -> str:
    """Return a value as the text of a variable."""
    if isinstance(value, bool):
        return "on" if value else "off"  # YAML reads an unquoted `off` as False
    if isinstance(value, list | tuple):
        return ",".join(map(_write, value))
    return str(value)


def _near_setting(name: str) -> str | None:
    """Return the field of `Settings` that a name probably means, written in any way.

    >>> [_near_setting(name) for name in ("stpes", "OTEL_TORCH_SIGNAL", "metric-steps", "colour")]
    ['steps', 'signals', 'metric_step', None]
    """
    plain = re.sub(r"^(otel_)?torch_", "", name.strip().lower().replace("-", "_"))
    anagrams = [known for known in _VARIABLES if sorted(known) == sorted(plain)]
    candidates = anagrams or difflib.get_close_matches(plain, _VARIABLES, 1, 0.75)
    return candidates[0] if candidates else None
