"""What C and Python share by position: one table, of which `native/layout.h` is made.

    python -m otel_torch.statistics.native_layout

writes the header after a change. Python's named tuples have the same fields, which
`tests/statistics/test_native_layout.py` checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from otel_torch.statistics.row_layout import SCALARS

HEADER = Path(__file__).with_name("native") / "layout.h"


class Positions(NamedTuple):
    """The fields of a tuple, list or row in order; C calls each by `prefix` and its name."""

    prefix: str
    fields: Sequence[str]
    holds: str


# the statistics that `lines.c` encodes, each by a byte of a line's plan
ENCODED = (
    "abs_mean", "sum", "min", "max", "mean", "std", "rms", "l2",
    "nonfinite", "zeros", "numel", "shape", "dtype", "sketch",
)  # fmt: skip
# a pending row; the others are of parity recordings only, and the last three known when it is read
PLAIN_ROW = ("site", "name", "label", "context", "data")
PARITY_ROW = (*PLAIN_ROW, "identity", "signature", "times")
READ_ROW = (*PARITY_ROW, "value", "storage", "is_new")
# what `observer.c` compares with and stores
OBSERVER_OBJECTS = {
    "site_type": "class of a module's place; its subclasses are Python's",
    "tuple_type": "class",
    "bytes_type": "class",
    "graph_task": "function: the number of the backward pass that the thread is in",
    "handled": "what tells Python that the call was observed",
    "plain_types": "tuple: types of values without tensors",
    "output_labels": "tuple: labels of an output and of its items",
    "argument_labels": "tuple: such a tuple for each positional argument",
    "keyword_labels": "dict: such a tuple by keyword",
    "make_keyword_labels": "function: adds one",
    "identify": "function: the identity of a tensor",
    "next_index": "function: the clock of calls",
    "measurement_name": "an identity's attribute",
    "is_counted_name": "an identity's attribute",
}
# what `module_call.c` uses
CALL_OBJECTS = {
    "left_to_torch": "what stands for an output of a call that is left to torch",
    "output_observer": "class of hooks",
    "input_observer": "class of hooks",
    "before_list": "class of what torch has for all our hooks before a module's forward",
    "after_list": "the same after it",
    "hooks": "attribute of ours",
    "post_calls": "attribute of ours",
    "place": "attribute of ours",
    "before": "torch's table of a module's hooks",
    "after": "torch's table of a module's hooks",
    "backward": "torch's table of a module's hooks",
    "before_backward": "torch's table of a module's hooks",
    "compiled": "attribute of a module",
    "forward": "attribute of a module",
    "call": "attribute of a module",
    "own_call": "that of nn.Module",
    "global_tables": "tuple of torch's tables of hooks of all modules",
    "method_type": "class of bound methods",
    "function": "attribute of a bound method",
    "bound_to": "attribute of a bound method",
    "own_forwards": "dict: by function, an `OwnForward` of direct_forwards.py",
    "own_names": "tuple: attributes that the function must have, after the first field",
    "tracing_state": "function: a graph is traced by torch.jit if it returns anything",
    "observe_inputs_in_python": "function",
    "observe_output_in_python": "function",
    "run_hooks": "function: calls all hooks that a module has after its forward",
}
# 64 bits each: numbers, then addresses of Python's objects, with what they are
FORWARD_NUMBERS = {
    "thread": "that began the forward; its calls are named by it",
    "number": "of the forward; no two have the same",
    "recording": "whether its step is recorded",
    "recognizes": "whether its tensors may be recognized: torch counts what changes them",
}
FORWARD_OBJECTS = {
    "context": "Python's ForwardContext",
    "counts": "dict: how many calls of each module were counted in its step",
    "first": "dict: where the numbers of a module begin, if not at 0",
    "stack": "list: the module calls that the thread is in",
    "entered": "list: those whose inputs were observed, each an `EnteredCall`",
}
FORWARD = (*FORWARD_NUMBERS, *FORWARD_OBJECTS)

POSITIONS = (
    Positions("", SCALARS, "the numbers of a measured tensor; row_layout.py"),
    Positions("STATISTIC_", ENCODED, "the bytes of a line's plan; compact_rows.py"),
    Positions("ROW_", READ_ROW, "a pending row; compact_records.py"),
    Positions(
        "TIMES_",
        ("entry", "exit", "parent"),
        "a call by the clock of calls: when it was entered and left, and its parent entered",
    ),
    Positions(
        "PLACE_",
        (
            "forward",
            "site",
            "names",
            "queue",
            "wanted",
            "inputs",
            "module",
            "module_class",
            "signature",
        ),
        "`ModulePlace` of native_observer.py",
    ),
    Positions(
        "ENTERED_",
        ("site", "depth", "call", "context", "times", "inputs"),
        "`EnteredCall` of call_stack.py",
    ),
)


def fields_of(prefix: str) -> tuple[str, ...]:
    """Return the fields of a tuple by the prefix of their names in C.

    >>> fields_of("TIMES_")
    ('entry', 'exit', 'parent')
    """
    return next(tuple(entry.fields) for entry in POSITIONS if entry.prefix == prefix)


def _members(kind: str, members: Mapping[str, str]) -> list[str]:
    return [f"    {kind} {name}; /* {meaning} */" for name, meaning in members.items()]


def _struct(name: str, maker: str, kind: str, members: Mapping[str, str]) -> list[str]:
    return [f"/* {maker} */", "typedef struct {", *_members(kind, members), f"}} {name};", ""]


def header_text() -> str:
    lines = ["/* Made by native_layout.py from its table: do not edit. */", "", "#pragma once", ""]
    for prefix, fields, holds in POSITIONS:
        names = [f"{prefix}{field.upper()}" for field in fields]
        size = [f"{prefix}SIZE"] if prefix else []
        lines += [f"/* {holds} */", f"enum {{ {', '.join([*names, *size])} }};", ""]
    lines += [
        "/* how many fields a pending row has outside of parity recordings, and in one */",
        f"enum {{ PLAIN_FIELDS = {len(PLAIN_ROW)}, PARITY_FIELDS = {len(PARITY_ROW)} }};",
        "",
        "/* what a model's newest forward means for its calls; forward_state.py */",
        "typedef struct {",
        *_members("int64_t", FORWARD_NUMBERS),
        *_members("Borrowed", FORWARD_OBJECTS),
        "} Forward;",
        "",
        *_struct("ObserverObjects", "native_observer.py", "Object", OBSERVER_OBJECTS),
        *_struct("CallObjects", "module_call.py", "Object", CALL_OBJECTS),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    HEADER.write_text(header_text())
