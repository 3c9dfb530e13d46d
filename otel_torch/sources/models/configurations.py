"""How each model is set up, for the metadata of a graph: what differs before anything is computed.

A model of transformers or diffusers keeps its configuration as an attribute, and so do most others.
It is read as plain values, without importing the framework.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from otel_torch.process.console import say_once
from otel_torch.sources.events import RunEvents
from otel_torch.sources.models.model import Model

# attributes in which a model keeps what it was made with; the first that says anything counts
_CONFIGURATIONS = ("config", "args", "params", "hparams", "cfg")
_GENERATION = "generation_config"
# read although it begins with an underscore: which attention transformers calls
_ATTENTION = "_attn_implementation"
# bounds on the metadata's size: configurations of transformers have about 60 facts, the longest
# lists one entry for each layer
_MOST_FACTS = 256
_MOST_ITEMS = 128
_DEPTH = 3
# a word such as `silu` or `sdpa`; a path, an address, a sentence or a long key is none
_WORD = re.compile(r"[A-Za-z][\w.+-]{0,47}")
# texts of such a name may say who ran the program, where, or with which key
_PRIVATE = re.compile(
    r"name|path|dir|file|url|user|host|token|key|secret|passw|auth|project|version", re.I
)

Fact = Any


class Configurations:
    """Reads the configuration of each model right before its first forward."""

    def __init__(self, events: RunEvents) -> None:
        self._facts: WeakKeyDictionary[Model, dict[str, Any]] = WeakKeyDictionary()
        events.model_starting.append(self.add)

    def add(self, model: Model) -> None:
        """Read what a model is made with."""
        root = model.root()
        if root is None:
            return
        try:
            self._facts[model] = describe_configuration(root)
        except Exception as error:  # an attribute may be a property that raises
            say_once(f"{model.name}: its configuration is not in the metadata: {error!r}")

    def describe(self, model: Model) -> dict[str, Any]:
        """Return the model's part of the metadata."""
        return self._facts.get(model, {})


def describe_configuration(root: nn.Module) -> dict[str, Any]:
    """Return `configuration` and `generation`, as plain values by dotted name, and `dtypes` of the
    parameters, that of most elements first; each only if there is something to say.

    >>> model = nn.Linear(2, 2)
    >>> model.config = {"hidden_act": "silu", "rope": {"theta": 1e4}, "_from": "/home/me"}
    >>> describe_configuration(model)["configuration"]
    {'hidden_act': 'silu', 'rope.theta': 10000.0}
    """
    configurations = (_flat(getattr(root, name, None)) for name in _CONFIGURATIONS)
    sizes: Counter[str] = Counter()
    for parameter in root.parameters():
        sizes[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    facts = {
        "configuration": next(filter(None, configurations), {}),
        "generation": _flat(getattr(root, _GENERATION, None)),
        "dtypes": [name for name, _ in sizes.most_common()],
    }
    return {name: fact for name, fact in facts.items() if fact}


def _flat(config: Any) -> dict[str, Fact]:
    return dict(islice(_facts(config, "", _DEPTH), _MOST_FACTS))


def _facts(value: Any, name: str, depth: int) -> Iterator[tuple[str, Fact]]:
    """Yield what a configuration holds that is plain and private to nobody."""
    if name and _is_plain(value, name):
        yield name, _as_json(value)
        return
    for key, item in _entries(value) if depth else ():
        if key == _ATTENTION or not key.startswith("_"):
            yield from _facts(item, f"{name}.{key}" if name else key, depth - 1)


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a mapping or the attributes of an object."""
    if isinstance(value, nn.Module | torch.Tensor | type) or callable(value):
        return
    entries = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    for key, item in islice(entries.items(), _MOST_FACTS):
        if isinstance(key, str):
            yield key, item
    if _ATTENTION not in entries and isinstance(item := getattr(value, _ATTENTION, None), str):
        yield _ATTENTION, item


def _is_plain(value: Any, name: str) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= _MOST_ITEMS and all(_is_plain(item, name) for item in value)
    if isinstance(value, str):
        return bool(_WORD.fullmatch(value)) and not _PRIVATE.search(name)
    is_finite = not isinstance(value, float) or math.isfinite(value)
    return isinstance(value, bool | int | float | torch.dtype | None) and is_finite


def _as_json(value: Any) -> Fact:
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
