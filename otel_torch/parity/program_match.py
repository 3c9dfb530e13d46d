"""Match the parameters, modules and models of two recordings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from otel_torch.parity.call_graph import Parameter, build_program
from otel_torch.parity.correspondence import Correspondence
from otel_torch.parity.forwards import ForwardRows
from otel_torch.parity.loaded_recording import LoadedRecording
from otel_torch.parity.map_file import Map
from otel_torch.parity.modules import ModulePairs, ModulePath, pair_modules, pair_within_containers
from otel_torch.parity.modules_by_values import pair_by_values
from otel_torch.parity.naming import names_by_loader, plain_name
from otel_torch.parity.noise import coarsest_dtypes
from otel_torch.parity.parameters import ParameterPair, pair_parameters, tensor_key
from otel_torch.parity.recording_source import Warn
from otel_torch.parity.resolve_map import resolve_map
from otel_torch.parity.sides import Sides
from otel_torch.parity.tolerance import Tolerance
from otel_torch.parity.values import Comparer

# two models that share a smaller part of their parameters are unrelated
_UNRELATED = 0.1


class ProgramMatch:
    """The matched parameters, modules and models of the two recordings.

    Parameters are matched first: they determine the modules, which determine the models.
    The user's map overrides each.

    Attributes:
        given: The user's map for these two recordings, or None.
        models: The reference's -> the port's.
    """

    def __init__(
        self,
        recordings: Sides[LoadedRecording],
        map: Map | None,
        tolerance: Tolerance,
        warn: Warn,
        first: Sides[ForwardRows | None],
    ) -> None:
        self._recordings = recordings
        self._tolerance = tolerance
        self._first = first
        self.given: Correspondence | None = None if map is None else resolve_map(map, *recordings)
        self.parameters: list[ParameterPair] = []
        self.modules = ModulePairs()
        self.models: dict[str, str] = {}
        if self.given is not None:
            for warning in self.given.warnings:
                warn(warning)
        self._match_parameters_and_modules()
        if self.given is not None:
            self.modules = self.given.apply(self.modules)
        self._match_models()
        if self.given is not None:  # the map overrides equal names, too
            self.modules = self.given.apply(self.modules)
        self.modules.order = recordings.map(
            lambda recording: {module: index for index, module in enumerate(recording.modules)}
        )
        self.modules.uncalled = recordings.map(lambda recording: recording.uncalled)

    def _match_parameters_and_modules(self) -> None:
        reference, port = self._recordings
        pairable = self._pairable_parameters()
        self.parameters = self._pair_parameters(pairable)
        modules = reference.modules, port.modules, self._recordings.map(_owners)
        self.modules = pair_modules(self.parameters, *modules)
        further = pair_within_containers(self.modules, self.parameters, *pairable)
        if further:
            self.parameters += further
            self.modules = pair_modules(self.parameters, *modules)

    def _pairable_parameters(self) -> Sides[list[Parameter]]:
        """Return the parameters without those that the map keeps unpaired."""
        reference, port = self._recordings.map(lambda recording: recording.parameters)
        given = self.given
        if given is None:
            return Sides(reference, port)
        return Sides(
            [parameter for parameter in reference if not given.forbids(0, parameter.module_path)],
            [parameter for parameter in port if not given.forbids(1, parameter.module_path)],
        )

    def _pair_parameters(self, pairable: Sides[list[Parameter]]) -> list[ParameterPair]:
        loader_names = names_by_loader(self._recordings.port.meta)
        given = self.given
        if given is None:
            return pair_parameters(*pairable, self._tolerance, loader_names)

        def is_reordered(parameter: Parameter) -> bool:
            return given.reorders(parameter.module_path, f"param.{parameter.name}")

        return pair_parameters(
            *pairable, self._tolerance, loader_names, given.parameters, is_reordered
        )

    def replace_parameters(self, replaced: Mapping[int, ParameterPair]) -> None:
        """Replace pairs of parameters, by their `id`."""
        self.parameters = [replaced.get(id(pair), pair) for pair in self.parameters]
        self.modules.weights = {
            modules: [replaced.get(id(pair), pair) for pair in pairs]
            for modules, pairs in self.modules.weights.items()
        }

    def pairs_all_parameters(self) -> bool:
        """Return whether each parameter of either side has a counterpart, under any name."""
        paired = Sides(
            {tensor_key(part) for pair in self.parameters for part in pair.reference},
            {tensor_key(part) for pair in self.parameters for part in pair.port},
        )
        return all(
            tensor_key(parameter) in keys
            for recording, keys in zip(self._recordings, paired, strict=True)
            for parameter in recording.parameters
            if not parameter.is_buffer
        )

    def _match_models(self) -> None:
        """Match models by votes of their modules, then by name, then the only unmatched pair.

        Of equally many votes those for the same name count.
        """
        models = self.models
        if self.given is not None:
            models.update(self.given.models)
        votes = Counter((module[0], match[0]) for module, match in self.modules.matched.items())
        for whole, parts in self.modules.parts.items():
            votes.update((part[0], whole[0]) for part in parts)
        for model, match in sorted(votes, key=lambda pair: (-votes[pair], pair[0] != pair[1])):
            if model not in models and match not in models.values():
                models[model] = match
        names = self._recordings.map(lambda recording: recording.model_names)
        for model in names.reference:
            if model not in models and model in names.port and model not in models.values():
                models[model] = model
        unmatched = [name for name in names.reference if name not in models]
        unmatched_ports = [name for name in names.port if name not in models.values()]
        if len(unmatched) == len(unmatched_ports) == 1 and not models:
            models[unmatched[0]] = unmatched_ports[0]
        for model, match in models.items():
            self.modules.matched.setdefault((model, ""), (match, ""))
        self._match_equal_names()
        if not all(recording.parameters for recording in self._recordings):
            self._match_by_values()

    def _match_equal_names(self) -> None:
        """Match modules of the same name in matched models, if neither has another match."""
        matched = self.modules.matched
        taken = set(matched.values()) | set(self.modules.parts)
        reference, port = self._recordings
        ports = {
            (model, plain_name(module)): (model, module) for model, module in reversed(port.modules)
        }
        owners = {parameter.module_path for parameter in reference.parameters}
        port_owners = {parameter.module_path for parameter in port.parameters}
        for module in reference.modules:
            match = ports.get((self.models.get(module[0], ""), plain_name(module[1])))
            if match is None or match in taken:
                continue
            if module in matched or module in self.modules.wholes:
                continue
            is_owner = module in owners
            if not port_owners or (is_owner == (match in port_owners) and (is_owner or not owners)):
                matched[module] = match
                taken.add(match)

    def _match_by_values(self) -> None:
        """Match the remaining modules by what they compute in the first forwards."""
        reference, port = self._first
        if reference is None or port is None:
            return
        programs = Sides(build_program(reference.rows), build_program(port.rows))
        comparer = Comparer(self._tolerance)
        for program, recording in zip(programs, self._recordings, strict=True):
            if all(value.sketch is None for value in program.values):
                return  # statistics are too weak to tell modules apart
            comparer.coarse.update(coarsest_dtypes(program, recording.dtypes))
        matched = self.modules.matched
        free = Sides(
            set(self._recordings.reference.modules) - set(matched),
            set(self._recordings.port.modules) - set(matched.values()) - set(self.modules.parts),
        )
        for module, match in pair_by_values(programs, comparer, free).items():
            matched[module] = match
            self.models.setdefault(module[0], match[0])

    def is_unrelated(self) -> bool:
        """Return whether the two models share hardly any parameter, by numbers or by name.

        Reporting a divergence of such models would not help.
        """
        shared = {
            id(parameter)
            for pair in self.parameters
            if _is_shared(pair)
            for parameter in (*pair.reference, *pair.port)
        }
        return max(self._recordings.map(lambda recording: _share(recording, shared))) < _UNRELATED


def _owners(recording: LoadedRecording) -> set[ModulePath]:
    """Return the modules that have parameters."""
    return {parameter.module_path for parameter in recording.parameters if not parameter.is_buffer}


def _is_shared(pair: ParameterPair) -> bool:
    if pair.equal or pair.how == "map":
        return True
    names = {parameter.full_name for parameter in pair.reference}
    return any(parameter.full_name in names for parameter in pair.port)


def _share(recording: LoadedRecording, shared: set[int]) -> float:
    """Return the fraction of a recording's weights that both models have.

    By elements or by number, whichever is more: an engine packs the weights of its experts away,
    which are nearly all elements of a model. Constants are not counted by number: unrelated models
    have the same norms and biases before they are trained.
    """
    weights = [p for p in recording.parameters if not p.is_buffer and p.numel > 0]
    if not weights:
        return 1.0
    shared_numel = sum(weight.numel for weight in weights if id(weight) in shared)
    by_elements = shared_numel / sum(weight.numel for weight in weights)
    varied = [weight for weight in weights if weight.row.get("min") != weight.row.get("max")]
    by_number = sum(id(weight) in shared for weight in varied) / len(varied) if varied else 0.0
    return max(by_elements, by_number)
