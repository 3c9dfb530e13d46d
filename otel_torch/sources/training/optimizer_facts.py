"""Describes every optimizer as it is at its first step, for the metadata of a recording.

Two trainings whose gradients agree and whose updates do not differ in here: in a setting of a
group, in who holds a parameter, or in the state with which the optimizer went on. A parameter that
never trains is found here, too: no optimizer holds it, or it never has a gradient.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from otel_torch.records import json_safe
from otel_torch.sources.models.model import Model
from otel_torch.sources.steps.optimizers import OptimizerClock, Optimizers
from otel_torch.sources.steps.updates import Update
from otel_torch.sources.tensors.parameter_data import gradient_of
from otel_torch.sources.training.learning_rate_schedules import LearningRateSchedules, Schedule
from otel_torch.sources.training.training_rows import TrainingRows
from otel_torch.torch_private import unobserved

# by `id`, the names of a parameter: `model:module.parameter`
Names = dict[int, list[str]]


# steps of an optimizer, behind its first one, at which parameters without one are looked for again
_LOOKED_AT = frozenset({3, 10, 30, 100, 300, 1000})


class _Idle:
    """Parameters that an optimizer holds and that had no gradient in any step looked at."""

    def __init__(self, names: Names, parameters: Iterable[int]) -> None:
        wanted = frozenset(parameters)
        self.names = {key: found for key, found in names.items() if key in wanted}

    def remove_trained(self, optimizer: Any) -> None:
        """Remove those that have a gradient now."""
        for group in optimizer.param_groups if self.names else ():
            for parameter in group["params"]:
                if id(parameter) in self.names and gradient_of(parameter) is not None:
                    del self.names[id(parameter)]


class OptimizerFacts:
    """The optimizers of one session that have stepped."""

    def __init__(self, optimizers: Optimizers, schedules: LearningRateSchedules) -> None:
        self._optimizers, self._schedules = optimizers, schedules
        self._scheduled: dict[int, list[Schedule]] = {}  # by serial
        self._facts: dict[int, dict[str, Any]] = {}  # by serial: a loaded optimizer is another one
        self._clocks: dict[int, OptimizerClock] = {}
        self._idle: dict[int, _Idle] = {}
        self._orphans: Counter[tuple[int, str]] = Counter()  # by serial and class
        self._untrained: dict[str, dict[str, Names]] = {}  # by model
        self._steps: Counter[int] = Counter()  # by serial, behind the first one

    @unobserved  # a learning rate may be a tensor
    def add(self, optimizer: Any, updates: Sequence[Update], scaler: Any = None) -> None:
        """Describe an optimizer that is about to step, unless it has stepped before.

        Args:
            updates: what it is about to change; nothing is described without.
            scaler: the GradScaler that steps it.
        """
        clock = self._optimizers.stepping(optimizer)
        if not updates:
            self._add_orphan(optimizer, clock)
            return
        if (facts := self._facts.get(clock.serial)) is not None:
            facts["last_step"] = updates[0].step.step
            self._look_again(optimizer, clock, updates)
            if TrainingRows.are_detailed(updates[0].step):
                self._idle[clock.serial].remove_trained(optimizer)
            return
        names = _names_in([update.model for update in updates])
        self._clocks[clock.serial] = clock
        groups = [_describe_group(group, names) for group in optimizer.param_groups]
        if len(groups) == 1:  # it may hold copies
            updated = frozenset().union(*(update.parameters for update in updates))
            groups[0]["parameters"] = _named(names, updated)
        self._facts[clock.serial] = {
            "class": type(optimizer).__name__,
            "models": [update.model.name for update in updates],
            "first_step": updates[0].step.step,
            "last_step": updates[0].step.step,
            "loaded": clock.is_loaded,
            "state": sorted({key for state in optimizer.state.values() for key in state}),
            "grad_scaler": None if scaler is None else _plain_items(scaler.state_dict()),
            "groups": groups,
            "copies": _dtypes_of_copies(optimizer, updates),
        }
        self._scheduled[clock.serial] = self._schedules.optimizer_steps_first(optimizer)
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        idle = _Idle(names, (id(parameter) for parameter in held if parameter.requires_grad))
        idle.remove_trained(optimizer)
        self._idle[clock.serial] = idle
        for update in updates:
            self._untrained[update.model.name] = self._find_untrained(update, names)

    def _add_orphan(self, optimizer: Any, clock: OptimizerClock) -> None:
        """Count a step with parameters of no model, none of which has a gradient."""
        groups = optimizer.param_groups
        held = (parameter for group in groups for parameter in group["params"])
        if all(gradient_of(parameter) is None for parameter in held):
            self._orphans[clock.serial, type(optimizer).__name__] += 1

    def idle(self) -> list[dict[str, Any]]:
        """Return the optimizers that have never stepped, and those whose steps changed nothing."""
        return [
            *({"class": clock.kind, "steps": 0} for clock in self._optimizers.unstepped()),
            *({"class": kind, "steps": steps} for (_, kind), steps in self._orphans.items()),
        ]

    def describe(self) -> list[dict[str, Any]]:
        """Return the optimizers in the order in which they first stepped."""
        described = []
        held = frozenset().union(*(_held_by(clock) for clock in self._optimizers))
        for serial, facts in list(self._facts.items()):
            untrained: dict[str, list[str]] = {"unheld": [], "frozen": [], "unused_gradients": []}
            for model in facts["models"]:
                for kind, names in self._untrained[model].items():
                    # a group may have been added since
                    left = names.keys() if kind == "frozen" else names.keys() - held
                    untrained[kind] += _named(names, left)
            idle = list(self._idle[serial].names.values())
            untrained["no_gradient"] = [*chain.from_iterable(idle)]
            described.append(
                facts
                | untrained
                | {
                    "schedulers": [each.describe() for each in self._scheduled[serial]],
                    "lost_load": self._optimizers.has_lost_load(self._clocks[serial]),
                }
            )
        return described

    def _look_again(self, optimizer: Any, clock: OptimizerClock, updates: Sequence[Update]) -> None:
        """Find the parameters without an optimizer once more: some may be trained from here on, and
        those of a model that is trained for the first time.
        """
        self._steps[clock.serial] += 1
        is_due = self._steps[clock.serial] in _LOOKED_AT
        models: list[str] = self._facts[clock.serial]["models"]
        for update in updates:
            name = update.model.name
            if not is_due and name in models:
                continue
            untrained = self._find_untrained(update, _names_in([update.model]))
            frozen = self._untrained.get(name, untrained)["frozen"]
            self._untrained[name] = untrained | {"frozen": frozen}
            if name not in models:  # another model, of which this optimizer holds copies, too
                models.append(name)

    def _find_untrained(self, update: Update, names: Names) -> dict[str, Names]:
        """Return the parameters that no optimizer changes, although they require gradients, those
        of them that have a gradient, and those that require none.
        """
        root = update.model.root()
        parameters = {} if root is None else {id(item): item for item in root.parameters()}
        held = update.parameters.union(*(_held_by(clock) for clock in self._optimizers))
        trainable = {key for key, parameter in parameters.items() if parameter.requires_grad}
        unheld = trainable - held
        untrained = {
            "unheld": unheld,
            "frozen": parameters.keys() - trainable,
            "unused_gradients": {key for key in unheld if gradient_of(parameters[key]) is not None},
        }
        return {
            kind: {key: found for key, found in names.items() if key in keys}
            for kind, keys in untrained.items()
        }


def _held_by(clock: OptimizerClock) -> frozenset[int]:
    return clock.parameters | clock.copied


def _dtypes_of_copies(optimizer: Any, updates: Sequence[Update]) -> list[str]:
    """Return the dtypes of the parameters of an optimizer that holds none of a model; else []."""
    if not all(update.is_copied_back(optimizer) for update in updates):
        return []
    groups = optimizer.param_groups
    return sorted({str(parameter.dtype) for group in groups for parameter in group["params"]})


def _names_in(models: Iterable[Model]) -> Names:
    """Return the names of all parameters of the models, in their order there."""
    names: Names = defaultdict(list)
    for model in models:
        for site in list(model.sites.values()):
            module = site.module()
            if module is None or not site.names:
                continue
            path = site.names[0][0]
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    name = f"{path}.{key}" if path else key
                    names[id(parameter)].append(f"{model.name}:{name}")
    return names


def _named(names: Names, parameters: Iterable[int]) -> list[str]:
    """Return the names of the parameters, in the order of `names`."""
    wanted = frozenset(parameters)
    return [name for key, found in names.items() if key in wanted for name in found]


def _describe_group(group: dict[str, Any], names: Names) -> dict[str, Any]:
    settings = {key: value for key, value in group.items() if key != "params"}
    return {
        "parameters": _named(names, map(id, group["params"])),
        "settings": _plain_items(settings),
    }


def _plain_items(items: dict[str, Any]) -> dict[str, Any]:
    """Return those items that can be written as JSON.

    >>> _plain_items({"lr": 1e-3, "betas": (0.9, float("inf")), "generator": object()})
    {'lr': 0.001, 'betas': [0.9, 'Infinity']}
    """
    plain = {}
    for key, value in items.items():
        try:
            plain[key] = _plain(value)
        except TypeError:
            continue
    return plain


def _plain(value: Any) -> Any:
    """Return a value as JSON has it.

    Raises:
        TypeError: JSON has no such value.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return json_safe(value)
    raise TypeError(type(value).__name__)
