"""What differs between the environments of two runs: the first suspect if their numbers differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# libraries that a comparison needs not name: they compute none of a program's numbers
_INDIFFERENT = frozenset({"otel_torch"})


@dataclass(frozen=True, slots=True)
class EnvironmentDifference:
    """A fact of the environment that differs; None on a side where it is not set."""

    name: str
    reference: str | None
    port: str | None

    def __str__(self) -> str:
        return f"{self.name} {self.reference or 'not set'} → {self.port or 'not set'}"


def environment_differences(
    reference: Mapping[str, Any], port: Mapping[str, Any]
) -> list[EnvironmentDifference]:
    """Compare the environments in the metadata of two recordings.

    A library that only one program imports, and a setting that only one version of torch has, are
    no difference; an environment variable that is set on one side only is. Nothing is compared if
    one recording does not describe its environment.

    >>> environment_differences(
    ...     {"versions": {"torch": "2.12.0"}, "environment": {"threads": 1}},
    ...     {"versions": {"torch": "2.13.0"}, "environment": {"threads": 1}},
    ... )
    [EnvironmentDifference(name='torch', reference='2.12.0', port='2.13.0')]
    """
    return [
        *_differences(_table(reference, "versions"), _table(port, "versions")),
        *_differences(_table(reference, "environment"), _table(port, "environment")),
        *_differences(_world(reference), _world(port)),
    ]


def _differences(
    reference: Mapping[str, Any], port: Mapping[str, Any]
) -> Iterator[EnvironmentDifference]:
    if not (reference and port):
        return
    for name in dict.fromkeys((*reference, *port)):
        values = reference.get(name), port.get(name)
        # the names of environment variables are in capitals
        is_comparable = None not in values or name.isupper()
        if values[0] != values[1] and is_comparable and name not in _INDIFFERENT:
            yield EnvironmentDifference(name, *map(_text, values))


def _table(metadata: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    table = metadata.get(key)
    return table if isinstance(table, dict) else {}


def _world(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    size = metadata.get("world_size")
    return {} if size is None else {"ranks": size}


def _text(value: Any) -> str | None:
    if isinstance(value, bool):
        return "on" if value else "off"
    return None if value is None else str(value)
