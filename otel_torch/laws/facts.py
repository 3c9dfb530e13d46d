"""What is known of the training of one model: its series and its optimizers, as recorded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from otel_torch.laws.series import Series, TrainingSeries
from otel_torch.records import LoopStep
from otel_torch.rendering.words import enumerate_words, plural
from otel_torch.training_quantities import row_label

FEWEST_STEPS = 3  # a warm-up begins at a learning rate of 0, and zeros let no gradient through yet
_MAX_NAMES = 6


class BrokenLaw(NamedTuple):
    """A law that the training of a model breaks: its name in the table, and a sentence.

    line: `file:line` of the loop where it is broken, which the sentence ends with; "" if unknown.
    """

    law: str
    model: str
    text: str
    line: str = ""


@dataclass
class TrainingFacts:
    """What a recording has of the training of one model.

    Attributes:
        optimizers: Those of the metadata that train it.
        called: The modules that were seen to run; None if no activations are recorded.
        loop: What the metadata say of its training loop.
        idle: The optimizers that change nothing: those of no model, and those that never step.
        has_ended: Whether the program has ended, and not by force.
    """

    training: TrainingSeries
    model: str
    optimizers: list[dict[str, Any]]
    called: frozenset[str] | None
    loop: dict[str, Any]
    idle: list[dict[str, Any]]
    has_ended: bool
    _modules: dict[str, dict[str, Series]] = field(default_factory=dict)

    @cached_property
    def totals(self) -> dict[str, Series]:
        """The series of the whole model by label."""
        return self.training.totals(self.model)

    def total(self, label: str) -> list[float]:
        """Return the values of a quantity of the whole model."""
        return list(self.totals.get(label, Series()).values)

    def line_of(self, event: str) -> str:
        """Return the line of an event of the loop as `file:line`, "" if it is unknown."""
        if event == "schedule":
            schedules = [own for entry in self.optimizers for own in entry.get("schedulers") or ()]
            return next((own["line"] for own in schedules if own.get("line")), "")
        return str((self.loop.get("lines") or {}).get(event, ""))

    def steps_with(self, label: str) -> list[LoopStep]:
        """Return the steps in which a quantity of the whole model was not 0."""
        series = self.totals.get(label, Series())
        steps = (step for step, value in zip(series.steps, series.values, strict=True) if value)
        return [self.training.steps[step] for step in dict.fromkeys(steps)]

    def modules(self, label: str) -> dict[str, Series]:
        """Return the series of a quantity by module, without that of the whole model."""
        if label not in self._modules:
            self._modules[label] = self.training.modules(self.model, label)
        return self._modules[label]

    def of_module(self, label: str, module: str) -> list[float]:
        return list(self.modules(label).get(module, Series()).values)

    @cached_property
    def updates(self) -> int:
        """How many steps its optimizers have made, by the rows of the busiest one."""
        counts = [
            entry.get("last_step", 0) - entry.get("first_step", 0) + 1 for entry in self.optimizers
        ]
        return max(counts, default=0)

    def named(self, kind: str) -> list[str]:
        """Return the parameters of the model that an entry of its optimizers lists."""
        return self._own(name for entry in self.optimizers for name in entry.get(kind, ()))

    @cached_property
    def held(self) -> set[str]:
        """The parameters that an optimizer holds."""
        groups = (group for entry in self.optimizers for group in entry.get("groups", ()))
        return set(self._own(name for group in groups for name in group.get("parameters", ())))

    @cached_property
    def trained(self) -> set[str]:
        """Those of them that require a gradient."""
        return self.held - set(self.named("frozen"))

    @cached_property
    def without_gradient(self) -> list[str]:
        """The trained parameters that never had a gradient, in as many steps as tell."""
        idle: dict[str, bool] = {}
        for entry in self.optimizers:
            steps = entry.get("last_step", 0) - entry.get("first_step", 0) + 1
            never = set(entry.get("no_gradient", ())) if steps >= FEWEST_STEPS else set()
            for group in entry.get("groups", ()):
                for name in self._own(group.get("parameters", ())):
                    known = f"{self.model}:{name}" in never
                    idle[name] = idle.get(name, True) and known
        return [name for name, is_idle in idle.items() if is_idle]

    def may_change(self, name: str) -> bool:
        """Return whether a parameter that no optimizer trains changes otherwise, or may.

        Its own row shows it, or those of its module, unless they are of other parameters there.
        """
        module, _, key = name.rpartition(".")
        own = row_label("update_ratio", key)
        changes = self.of_module(own, module) if module else self.total(own)
        if changes:
            return any(changes)
        others = {name for name in self.trained if owner_of(name) == module}
        if name in self.trained and (not module or others - set(self.without_gradient)):
            return False
        norms = self.of_module("param_norm", module)
        return not norms or any(self.of_module("update_ratio", module)) or len(set(norms)) > 1

    def is_called(self, name: str) -> bool:
        """Return whether the module that owns a parameter may have run."""
        return self.called is None or owner_of(name) in self.called

    def _own(self, names: Iterable[str]) -> list[str]:
        prefix = f"{self.model}:"
        return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def are_all(values: list[float], number: float) -> bool:
    """Return whether all values are a number, and enough to tell."""
    return len(values) >= FEWEST_STEPS and all(value == number for value in values)


def owner_of(name: str) -> str:
    return name.rpartition(".")[0]


def owners(names: Iterable[str]) -> str:
    """Return what owns parameters: the modules, and the parameters that the model itself has.

    >>> owners(["fc.weight", "fc.bias", "gain"])
    '`fc` and `gain`'
    """
    return listed(owner_of(name) or name for name in names)


def listed(names: Iterable[str]) -> str:
    """Return the names of modules in a sentence, the first of many.

    >>> listed(["fc", "norm", "fc"])
    '`fc` and `norm`'
    """
    names = list(dict.fromkeys(names))
    shown = [f"`{name or '(root)'}`" for name in names[:_MAX_NAMES]]
    if len(names) > _MAX_NAMES:
        shown.append(f"{plural(len(names) - _MAX_NAMES, 'further module')}")
    return enumerate_words(shown)


def in_steps(steps: list[LoopStep]) -> str:
    """Return when something happened.

    >>> in_steps([LoopStep(0, 3)]), in_steps([LoopStep(0, 3), LoopStep(0, 4)])
    ('at step 3', 'at step 3, and in 1 more step')
    """
    more = f", and in {plural(len(steps) - 1, 'more step')}" if len(steps) > 1 else ""
    return f"at {steps[0]}{more}"
