"""Look up cached calls by the model's own tree: `cache.model.h[0].output`, `cache["h.0"]`, slices
and negative indices.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from otel_torch.capture.cache_entry import CacheEntry
from otel_torch.capture.cache_file import SavedCache, load_cache, save_cache
from otel_torch.capture.module_paths import possible_names, with_root, without_root
from otel_torch.rendering.near_name import near_name

_SHOWN_ROWS = 40  # of the tree that is printed


class CacheDict(Mapping[str, "CacheDict"]):
    """The cached calls of one module and everything below it; `cache.model` and `cache` are the
    root.

    Attributes and strings lead to submodules, whole paths included, with or without the leading
    `model`; integers and slices lead to the entries of a module list. `output`, `inputs` and
    `input` are those of the module's last call, `calls` is the list of all its calls. A child that
    has one of these names is reached as `cache["…output"]`. Keys, iteration, `len` and `in` cover
    the modules from here down that were called, by their full paths.

    Raises:
        AttributeError, KeyError, IndexError: no such module; the message lists those that exist.
    """

    def __init__(
        self,
        names: Iterable[str] = (),
        rename: Mapping[str, str] | None = None,
        alias: Mapping[str, str] | None = None,
    ) -> None:
        self._calls: dict[str, list[CacheEntry]] = {}
        self._names: dict[str, None] = {"": None}  # every module of the model, called or not
        self._prefix = ""  # the name of the module that this object shows
        renamed = dict(rename or {})
        self._components = {old: new for old, new in renamed.items() if "." not in old}
        self._paths = {new: old for old, new in renamed.items() if "." in old} | dict(alias or {})
        self.add_names(names)

    # -- filling

    def add_names(self, names: Iterable[str]) -> None:
        """Add modules of the model, and the modules that contain them."""
        for name in names:
            missing = []
            while name not in self._names:
                missing.append(name)
                name = name.rpartition(".")[0]
            self._names |= dict.fromkeys(reversed(missing))  # parents first, as in the model

    def append(self, name: str, entry: CacheEntry) -> CacheEntry:
        """Add one more call of a module and return its entry."""
        if name not in self._names:
            self.add_names([name])
        self._calls.setdefault(name, []).append(entry)
        return entry

    def last_without_output(self, name: str) -> CacheEntry | None:
        """Return the newest call of a module that has no output yet, or None."""
        for entry in reversed(self._calls.get(name, [])):
            if not entry.has_output:
                return entry
        return None

    # -- reading

    @property
    def calls(self) -> list[CacheEntry]:
        """All calls of this module, oldest first."""
        return self._calls.get(self._prefix, [])

    @property
    def output(self) -> Any:
        """The output of the module's last call."""
        return self._last_call("output").output

    @property
    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The `(args, kwargs)` of the module's last call."""
        return self._last_call("inputs").inputs

    @property
    def input(self) -> Any:
        """The first argument of the module's last call."""
        return self._last_call("input").input

    def _last_call(self, field: str) -> CacheEntry:
        if not self.calls:
            raise AttributeError(self._describe_missing_call(field))
        return self.calls[-1]

    def _describe_missing_call(self, field: str) -> str:
        called = ", ".join(list(self)[:3]) or "no module"
        return (
            f"no call of {with_root(self._prefix)} is cached, so it has no {field}; "
            f"cached from here down: {called}"
        )

    def resolve(self, path: str) -> str | None:
        """Return the canonical name of the module at `path`, relative to this module or to the
        root, or None. Renamed components and aliases count.
        """
        for candidate in possible_names(self._prefix, path):
            name = self._resolve_absolute(candidate)
            if name is not None:
                return name
        return None

    def _resolve_absolute(self, path: str) -> str | None:
        if path in self._names:
            return path
        for new, old in self._paths.items():
            if path == new or path.startswith(f"{new}."):
                name = without_root(old) + path[len(new) :]
                return name if name in self._names else None
        original = {new: old for old, new in self._components.items()}
        name = ""
        for part in path.split("."):
            prefix = f"{name}." if name else ""
            if prefix + part in self._names:
                name = prefix + part
            elif part in original and prefix + original[part] in self._names:
                name = prefix + original[part]
            else:
                return None
        return name

    def _view(self, name: str) -> CacheDict:
        view = CacheDict.__new__(CacheDict)
        view.__dict__ |= self.__dict__
        view._prefix = name
        return view

    def __getattr__(self, name: str) -> CacheDict:
        # `_names` is missing while an object is copied or unpickled
        if name.startswith("__") or "_names" not in self.__dict__:
            raise AttributeError(name)
        if name in ("output", "inputs", "input"):  # the property has raised
            raise AttributeError(self._describe_missing_call(name))
        resolved = self.resolve(name)
        if resolved is None:
            raise AttributeError(self._describe_missing_child(name))
        return self._view(resolved)

    def __getitem__(self, key: str | int | slice) -> Any:
        if isinstance(key, str):
            resolved = self.resolve(key)
            if resolved is None:
                raise KeyError(self._describe_missing_child(key))
            return self._view(resolved)
        entries = [name for name in self._children() if name.rpartition(".")[2].isdecimal()]
        if not entries:
            raise TypeError(
                f"{with_root(self._prefix)} is not a list of modules; its calls are in .calls"
            )
        if isinstance(key, slice):
            return [self._view(name) for name in entries[key]]
        try:
            return self._view(entries[key])
        except IndexError:
            raise IndexError(
                f"{with_root(self._prefix)} has {len(entries)} entries, none at index {key}"
            ) from None

    def _children(self) -> list[str]:
        return [name for name in self._names if name and name.rpartition(".")[0] == self._prefix]

    def _describe_missing_child(self, name: str) -> str:
        children = [child.rpartition(".")[2] for child in self._children()]
        hint = near_name(name, children, is_regex=False)
        return f"{with_root(self._prefix)} has no module {name!r}{hint}"

    def _contains(self, name: str) -> bool:
        return name == self._prefix or not self._prefix or name.startswith(f"{self._prefix}.")

    def __iter__(self) -> Iterator[str]:
        return (with_root(name) for name in self._calls if self._contains(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, key: object) -> bool:
        resolved = self.resolve(key) if isinstance(key, str) else None
        return resolved is not None and with_root(resolved) in list(self)

    # -- printing

    def __repr__(self) -> str:
        rows = []
        shown = list(self)
        for name in self._names:
            path = with_root(name)
            has_calls = any(key == path or key.startswith(f"{path}.") for key in shown)
            if self._contains(name) and has_calls:
                rows.append(self._describe_row(name))
        if len(rows) > _SHOWN_ROWS:
            rows[_SHOWN_ROWS:] = [f"… and {len(rows) - _SHOWN_ROWS:,} more modules"]
        return "\n".join(rows) or f"{with_root(self._prefix)}: nothing is cached"

    def _describe_row(self, name: str) -> str:
        calls = self._calls.get(name, [])
        indent = "  " * (_depth(name) - _depth(self._prefix))
        label = name.rpartition(".")[2] or with_root("")
        value = calls[-1].describe() if calls else ""
        count = f"  ({len(calls)} calls)" if len(calls) > 1 else ""
        return f"{indent}{label}  {value}{count}".rstrip()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"

    # -- on disk

    def save(self, path: str | Path) -> None:
        """Write all calls from here down to a safetensors file.

        Tensors, numbers, booleans and strings are saved; any other value becomes None. Raises
        ModuleNotFoundError without safetensors.
        """
        saved = SavedCache(
            names=list(self._names),
            calls={key: self[key].calls for key in self},
            components=self._components,
            paths=self._paths,
        )
        save_cache(path, saved)

    @classmethod
    def load(cls, path: str | Path) -> CacheDict:
        """Read a file that `save` wrote. Nothing is unpickled: named tuples come back as tuples,
        dataclasses as dicts. Raises ValueError for any other file.
        """
        saved = load_cache(path)
        loaded = cls(saved["names"])
        loaded._components, loaded._paths = saved["components"], saved["paths"]
        for key, entries in saved["calls"].items():
            for entry in entries:
                loaded.append(without_root(key), entry)
        return loaded


def _depth(name: str) -> int:
    return name.count(".") + 1 if name else 0
