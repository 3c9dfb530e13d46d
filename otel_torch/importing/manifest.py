"""Reads a manifest: which tensors were dumped, where they are, and in which order they came.

An entry is the name of a tensor, or an object. A group is an object with `tensors` or `steps`; its
other fields hold for all entries in it. Each group is one forward.

>>> text = b'{"model": "Net", "tensors": ["fc:in[0]", {"module": "fc", "key": "y"}]}'
>>> for entry in parse_manifest(text, Path("dump.json")):
...     print(entry.model, entry.module, entry.tensor, entry.key)
Net fc in[0] fc:in[0]
Net fc out y
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

# what a tensor can be, by the phase of its record
_LABELS = {
    "forward": re.compile(r"(in|out)([.\[].*)?"),
    "attach": re.compile(r"(param|buffer)\..+"),
    "backward": re.compile(r"grad([.\[#].*)?|param_grad\..+"),
}
_LABELS_IN_WORDS = "out, out[0], in[0], in.NAME, param.NAME, buffer.NAME, grad or param_grad.NAME"
_LINES = frozenset({".jsonl", ".ndjson"})

_Index = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Fields = dict[str, Any]


class ManifestError(ValueError):
    """A manifest, or a file that it names, cannot be imported; one line."""


class _Node(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """An entry or a group, as written."""

    model: str | None = None
    module: str | None = None
    tensor: str | None = None
    cls: str | None = msgspec.field(default=None, name="class")
    argument: str | None = None
    loop: _Index | None = None
    step: _Index | None = None
    call: _Index | None = None
    file: str | None = None
    key: str | None = None
    permute: list[_Index] | None = None
    dtype: str | None = None
    versions: dict[str, str] | None = None
    tensors: list[str | _Node] | None = None
    steps: list[_Node] | None = None

    @property
    def is_group(self) -> bool:
        return self.tensors is not None or self.steps is not None

    def given(self) -> Fields:
        """Return the fields that are there, but not what it contains."""
        fields = msgspec.structs.asdict(self)
        return {
            name: value
            for name, value in fields.items()
            if value is not None and name not in ("tensors", "steps")
        }


@dataclass(frozen=True, slots=True)
class Entry:
    """A dumped tensor.

    Attributes:
        place: Where the manifest lists it.
        forward: Which forward it belongs to, from 1; the entries of one follow each other.
        file: Relative to the manifest; None for the file beside it.
        key: Its name in the file.
        permute: The axes of the array in the file, in the order in which torch has them.
        dtype: What the program computed in, where the file has another type.
        versions: Libraries of the program.
    """

    place: str
    forward: int
    model: str
    module: str
    tensor: str
    phase: str
    class_name: str
    argument: str | None
    loop: int
    step: int
    call: int
    file: str | None
    key: str
    permute: tuple[int, ...] | None
    dtype: str | None
    versions: Mapping[str, str]

    @property
    def where(self) -> str:
        """Its place and its name, for messages."""
        return f"{self.place} ({self.module or 'the model'}, {self.tensor})"

    @property
    def identity(self) -> tuple[Any, ...]:
        """What is unique in a recording."""
        return self.model, self.module, self.tensor, self.loop, self.step, self.call, self.phase


def read_manifest(path: Path) -> list[Entry]:
    """Return the entries of a manifest.

    Raises:
        ManifestError: It is not a manifest.
        OSError: It cannot be read.
    """
    return list(parse_manifest(path.read_bytes(), path))


def entries_of_keys(keys: list[str], path: Path) -> list[Entry]:
    """Return an entry for each key of an archive, which thereby is its own manifest."""
    walker = _Walker(path)
    return [walker.entry(key, {"file": path.name}, str(path)) for key in keys]


def parse_manifest(content: bytes, path: Path) -> Iterator[Entry]:
    """Yield the entries of a manifest: JSON, or JSON lines by the name of its file.

    Raises:
        ManifestError: It is not a manifest.
    """
    walker = _Walker(path)
    content = content.removeprefix(b"\xef\xbb\xbf")
    if path.suffix in _LINES:
        yield from walker.lines(content)
    else:
        node = _decode(content, list[str | _Node] | _Node, path, 1)
        yield from walker.group(node if isinstance(node, _Node) else _Node(tensors=node), {})


class _Walker:
    """Walks through the nodes of a manifest, in order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forward = 1
        self._count = itertools.count(1)

    def lines(self, content: bytes) -> Iterator[Entry]:
        """Yield the entries of JSON lines. A line without a tensor holds for those after it."""
        defaults: Fields = {}
        for number, line in enumerate(content.splitlines(), start=1):
            if not line.strip():
                continue
            node = _decode(line, str | _Node, self._path, number)
            if isinstance(node, _Node) and node.is_group:
                yield from self.group(node, defaults)
            elif isinstance(node, _Node) and node.module is None and node.key is None:
                self._forward += 1
                defaults |= self._defaults(node)
            else:
                yield self.entry(node, defaults, f"{self._path}: line {number}")

    def group(self, group: _Node, defaults: Fields) -> Iterator[Entry]:
        """Yield the entries of a group and of the groups in it."""
        self._forward += 1
        defaults = defaults | self._defaults(group)
        for node in group.tensors or ():
            if isinstance(node, _Node) and node.is_group:
                yield from self.group(node, defaults)
                self._forward += 1
            else:
                yield self.entry(node, defaults, f"{self._path}: entry {next(self._count)}")
        for number, step in enumerate(group.steps or ()):
            yield from self.group(step, defaults | {"step": number})

    def _defaults(self, group: _Node) -> Fields:
        """Return what a group says of the entries in it."""
        fields = group.given()
        if own := {"module", "tensor", "key", "argument", "class"} & set(fields):
            raise ManifestError(
                f"{self._path}: a group has {min(own)!r}, which only an entry can have"
            )
        return fields

    def entry(self, node: str | _Node, defaults: Fields, place: str) -> Entry:
        """Return an entry with what holds for it."""
        own: Fields = {"key": node} if isinstance(node, str) else node.given()
        if "module" not in own and "key" not in own:
            raise ManifestError(f"{place}: names no tensor; give it a module or a key")
        fields: Fields = defaults | own
        module, _, label = own.get("key", "").partition(":")
        module = own.get("module", module.replace("/", "."))
        tensor = own.get("tensor", (label if "module" not in own else "") or "out")
        phase = next((name for name, labels in _LABELS.items() if labels.fullmatch(tensor)), None)
        if phase is None:
            raise ManifestError(f"{place}: {tensor!r} is no tensor; use {_LABELS_IN_WORDS}")
        permute = fields.get("permute")
        if permute is not None and sorted(permute) != list(range(len(permute))):
            raise ManifestError(f"{place}: permute {permute} is not an order of the axes 0, 1, …")
        return Entry(
            place,
            self._forward,
            fields.get("model", "Model"),
            module,
            tensor,
            phase,
            fields.get("cls", ""),
            fields.get("argument"),
            fields.get("loop", 0),
            fields.get("step", 0),
            fields.get("call", 0),
            fields.get("file"),
            own.get("key", module if tensor == "out" else f"{module}:{tensor}"),
            None if permute is None else tuple(permute),
            fields.get("dtype"),
            fields.get("versions", {}),
        )


def _decode(content: bytes, kind: Any, path: Path, line: int) -> Any:
    """Return JSON as the given type.

    Args:
        line: The number of its first line.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise ManifestError(f"{path}: {'' if line == 1 else f'line {line}: '}{error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        position = re.search(r"\(byte (\d+)\)", str(error))
        line += content[: int(position[1])].count(b"\n") if position else 0
        raise ManifestError(
            f"{path}: line {line}: is not JSON ({error}); a manifest is a list of tensors, or one "
            "object per line in a file named .jsonl"
        ) from None
