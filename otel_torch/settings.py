"""Every environment variable once: its name, FastVideo alias, meaning and default. The
documentation is made from it.
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

from otel_torch.statistics.table import DEFINITIONS

_ON, _OFF = frozenset({"1", "true", "yes", "on"}), frozenset({"", "0", "false", "no", "off"})

Problem = Callable[[str], None]


class BadValue(ValueError):
    """A value that is not allowed, though its default will do; the message says what is allowed."""


class Unusable(BadValue):
    """A selection of which nothing usable remains: recording anything else than what was asked for
    would mislead.
    """


def _switch(text: str, problem: Problem) -> bool:
    value = text.strip().lower()
    if value in _ON or value in _OFF:
        return value in _ON
    raise BadValue("use 1/true/yes/on or 0/false/no/off")


def _regex(text: str, problem: Problem) -> re.Pattern[str] | None:
    if not text:
        return None
    try:
        return re.compile(text)
    except re.error as error:
        raise Unusable(f"not a regular expression: {error}") from None


def words(text: str) -> list[str]:
    """The entries of a comma list, blanks ignored.

    >>> words(" a, b,,")
    ['a', 'b']
    """
    return [word for word in (part.strip() for part in text.split(",")) if word]


def one_of(
    *allowed: str, aliases: Mapping[str, str] | None = None
) -> Callable[[str, Problem], tuple[str, ...]]:
    """A parser of comma lists whose entries are in a table; unknown ones are named and skipped."""

    def parse(text: str, problem: Problem) -> tuple[str, ...]:
        chosen: list[str] = []
        for word in words(text):
            name = (aliases or {}).get(word.lower(), word.lower())
            if name not in allowed:
                problem(f"{word!r} is not known and is left out; use any of {', '.join(allowed)}")
            elif name not in chosen:
                chosen.append(name)
        if text.strip() and not chosen:
            raise Unusable(f"nothing usable; use any of {', '.join(allowed)}")
        return tuple(chosen)

    return parse


def _captures(text: str, problem: Problem) -> tuple[str, ...]:
    """What is captured; `parity` stands for several."""
    chosen = one_of(*CAPTURES)(text, problem)
    return tuple(dict.fromkeys((*chosen, *_PARITY_CAPTURES))) if "parity" in chosen else chosen


def _seed(text: str, problem: Problem) -> int | None:
    if text.strip().lower() in _OFF:
        return None
    if not text.strip().isdecimal():
        raise BadValue("use a whole number from 1 on, or off")
    return int(text)


def _percent(text: str, problem: Problem) -> float | None:
    word = text.strip().lower()
    if word in _OFF:
        return None
    if (
        not re.fullmatch(r"\d*\.?\d+\s*%?", word)
        or not 0 < (percent := float(word.rstrip("% "))) <= 100
    ):
        raise BadValue("use a percentage above 0 and up to 100, such as 1 or 0.5, or off")
    return percent


def choice(*allowed: str) -> Callable[[str, Problem], str]:
    """A parser of one word out of a table."""

    def parse(text: str, problem: Problem) -> str:
        value = text.strip().lower()
        if value not in allowed:
            raise BadValue(f"use {' or '.join(allowed)}")
        return value

    return parse


def _count(text: str, problem: Problem) -> int:
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


def _size(text: str, problem: Problem) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in _UNITS:
        raise BadValue("use a size such as 500MB, 10GB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


@dataclass(frozen=True)
class Numbers:
    """A set of whole numbers written as `0,2,10-20,*/10`; with nothing written, all of them.

    >>> steps = Numbers.parse("0,2,10-20,*/50"); [n for n in range(101) if n in steps]
    [0, 2, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 50, 100]
    """

    single: frozenset[int] = frozenset()
    spans: tuple[tuple[int, int], ...] = ()
    every: tuple[int, ...] = ()
    all: bool = True

    @classmethod
    def parse(cls, text: str, problem: Problem = lambda message: None) -> Numbers:
        """Parse the list; a bad entry is told to `problem` and skipped. Raises Unusable when
        nothing usable remains.
        """
        single, spans, every = set(), [], []
        for word in words(text):
            if re.fullmatch(r"-?\d+", word):
                single.add(int(word))
            elif (match := re.fullmatch(r"(\d+)-(\d+)", word)) and int(match[1]) <= int(match[2]):
                spans.append((int(match[1]), int(match[2])))
            elif (match := re.fullmatch(r"\*/(\d+)", word)) and int(match[1]) > 0:
                every.append(int(match[1]))
            else:
                problem(f"{word!r} is left out; use entries such as 3, 10-20 or */10")
        if not words(text):
            return cls()
        if not (single or spans or every):
            raise Unusable("nothing usable; use entries such as 0,2,10-20,*/10")
        return cls(frozenset(single), tuple(spans), tuple(every), all=False)

    def __contains__(self, number: int) -> bool:
        return (
            self.all
            or number in self.single
            or any(first <= number <= last for first, last in self.spans)
            or any(number >= 0 and number % step == 0 for step in self.every)
        )


@dataclass(frozen=True)
class Ranks:
    """Which ranks of a job are meant: `all`, `first_per_node`, numbers, or `auto` (all up to 16
    ranks).

    >>> Ranks.parse("auto", print).includes(rank=17, local_rank=1, world_size=64)
    False
    """

    text: str
    numbers: Numbers | None = None

    @classmethod
    def parse(cls, text: str, problem: Problem) -> Ranks:
        word = text.strip().lower()
        if word in ("all", "auto", "first_per_node"):
            return cls(word)
        return cls(word, Numbers.parse(text, problem))

    def includes(self, *, rank: int, local_rank: int, world_size: int) -> bool:
        """Whether the given rank is meant. All three are whole numbers as torchrun sets them."""
        if self.numbers is not None:
            return rank in self.numbers
        if self.text == "all" or (self.text == "auto" and world_size <= 16):
            return True
        return local_rank == 0


@dataclass(frozen=True)
class Names:
    """Region names: `registered`, or names, short names and wildcards.

    >>> Names.parse("training_*, vae decode", print).matches("training_step")
    True
    """

    registered: bool = True
    patterns: tuple[str, ...] = ()
    used: set[str] = field(default_factory=set, compare=False)  # the patterns that have matched

    @classmethod
    def parse(cls, text: str, problem: Problem) -> Names:
        patterns = tuple(word for word in words(text) if word.lower() != "registered")
        return cls(len(patterns) < len(words(text)), patterns)

    def matches(self, *names: str) -> bool:
        """Whether any of the names (a region's long and short one) is written here, case ignored."""
        lowered = [name.lower() for name in names]
        hits = {
            pattern
            for pattern in self.patterns
            if any(fnmatch.fnmatchcase(name, pattern.lower()) for name in lowered)
        }
        self.used.update(hits)
        return bool(hits)


def _text(text: str, problem: Problem) -> str:
    return text


def _path(text: str, problem: Problem) -> str | None:
    return None if text.strip().lower() in _OFF else os.path.expanduser(text.strip())


# the statistics of a record, in the order in which it has them
STATISTICS = tuple(DEFINITIONS)
CAPTURES = ("outputs", "inputs", "gradients", "parameters", "parity")
# what a recording that is to be compared needs of each tensor, whatever else was asked for
PARITY_STATISTICS = (
    "abs_mean",
    "sum",
    "min",
    "max",
    "nonfinite",
    "l2",
    "numel",
    "shape",
    "dtype",
    "sketch",
)
_PARITY_CAPTURES = ("outputs", "inputs", "parameters", "parity")
SIGNALS = ("spans", "span_events", "log_events", "metrics")


def _setting(
    name: str,
    parse: Callable[[str, Problem], Any],
    default: str,
    text: str,
    alias: str | None = None,
    shown: str | None = None,
) -> Any:
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
    """The parsed environment. Each field's metadata is one row of the documented table."""

    enabled: bool = _setting(
        "OTEL_TORCH_ENABLED",
        _switch,
        "off",
        "Master switch. Off means: no torch hook, no thread, no socket, no SDK import.",
    )
    activations: bool = _setting(
        "OTEL_TORCH_ACTIVATIONS",
        _switch,
        "on",
        "Record activations.",
        alias="FASTVIDEO_TRACE_ACTIVATIONS",
    )
    models: re.Pattern[str] | None = _setting(
        "OTEL_TORCH_MODELS", _regex, "", "Regex on the model's name.", shown="all"
    )
    modules: re.Pattern[str] | None = _setting(
        "OTEL_TORCH_MODULES",
        _regex,
        "",
        "Regex, searched in the canonical module name (wrappers such as `module.`, `_orig_mod.` left out).",
        alias="FASTVIDEO_TRACE_LAYERS",
        shown="all",
    )
    exclude: re.Pattern[str] | None = _setting(
        "OTEL_TORCH_EXCLUDE",
        _regex,
        "",
        "Regex on the module name; what it finds is left out.",
        shown="none",
    )
    stats: tuple[str, ...] = _setting(
        "OTEL_TORCH_STATS",
        one_of(*STATISTICS),
        "abs_mean,sum,min,max,mean,std,nonfinite,shape,dtype",
        f"Comma list of {', '.join(f'`{name}`' for name in STATISTICS)}.",
        alias="FASTVIDEO_TRACE_STATS",
    )
    capture: tuple[str, ...] = _setting(
        "OTEL_TORCH_CAPTURE",
        _captures,
        "outputs",
        "Comma list of `outputs`, `inputs`, `gradients`, `parameters`; `parity` is inputs, outputs, parameters, their sketches "
        "and what `otel-torch diff` needs to line two programs up.",
    )
    steps: Numbers = _setting(
        "OTEL_TORCH_STEPS",
        Numbers.parse,
        "",
        "Which steps are recorded: `0,2,10-20,*/10`.",
        alias="FASTVIDEO_TRACE_STEPS",
        shown="all",
    )
    budget: float | None = _setting(
        "OTEL_TORCH_BUDGET",
        _percent,
        "",
        "Percent of the steps' time that recording may cost. The steps that are recorded are then chosen by what recording "
        "turns out to cost (of those that `OTEL_TORCH_STEPS` selects), and those around a non-finite value are all recorded.",
        shown="off",
    )
    jsonl: str | None = _setting(
        "OTEL_TORCH_JSONL",
        _path,
        "otel-torch/<run>.rank<rank>.jsonl",
        "Where the recording goes; `<pid>`, `<rank>` and `<run>` are replaced, `~` is expanded, folders are made; `off` "
        "writes none. An earlier run's file there is renamed `NAME.1.jsonl` (and so on) with its metadata.",
        alias="FASTVIDEO_TRACE_OUTPUT",
    )
    jsonl_ranks: Ranks = _setting(
        "OTEL_TORCH_JSONL_RANKS",
        Ranks.parse,
        "all",
        "Which ranks write a recording: `all`, `first_per_node`, `0`, `0,8`. A rank that neither writes nor exports "
        "attaches no hook.",
    )
    otlp_file: str | None = _setting(
        "OTEL_TORCH_OTLP_FILE",
        _path,
        "",
        "Folder for `traces.jsonl`, `metrics.jsonl` and `logs.jsonl`: what `OTEL_TORCH_SIGNALS` selects as lines of OTLP JSON, "
        "with or without an endpoint, for clusters that reach no collector; `otel-torch send` delivers them later. Ranks "
        "(`OTEL_TORCH_JSONL_RANKS`), placeholders and renaming as for the recording.",
        shown="off",
    )
    tensors: str | None = _setting(
        "OTEL_TORCH_TENSORS",
        _path,
        "",
        "Folder for whole tensors of the selected modules: `<run>.rank<rank>/loop<L>.step<S>.safetensors`.",
        shown="off",
    )
    max_bytes: int = _setting(
        "OTEL_TORCH_MAX_BYTES",
        _size,
        "10GB",
        "Limit of everything that one process writes to disk; at the limit writing ends at a step's end, and says so.",
    )
    signals: tuple[str, ...] = _setting(
        "OTEL_TORCH_SIGNALS",
        one_of(*SIGNALS),
        "spans,span_events,metrics",
        "Comma list of `spans`, `span_events`, `log_events`, `metrics`: what is sent by OTLP when standard `OTEL_*` "
        "variables name an endpoint or exporter.",
    )
    metric_step: str = _setting(
        "OTEL_TORCH_METRIC_STEP",
        choice("auto", "label", "time"),
        "auto",
        "`label`: the step is a metric attribute; `time`: every step's value is a point at its own time; `auto`: label for "
        "bounded loops while the series stay below the next line, else time.",
    )
    metric_series: int = _setting(
        "OTEL_TORCH_METRIC_SERIES",
        _count,
        "10000",
        "Metric series a process; those beyond it are not sent, but counted and said.",
    )
    regions: Names = _setting(
        "OTEL_TORCH_REGIONS",
        Names.parse,
        "registered",
        "Which regions become spans: `registered` ones, or names, short names and wildcards, which also take "
        "`torch.profiler.record_function` ranges.",
    )
    region_prefix: str = _setting(
        "OTEL_TORCH_REGION_PREFIX",
        _text,
        "fastvideo.region::",
        "Prefix of a registered region's span.",
    )
    ranks: Ranks = _setting(
        "OTEL_TORCH_RANKS",
        Ranks.parse,
        "auto",
        "Which ranks export by OTLP: `0`, `0,8`, `first_per_node`, `all`; `auto` is `all` up to 16 ranks, else `first_per_node`.",
    )
    run_id: str = _setting(
        "OTEL_TORCH_RUN_ID",
        _text,
        "",
        "Names the run.",
        shown="the launcher's job id with its restart count, else made by the first enabled process and handed on",
    )
    profiler_dir: str | None = _setting(
        "OTEL_TORCH_PROFILER_DIR",
        _path,
        "",
        "Folder: the torch profiler collects inside the selected regions only.",
        alias="FASTVIDEO_TORCH_PROFILER_DIR",
        shown="off",
    )
    profiler_regions: str = _setting(
        "OTEL_TORCH_PROFILER_REGIONS",
        _text,
        "",
        "Comma list: in which regions it collects.",
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
        "Seed, a whole number from 1 on: the outputs of all leaf modules are changed by half a unit in the last place, to "
        "record how much error legal arithmetic causes (the floor of `otel-torch diff --noise`).",
        shown="off",
    )
    operations: re.Pattern[str] | None = _setting(
        "OTEL_TORCH_OPERATIONS",
        _regex,
        "",
        "Regex, searched in the names of the recorded modules: inside the forwards of those that match, the output of every "
        "ATen operation becomes a record of the module, `op[3].aten.mul.out`. Other modules cost nothing.",
        shown="none",
    )
    isolate: str | None = _setting(
        "OTEL_TORCH_ISOLATE",
        _path,
        "",
        "Folder of a reference's whole tensors, recorded with `OTEL_TORCH_TENSORS` and `OTEL_TORCH_CAPTURE=parity`, with the "
        "pairs that `otel-torch diff --save-isolation` wrote there: every module computes from the reference's inputs and "
        "hands the reference's outputs on, so that its own error stands alone.",
        shown="off",
    )
    nvtx: bool = _setting(
        "OTEL_TORCH_NVTX", _switch, "off", "NVTX ranges.", alias="FASTVIDEO_NVTX_PROFILE"
    )
    exceptions: str = _setting(
        "OTEL_TORCH_EXCEPTIONS",
        choice("type", "message"),
        "type",
        "What of an exception goes on our spans: `type`, or `message`.",
    )

    kernel: str = _setting(
        "OTEL_TORCH_KERNEL",
        choice("auto", "native", "triton", "torch"),
        "auto",
        "What computes the statistics: the compiled kernel of a CPU (`native`; `auto`: where there is one), that and Triton's of "
        "a GPU (`triton`, which has been compiled and interpreted, but not run on a GPU yet), or plain torch, ten times slower "
        "on a CPU.",
    )

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] | None = None, problem: Problem = lambda message: None
    ) -> Settings:
        """Read the environment. Each bad value or entry is one line to `problem`; a bad value falls
        back to its default.

        Raises Unusable where a selection (a regex, a list) has nothing usable in it: the program
        then runs untraced.
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
                    text, lambda message, name=name: problem(f"{name}: {message}")
                )
            except Unusable as error:
                raise Unusable(f"{name}={text!r}: {error}") from None
            except BadValue as error:
                problem(f"{name}={text!r}: {error}; using {meta['shown']!r}")
                values[row.name] = meta["parse"](meta["default"], lambda message: None)
        return cls(**values)

    @classmethod
    def names(cls) -> list[str]:
        """Every variable that is read, ours and their FastVideo names."""
        return [
            row.metadata[key]
            for row in dataclasses.fields(cls)
            for key in ("name", "alias")
            if row.metadata[key]
        ]

    def chosen(self, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """The variables of ours and their FastVideo names that are set: all of the environment that
        may leave the machine.
        """
        environ = os.environ if environ is None else environ
        return {name: environ[name] for name in self.names() if name in environ}


def misspelt(environ: Mapping[str, str]) -> Iterator[str]:
    """A line for each variable that looks like one of ours and is none.

    >>> list(misspelt({"OTEL_TORCH_MODUELS": "x"}))
    ['OTEL_TORCH_MODUELS is no setting; did you mean OTEL_TORCH_MODULES?']
    """
    known = Settings.names()
    for name in sorted(environ):
        if name.startswith("OTEL_TORCH_") and name not in known:
            swapped = [other for other in known if sorted(other) == sorted(name)]
            near = swapped or difflib.get_close_matches(name, known, 1, 0.8)
            yield f"{name} is no setting{f'; did you mean {near[0]}?' if near else ''}"
