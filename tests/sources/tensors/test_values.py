"""Finding the tensors in a value, with the names that the record format fixes."""

from __future__ import annotations

import dataclasses
from collections import ChainMap, OrderedDict, UserDict, deque, namedtuple
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch

from otel_torch.sources.tensors.values import unwalked_class, walk, walk_inputs

T = torch.ones(2)


class Named(NamedTuple):
    first: Any
    second: Any = None


@dataclasses.dataclass
class Data:
    first: Any
    second: Any = None


@dataclasses.dataclass(slots=True, frozen=True)
class Slotted:
    first: Any
    second: Any = None


class Plain:
    """Holds tensors in attributes, as distributions and detectors' outputs do."""

    def __init__(self, first: Any, hidden: Any) -> None:
        self.first, self._hidden = first, hidden


class Slots:
    __slots__ = ("first", "second")

    def __init__(self, first: Any) -> None:
        self.first = first


class Items(Mapping):
    """Is a mapping without being a dict, as `TensorDict` is; only its own code may iterate."""

    def __init__(self, **items: Any) -> None:
        self._items, self.size = items, len(items)

    def __getitem__(self, key: str) -> Any:
        raise AssertionError(key)

    def __iter__(self) -> Any:
        raise AssertionError

    def __len__(self) -> int:
        raise AssertionError


def labels(value: Any) -> list[str]:
    return [label for label, _ in walk(value, "out")]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (T, ["out"]),
        (torch.nn.Parameter(T), ["out"]),
        ((T, None, T), ["out[0]", "out[2]"]),
        ([T, [T, (T,)]], ["out[0]", "out[1][0]", "out[1][1][0]"]),
        ({"key": T, 3: T}, ["out.key", "out.3"]),
        ({"a": [T, (T,)]}, ["out.a[0]", "out.a[1][0]"]),
        (OrderedDict(a=T), ["out.a"]),
        (UserDict(a=T), ["out.a"]),
        (Named(T, [T]), ["out.first", "out.second[0]"]),
        (namedtuple("Old", "x")(T), ["out.x"]),
        (Data(T, Slotted(T, {"k": T})), ["out.first", "out.second.first", "out.second.second.k"]),
        (Data, []),
        (Items(a=T, more=Items(b=T)), ["out.a", "out.more.b"]),
        (Plain(T, T), ["out.first"]),
        (Plain([T, {"k": T}], None), ["out.first[0]", "out.first[1].k"]),
        (Plain(3, {"k": T}), ["out._hidden.k"]),
        (Slots(T), ["out.first"]),
        ([Plain([Plain(T, T), T], None)], ["out[0].first[1]"]),
        (torch.distributions.Normal(T, T), ["out.loc", "out.scale"]),
        (deque([T]), ["out[0]"]),
        (ChainMap({"a": T}), ["out.maps[0].a"]),
        (torch.nn.Linear(1, 1), []),
        (torch.topk(T, 1), ["out[0]", "out[1]"]),
        (T.shape, []),
        (None, []),
        ("text", []),
        (3, []),
        ({T: 1}, []),
        (iter([T]), []),
        ({"generator": (T for _ in range(2))}, []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_labels(value, expected):
    assert labels(value) == expected


def test_the_tensors_themselves_are_given():
    first, second = torch.ones(1), torch.ones(2)
    tensors_by_label = dict(walk({"a": first, "b": [second]}, "out"))
    assert tensors_by_label["out.a"] is first and tensors_by_label["out.b[0]"] is second


def test_inputs():
    assert [label for label, _ in walk_inputs((T, 3, [T]), {"mask": T, "more": {"a": T}})] == [
        "in[0]", "in[2][0]", "in.mask", "in.more.a",
    ]  # fmt: skip


def test_nothing_of_the_program_is_run():
    class Lazy:
        def __getattr__(self, name):
            raise AssertionError(name)

        @property  # type: ignore[misc]
        def __class__(self):
            raise AssertionError("asked for its class")

    class Dict(dict):
        def items(self):
            raise AssertionError("items")

    @dataclasses.dataclass
    class Computed:
        plain: Any

        @property
        def other(self):
            raise AssertionError("property")

    @dataclasses.dataclass
    class Shadowed:
        plain: Any
        costly: Any = dataclasses.field(init=False, repr=False)

        @property
        def costly(self):
            raise AssertionError("property")

        @costly.setter
        def costly(self, value):
            pass

    assert labels([Lazy(), T]) == ["out[1]"]
    assert labels(Dict(a=T)) == ["out.a"]
    assert labels(Computed(T)) == ["out.plain"]
    assert labels(Shadowed(T)) == ["out.plain"]


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Plain(Plain(T, T), None), "Plain"),
        ([{T}], "set"),
        (iter([T]), "list_iterator"),
        (torch.nn.Linear(1, 1), "Linear"),
        ((T, 3, None, "text", [], {}), None),
        (Plain(T, None), None),
        (T.add, None),
        (labels, None),
        (torch.nn.Linear(1, 1).forward, None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_class_of_what_is_not_walked_is_named(value, name):
    assert unwalked_class(value) == name


def test_a_field_that_was_never_set_is_left_out():
    @dataclasses.dataclass(slots=True)
    class Late:
        first: Any
        second: Any = dataclasses.field(init=False)

    assert labels(Late(T)) == ["out.first"]


def test_a_key_that_cannot_be_written_raises_nothing():
    class Key:
        def __str__(self):
            raise RuntimeError

    assert labels([{Key(): T}, T]) == ["out[1]"]


def test_what_contains_itself_ends():
    cycle: list[Any] = [T]
    cycle += [cycle, {"again": cycle}, T]
    assert labels(cycle) == ["out[0]", "out[3]"]
    twice: list[Any] = []
    twice += [twice, twice]
    assert labels(twice) == []


def test_absurd_depth_and_number_end_and_are_said(capsys):
    deep: Any = T
    for _ in range(100_000):
        deep = [deep]
    assert labels((deep, T)) == ["out[1]"]
    wide: Any = [T]
    for _ in range(30):
        wide = [wide, wide]
    assert labels(wide) is not None
    assert "are not recorded" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: y,
        lambda y: [y, (y, None, 3)],
        lambda y: {"a": y, "b": {"c": [y]}},
        lambda y: Named(y, y),
        lambda y: Data(y, [y]),
        lambda y: Slotted(y),
        lambda y: Items(a=y, b=Items(c=y)),
        lambda y: Plain(y, None),
    ],
    ids=["tensor", "list", "dict", "named", "dataclass", "slotted", "mapping", "plain"],
)
def test_a_compiler_traces_it_into_one_graph(wrap):
    class Model(torch.nn.Module):
        def forward(self, x):
            return wrap(x * 2)

    class Hook:
        def __init__(self):
            self.seen = torch.zeros(4)

        def __call__(self, module, args, output):
            for index, (label, tensor) in enumerate(walk(output, "out")):
                self.seen[index].add_(tensor.sum() + len(label))

    model, hook = Model(), Hook()
    model.register_forward_hook(hook)
    eager = wrap(T)
    torch.compile(torch.nn.Sequential(model), fullgraph=True, backend="eager")(T)
    expected = labels(eager)
    assert hook.seen.tolist()[: len(expected)] == [4.0 + len(label) for label in expected]
    assert not hook.seen[len(expected) :].any()
