"""What differs between two models before they run: configuration, generation settings, dtypes.

Only what both programs really have: two ports of one model share few names of their settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# the tables of a model's metadata, and how their entries are called
_TABLES = {"configuration": "", "generation": "generation "}


@dataclass(frozen=True, slots=True)
class SetupDifference:
    """A fact of a model that differs before it runs; the values are as text.

    Attributes:
        model, port_model: Whose fact it is, in each program.
        name: Such as `rope_parameters.rope_theta`.
    """

    model: str
    port_model: str
    name: str
    reference: str
    port: str

    def __str__(self) -> str:
        models = dict.fromkeys((self.model, self.port_model))
        return f"{' / '.join(models)}: {self.name} {self.reference} → {self.port}"


def setup_differences(
    reference: Mapping[str, Any], port: Mapping[str, Any]
) -> list[SetupDifference]:
    """Compare how the models in the metadata of two recordings are set up.

    Models of one name belong together, and the only ones that are left.

    >>> setup_differences(
    ...     {"models": {"Llama": {"forwards": 1, "configuration": {"eps": 1e-6, "heads": 8}}}},
    ...     {"models": {"Port": {"forwards": 1, "configuration": {"eps": 1e-5}}}},
    ... )
    [SetupDifference(model='Llama', port_model='Port', name='eps', reference='1e-06', port='1e-05')]
    """
    tables = [_models(metadata) for metadata in (reference, port)]
    return [
        SetupDifference(model, port_model, name, _text(own), _text(its))
        for model, port_model in _pairs(*tables)
        for name, own, its in _facts_of_both(tables[0][model], tables[1][port_model])
        if own != its
    ]


def _models(metadata: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    models = metadata.get("models")
    if not isinstance(models, dict):
        return {}
    return {name: facts for name, facts in models.items() if facts.get("forwards")}


def _pairs(reference: Mapping[str, Any], port: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield from ((name, name) for name in reference if name in port)
    rest = [name for name in reference if name not in port]
    rest_of_port = [name for name in port if name not in reference]
    if len(rest) == len(rest_of_port) == 1:
        yield rest[0], rest_of_port[0]


def _facts_of_both(
    reference: Mapping[str, Any], port: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    for table, word in _TABLES.items():
        own, its = reference.get(table, {}), port.get(table, {})
        yield from ((f"{word}{name}", own[name], its[name]) for name in own if name in its)
    if reference.get("dtypes") and port.get("dtypes"):
        # which of them has the most elements depends on what is tied or stacked
        yield "dtypes of the parameters", sorted(reference["dtypes"]), sorted(port["dtypes"])


def _text(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
