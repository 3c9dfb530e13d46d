"""What a cache kept, found by the model's tree: `cache.model.h[0].output`, `cache["h.0"]`, slices
and negative indices.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from otel_torch.capture.names import candidates, title, without_root
from otel_torch.capture.spill import OnDisk
from otel_torch.capture.structure import first_argument, replace_leaves


class Entry:
    """One call of a module. output: what it returned; inputs: `(args, kwargs)`; None where that was
    not kept.
    """

    __slots__ = ("_inputs", "_output", "has_output")

    def __init__(
        self, output: Any = None, inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    ) -> None:
        self._output, self._inputs = output, inputs
        self.has_output = output is not None

    @property
    def output(self) -> Any:
        """What the module returned."""
        return _loaded(self._output)

    @property
    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """`(args, kwargs)` of the call."""
        found: tuple[tuple[Any, ...], dict[str, Any]] | None = _loaded(self._inputs)
        return found

    @property
    def input(self) -> Any:
        """The first positional argument, else the first by keyword, else None."""
        args, kwargs = self.inputs or ((), {})
        return first_argument(args, kwargs)

    def set_output(self, output: Any) -> None:
        """End the call."""
        self._output, self.has_output = output, True

    def describe(self) -> str:
        """Shapes and types, in a few words."""
        parts = [_shape_of(self._output)] if self.has_output else []
        if self._inputs is not None:
            args, kwargs = self._inputs
            words = [
                *map(_shape_of, args),
                *(f"{key}={_shape_of(one)}" for key, one in kwargs.items()),
            ]
            parts.insert(0, f"({', '.join(words)}) →")
        return " ".join(parts)

    def __repr__(self) -> str:
        return f"Entry({self.describe()})"

    def __getstate__(self) -> Any:
        return self.output, self.inputs, self.has_output

    def __setstate__(self, state: Any) -> None:
        self._output, self._inputs, self.has_output = state


class CacheDict(Mapping[str, "CacheDict"]):
    """Everything that was kept below one place of the model, by name; `cache.model` and `cache` are
    the root.

    Attributes and strings go down the tree, whole paths too, with or without the leading `model`;
    integers and slices go into a list of modules. Where a module was called, `output`, `inputs` and
    `input` are those of its last call, and `calls` is the list of all. A child that is called like
    one of these is reached by `cache["…output"]`. Keys, iteration, `len` and `in` are of the
    modules that were called, from here down, by whole paths.

    Raises AttributeError, KeyError or IndexError for what is not there, with what is.
    """

    def __init__(
        self,
        names: Iterable[str] = (),
        rename: Mapping[str, str] | None = None,
        alias: Mapping[str, str] | None = None,
    ) -> None:
        self._calls: dict[str, list[Entry]] = {}
        self._names: dict[str, None] = {"": None}  # every module of the model, called or not
        self._place = ""
        self._components = {old: new for old, new in (rename or {}).items() if "." not in old}
        self._paths = {new: old for old, new in (rename or {}).items() if "." in old} | dict(
            alias or {}
        )
        self.learn(names)

    # -- filling
    # ----------------------------------------------------------------------------------------------

    def learn(self, names: Iterable[str]) -> None:
        """Take in the modules of a model."""
        for name in names:
            missing = []
            while name not in self._names:
                missing.append(name)
                name = name.rpartition(".")[0]
            self._names |= dict.fromkeys(
                reversed(missing)
            )  # what holds it first, as the model has them

    def append(self, name: str, entry: Entry) -> Entry:
        """One more call of a module."""
        if name not in self._names:
            self.learn([name])
        self._calls.setdefault(name, []).append(entry)
        return entry

    def last_without_output(self, name: str) -> Entry | None:
        """The newest call of a module whose output is still to come."""
        return next(
            (entry for entry in reversed(self._calls.get(name, [])) if not entry.has_output), None
        )

    # -- reading
    # ----------------------------------------------------------------------------------------------

    @property
    def calls(self) -> list[Entry]:
        """Every call of this module, oldest first."""
        return self._calls.get(self._place, [])

    @property
    def output(self) -> Any:
        """What this module returned last."""
        return self._last("output").output

    @property
    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """What this module was called with last: `(args, kwargs)`."""
        return self._last("inputs").inputs

    @property
    def input(self) -> Any:
        """The first argument that this module was called with last."""
        return self._last("input").input

    def _last(self, what: str) -> Entry:
        if not self.calls:
            raise AttributeError(self._no_call(what))
        return self.calls[-1]

    def _no_call(self, what: str) -> str:
        below = ", ".join(list(self)[:3]) or "nothing"
        return f"no call of {title(self._place)} was kept, so it has no {what}; from here down: {below}"

    def resolve(self, path: str) -> str | None:
        """The canonical name of a module by any of its names, from here or from the root; None for
        no module.
        """
        found = (self._walk(candidate) for candidate in candidates(self._place, path))
        return next((name for name in found if name is not None), None)

    def _walk(self, path: str) -> str | None:
        """A path with each component as it is or as it was renamed."""
        if path in self._names:
            return path
        for new, old in self._paths.items():
            if path == new or path.startswith(f"{new}."):
                found = without_root(old) + path[len(new) :]
                return found if found in self._names else None
        at = ""
        old_of = {new: old for old, new in self._components.items()}
        for part in path.split("."):
            step = f"{at}." if at else ""
            known = next(
                (step + one for one in (part, old_of.get(part, part)) if step + one in self._names),
                None,
            )
            if known is None:
                return None
            at = known
        return at

    def _at(self, name: str) -> CacheDict:
        view = CacheDict.__new__(CacheDict)
        view.__dict__ |= self.__dict__
        view._place = name
        return view

    def __getattr__(self, name: str) -> CacheDict:
        if (
            name.startswith("__") or "_names" not in self.__dict__
        ):  # while it is being copied or unpickled
            raise AttributeError(name)
        if name in ("output", "inputs", "input"):  # what the property raised
            raise AttributeError(self._no_call(name))
        found = self.resolve(name)
        if found is None:
            raise AttributeError(self._nothing(name))
        return self._at(found)

    def __getitem__(self, key: str | int | slice) -> Any:
        if isinstance(key, str):
            found = self.resolve(key)
            if found is None:
                raise KeyError(self._nothing(key))
            return self._at(found)
        entries = [name for name in self._children() if name.rpartition(".")[2].isdecimal()]
        if not entries:
            raise TypeError(
                f"{title(self._place)} is no list of modules; .calls is the list of its calls"
            )
        if isinstance(key, slice):
            return [self._at(name) for name in entries[key]]
        try:
            return self._at(entries[key])
        except IndexError:
            raise IndexError(
                f"{title(self._place)} has {len(entries)} entries, not one at {key}"
            ) from None

    def _children(self) -> list[str]:
        return [name for name in self._names if name and name.rpartition(".")[0] == self._place]

    def _nothing(self, name: str) -> str:
        children = [child.rpartition(".")[2] for child in self._children()]
        return f"{title(self._place)} has no module {name!r}; it has {', '.join(children[:8]) or 'none'}"

    def __iter__(self) -> Iterator[str]:
        inside = f"{self._place}." if self._place else ""
        return (
            title(name) for name in self._calls if name == self._place or name.startswith(inside)
        )

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, key: object) -> bool:
        found = self.resolve(key) if isinstance(key, str) else None
        return found is not None and title(found) in list(self)

    # -- showing
    # ----------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        rows = []
        for name in self._names:
            inside = not self._place or name == self._place or name.startswith(f"{self._place}.")
            if inside and any(
                title(name) == key or key.startswith(f"{title(name)}.") for key in self
            ):
                calls = self._calls.get(name, [])
                times = f"  ({len(calls)} calls)" if len(calls) > 1 else ""
                depth = name.count(".") + bool(name) - (self._place.count(".") + bool(self._place))
                last = name.rpartition(".")[2] or title("")
                rows.append(
                    f"{'  ' * depth}{last}  {calls[-1].describe() if calls else ''}{times}".rstrip()
                )
        return "\n".join(rows) or f"{title(self._place)}: nothing was kept"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"

    # -- on disk
    # ----------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write everything from here down as safetensors: the tensors, and how they were structured
        beside them. Values that are no tensors, numbers, truth values or strings are left out.
        Raises ModuleNotFoundError without safetensors.
        """
        save_file = _safetensors("save_file")
        tensors: dict[str, Tensor] = {}

        def plain(value: Any) -> Any:
            if isinstance(value, Tensor):
                tensors[str(len(tensors))] = value.detach().contiguous().clone()
                return {"tensor": str(len(tensors) - 1)}
            if isinstance(value, dict):
                return {"dict": [[str(key), plain(one)] for key, one in value.items()]}
            if isinstance(value, (list, tuple)):
                return {
                    "tuple" if isinstance(value, tuple) else "list": [plain(one) for one in value]
                }
            if hasattr(value, "__dataclass_fields__"):
                return {
                    "dict": [
                        [name, plain(getattr(value, name, None))]
                        for name in value.__dataclass_fields__
                    ]
                }
            return value if value is None or isinstance(value, (bool, int, float, str)) else None

        calls = {
            key: [
                [plain(entry.output), plain(entry.inputs), entry.has_output]
                for entry in self[key].calls
            ]
            for key in self
        }
        facts = {
            "names": list(self._names),
            "calls": calls,
            "components": self._components,
            "paths": self._paths,
        }
        save_file(tensors, path, metadata={"otel_torch.cache": json.dumps(facts)})

    @classmethod
    def load(cls, path: str | Path) -> CacheDict:
        """What `save` wrote; named tuples and dataclasses come back as tuples and dicts. Nothing is
        unpickled. Raises ValueError for a file that is no saved cache.
        """
        safe_open = _safetensors("safe_open")
        try:
            with safe_open(path, "pt") as file:
                facts = json.loads((file.metadata() or {})["otel_torch.cache"])
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no dict
        except FileNotFoundError:
            raise
        except Exception as error:
            raise ValueError(f"{path}: no saved cache ({type(error).__name__}: {error})") from None

        def whole(value: Any) -> Any:
            if not isinstance(value, dict):
                return value
            ((kind, inside),) = value.items()
            if kind == "tensor":
                return tensors[inside]
            if kind == "dict":
                return {key: whole(one) for key, one in inside}
            return (tuple if kind == "tuple" else list)(whole(one) for one in inside)

        loaded = cls(facts["names"])
        loaded._components, loaded._paths = facts["components"], facts["paths"]
        for key, entries in facts["calls"].items():
            for output, inputs, has_output in entries:
                entry = loaded.append(without_root(key), Entry(inputs=whole(inputs)))
                if has_output:
                    entry.set_output(whole(output))
        return loaded


def _loaded(value: Any) -> Any:
    loaded = False

    def load(tensor: OnDisk) -> Tensor:
        nonlocal loaded
        loaded = True
        return tensor.load()

    whole = replace_leaves(value, OnDisk, load)
    return whole if loaded else value  # the same object every time it is asked for


def _shape_of(value: Any) -> str:
    if isinstance(value, (Tensor, OnDisk)):
        kind = str(value.dtype).removeprefix("torch.")
        return f"{kind}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_shape_of(one)}" for key, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(map(_shape_of, value)) + ")"
    if hasattr(value, "__dataclass_fields__"):
        return (
            type(value).__name__
            + "("
            + ", ".join(_shape_of(getattr(value, n, None)) for n in value.__dataclass_fields__)
            + ")"
        )
    return (
        repr(value) if isinstance(value, (type(None), bool, int, float)) else type(value).__name__
    )


def _safetensors(name: str) -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "saved caches need safetensors: pip install 'otel-torch[tensors]'"
        ) from None
    return getattr(safetensors, name, None) or getattr(safetensors.torch, name)
