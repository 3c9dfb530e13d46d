"""Read and write a cache as a safetensors file.

The tensors are the file's tensors, numbered; its metadata holds, as JSON, how they were nested in
the values, with the tensors' numbers in their places.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypedDict

from torch import Tensor

from otel_torch.capture.cache_entry import CacheEntry

_METADATA_KEY = "otel_torch.cache"


class SavedCache(TypedDict):
    """What a file holds of a cache. `calls` maps paths of modules to the entries of their calls;
    the others are the fields of a `CacheDict`.
    """

    names: list[str]
    calls: dict[str, list[CacheEntry]]
    components: dict[str, str]
    paths: dict[str, str]


def save_cache(path: str | Path, cache: SavedCache) -> None:
    """Write a cache. Raises ModuleNotFoundError without safetensors."""
    save_file = _import_safetensors("save_file")
    tensors: dict[str, Tensor] = {}

    def encode(value: Any) -> Any:
        if isinstance(value, Tensor):
            key = str(len(tensors))
            tensors[key] = value.detach().contiguous().clone()
            return {"tensor": key}
        if isinstance(value, dict):
            return {"dict": [[str(key), encode(item)] for key, item in value.items()]}
        if isinstance(value, (list, tuple)):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: [encode(item) for item in value]}
        if hasattr(value, "__dataclass_fields__"):
            names = value.__dataclass_fields__
            return {"dict": [[name, encode(getattr(value, name, None))] for name in names]}
        return value if isinstance(value, (bool, int, float, str)) else None

    calls = {
        key: [[encode(entry.output), encode(entry.inputs), entry.has_output] for entry in entries]
        for key, entries in cache["calls"].items()
    }
    save_file(tensors, path, metadata={_METADATA_KEY: json.dumps({**cache, "calls": calls})})


def load_cache(path: str | Path) -> SavedCache:
    """Read what `save_cache` wrote. Raises ValueError for any other file."""
    safe_open = _import_safetensors("safe_open")
    try:
        with safe_open(path, "pt") as file:
            saved = json.loads((file.metadata() or {})[_METADATA_KEY])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(f"{path}: not a saved cache ({type(error).__name__}: {error})") from None

    def decode(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == "tensor":
            return tensors[content]
        if kind == "dict":
            return {key: decode(item) for key, item in content}
        return (tuple if kind == "tuple" else list)(decode(item) for item in content)

    def decode_entry(output: Any, inputs: Any, has_output: bool) -> CacheEntry:
        entry = CacheEntry(inputs=decode(inputs))
        if has_output:
            entry.set_output(decode(output))
        return entry

    calls = {
        key: [decode_entry(*encoded) for encoded in entries]
        for key, entries in saved["calls"].items()
    }
    return SavedCache(
        names=saved["names"],
        calls=calls,
        components=saved["components"],
        paths=saved["paths"],
    )


def _import_safetensors(name: str) -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "saved caches need safetensors: pip install 'otel-torch[tensors]'"
        ) from None
    return getattr(safetensors, name, None) or getattr(safetensors.torch, name)
