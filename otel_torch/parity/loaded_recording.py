"""The part of a recording that is read before its forwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from otel_torch.parity.call_graph import Parameter, read_module_table
from otel_torch.parity.forwards import SKIPPED_PHASES, ForwardRows, read_parameters
from otel_torch.parity.modules import ModulePath
from otel_torch.parity.noise import dtypes_by_module
from otel_torch.parity.recording_source import RecordingSource, Warn
from otel_torch.recording.metadata import RECORDING_SCHEMA, describe_early_end
from otel_torch.recording.reader import RecordingError
from otel_torch.recording.row_batches import RowKinds

_SELECTIONS = (
    "OTEL_TORCH_MODELS",
    "OTEL_TORCH_MODULES",
    "OTEL_TORCH_EXCLUDE",
    "OTEL_TORCH_STEPS",
    "OTEL_TORCH_GRAPH_INSIDE",
    "FASTVIDEO_TRACE_LAYERS",
    "FASTVIDEO_TRACE_STEPS",
)


@dataclass(slots=True)
class LoadedRecording:
    """One side of a comparison.

    Attributes:
        uncalled: Modules that the table of modules has, but that are never called.
        dtypes: The dtypes of the parameters of each module.
        kinds: The kinds of rows read so far.
        skipped_phases: Whose rows are in no forward that is compared.
        repeated: Tensors repeat within a step, and no calls were recorded.
    """

    source: RecordingSource
    meta: dict[str, Any]
    parameters: list[Parameter]
    modules: list[ModulePath]
    uncalled: set[ModulePath]
    dtypes: dict[ModulePath, set[str]]
    skipped_phases: frozenset[str] = SKIPPED_PHASES
    kinds: RowKinds = field(default_factory=RowKinds)
    repeated: bool = False

    @property
    def module_table(self) -> set[ModulePath]:
        """The modules in the metadata, if any."""
        return module_paths(self.meta)

    @property
    def first_names(self) -> dict[ModulePath, ModulePath]:
        """The first name of each shared module, by its other names."""
        return {
            (entry.model, alias): (entry.model, entry.module)
            for entry in read_module_table(self.meta)
            for alias in entry.aliases
        }

    @property
    def model_names(self) -> list[str]:
        """The models, in the order of their modules."""
        return list(dict.fromkeys(model for model, _ in self.modules))

    @property
    def forward_counts(self) -> dict[str, int]:
        """How often each model was called, from the metadata."""
        models = self.meta.get("models", {})
        return {model: facts["forwards"] for model, facts in models.items() if "forwards" in facts}

    @property
    def captures(self) -> set[str]:
        """The names in OTEL_TORCH_CAPTURE; `training` adds `gradients` and `updates`."""
        return captures_of(self.meta)

    def is_trained(self, model: str) -> bool:
        """Return whether the parameters of a model changed: by the metadata, else by gradients."""
        trained = self.meta.get("models", {}).get(model, {}).get("trained")
        if trained is not None:
            return bool(trained)
        return any(
            kind.model == model and kind.tensor.startswith("param_grad.")
            for kind in self.kinds.kinds
        )

    def complete_modules(self, first: ForwardRows | None) -> None:
        """Add the modules of the first forward, for recordings without a table of modules."""
        if first is None:
            return
        seen = set(self.modules)
        for kind in self.kinds.kinds:
            module = kind.model, kind.module
            if module not in seen:
                seen.add(module)
                self.modules.append(module)


def module_paths(meta: dict[str, Any]) -> set[ModulePath]:
    """Return the modules in a recording's metadata."""
    return {(entry.model, entry.module) for entry in read_module_table(meta)}


def load_recording_start(
    source: RecordingSource,
    warn: Warn,
    leave_out: Warn,
    skipped_phases: frozenset[str] = SKIPPED_PHASES,
) -> LoadedRecording:
    """Read the metadata and the parameters of a recording.

    Args:
        leave_out: Called with a line if the recording ends before its run did.

    Raises:
        RecordingError: The file is not a recording of this schema.
    """
    meta = source.metadata(warn)
    schema = meta.get("schema", RECORDING_SCHEMA)
    if schema != RECORDING_SCHEMA:
        raise RecordingError(
            f"{source}: its schema is {schema!r}; this version reads {RECORDING_SCHEMA}, so "
            "compare with the version that recorded it"
        )
    for warning in describe_early_end(source.path, meta):
        leave_out(warning)
    try:
        parameters = read_parameters(source, meta)
    except OSError as error:
        raise RecordingError(f"{source}: {error.strerror}") from None
    table = read_module_table(meta)
    modules = dict.fromkeys((entry.model, entry.module) for entry in table)
    for parameter in parameters:
        modules.setdefault(parameter.module_path)
    uncalled = {(entry.model, entry.module) for entry in table if not entry.called}
    # a tensor with two names goes by that of the module that runs
    parameters.sort(key=lambda parameter: parameter.module_path in uncalled)
    dtypes = dtypes_by_module(parameters)
    return LoadedRecording(
        source, meta, parameters, list(modules), uncalled, dtypes, skipped_phases
    )


def selection_of(meta: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings by which a run selected what it recorded, by its metadata.

    >>> selection_of({"settings": {"OTEL_TORCH_STEPS": "0,1", "OTEL_TORCH_JSONL": "a.jsonl"}})
    {'OTEL_TORCH_STEPS': '0,1'}
    """
    settings = meta.get("settings", {})
    return {name: str(settings[name]) for name in _SELECTIONS if name in settings}


def captures_of(meta: Mapping[str, Any]) -> set[str]:
    """Return what a run recorded, by its metadata; `training` is gradients and updates.

    >>> sorted(captures_of({"settings": {"OTEL_TORCH_CAPTURE": "inputs, tokens"}}))
    ['inputs', 'tokens']
    """
    text = str(meta.get("settings", {}).get("OTEL_TORCH_CAPTURE", ""))
    captures = {name.strip() for name in text.split(",")}
    return captures | ({"gradients", "updates"} if "training" in captures else set())
