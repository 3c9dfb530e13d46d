"""What every training obeys, and a sentence for each law that one breaks: it does not train.

Each law is a function of what is recorded anyway, and says nothing where too little is known. What
is frozen on purpose, follows by a moving average or is copied back by its framework does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from otel_torch.rendering.words import plural
from otel_torch.show.training import Series, TrainingSeries
from otel_torch.training_quantities import row_label, split_label

FEWEST_STEPS = 3  # a warm-up begins at a learning rate of 0, and zeros let no gradient through yet
_MAX_NAMES = 6


@dataclass
class TrainingFacts:
    """What a recording has of the training of one model.

    Attributes:
        optimizers: Those of the metadata that train it.
        called: The modules that were seen to run; None if no activations are recorded.
    """

    training: TrainingSeries
    model: str
    optimizers: list[dict[str, Any]]
    called: frozenset[str] | None

    def total(self, label: str) -> list[float]:
        """Return the values of a quantity of the whole model."""
        return list(self.training.totals(self.model).get(label, Series()).values)

    def of_module(self, label: str, module: str) -> list[float]:
        """Return the values of a quantity of one module."""
        return list(self.training.modules(self.model, label).get(module, Series()).values)

    def named(self, kind: str) -> list[str]:
        """Return the parameters of the model that an entry of its optimizers lists."""
        return self._own(name for entry in self.optimizers for name in entry.get(kind, ()))

    @cached_property
    def trained(self) -> set[str]:
        """The parameters that an optimizer holds and that require a gradient."""
        groups = (group for entry in self.optimizers for group in entry.get("groups", ()))
        held = self._own(name for group in groups for name in group.get("parameters", ()))
        return set(held) - set(self.named("frozen"))

    @cached_property
    def without_gradient(self) -> list[str]:
        """Those of them that never had one, in as many steps as tell."""
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
        others = {name for name in self.trained if _owner(name) == module}
        if name in self.trained and (not module or others - set(self.without_gradient)):
            return False
        norms = self.of_module("param_norm", module)
        return not norms or any(self.of_module("update_ratio", module)) or len(set(norms)) > 1

    def is_called(self, name: str) -> bool:
        """Return whether the module that owns a parameter may have run."""
        return self.called is None or _owner(name) in self.called

    def _own(self, names: Iterable[str]) -> list[str]:
        prefix = f"{self.model}:"
        return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def broken_laws(facts: TrainingFacts) -> list[str]:
    """Return a sentence for each law that a training breaks.

    If nothing trains at all, only why.
    """
    whole = next(filter(None, (law(facts) for law in WHOLE_MODEL.values())), None)
    if whole is not None:
        return [whole]
    return [sentence for law in PARTS.values() if (sentence := law(facts)) is not None]


# -- nothing trains
# --------------------------------------------------------------------------------------------------


def _scaler_steps(facts: TrainingFacts) -> str | None:
    if not _are_all(facts.total("skipped"), 1.0):
        return None
    count = len(facts.total("skipped"))
    return (
        f"the gradient scaler skips every step, all {count}: nothing is trained. The gradients "
        "have NaN or Inf each time, or the loss scale is far too high"
    )


def _learning_rate_is_positive(facts: TrainingFacts) -> str | None:
    rates = [
        list(series.values)
        for label, series in facts.training.totals(facts.model).items()
        if split_label(label).quantity == "lr"
    ]
    if not rates or not all(_are_all(values, 0.0) for values in rates):
        return None
    return f"the learning rate is 0 in every step, all {len(rates[0])}: nothing is trained"


def _gradients_exist(facts: TrainingFacts) -> str | None:
    idle = set(facts.without_gradient)
    if not facts.trained or not facts.trained <= idle or any(facts.total("grad_norm")):
        return None
    if any(facts.total("update_ratio")):
        return None
    return (
        "no parameter has a gradient in any step, and none changes: the loss does not depend on "
        "them, as after detach() or under no_grad(), or the gradients are cleared before the step"
    )


def _gradients_are_not_zero(facts: TrainingFacts) -> str | None:
    norms = facts.total("grad_norm")
    if not _are_all(norms, 0.0):
        return None
    return f"the gradients of all parameters are 0 in every step, all {len(norms)}"


def _optimizer_holds_the_model(facts: TrainingFacts) -> str | None:
    holders = [entry for entry in facts.optimizers if entry.get("copies")]
    if not holders or len(holders) < len(facts.optimizers) or _trains(facts):
        return None
    return (
        f"the optimizer ({holders[0].get('class')}) holds other parameters than the model, and "
        "none of the model's changes: they were replaced after it was made, or what it computes "
        "is not copied back"
    )


def _parameters_change(facts: TrainingFacts) -> str | None:
    if _trains(facts):
        return None
    steps = len(facts.total("update_ratio"))
    return (
        f"no parameter changes in any of the {steps} steps looked at: what the optimizer adds is 0 "
        "or below the rounding of the parameters"
    )


def _trains(facts: TrainingFacts) -> bool:
    """Return whether the parameters change, or too little is known."""
    return not _are_all(facts.total("update_ratio"), 0.0)


def _are_all(values: list[float], number: float) -> bool:
    return len(values) >= FEWEST_STEPS and all(value == number for value in values)


# -- a part does not train
# --------------------------------------------------------------------------------------------------


def _gradients_reach_every_part(facts: TrainingFacts) -> str | None:
    idle = [
        name
        for name in facts.without_gradient
        if name in facts.trained and facts.is_called(name) and not facts.may_change(name)
    ]
    if not idle:
        return None
    return f"no gradient reaches {_owners(idle)}, in any step: no change there"


def _optimizers_hold_every_part(facts: TrainingFacts) -> str | None:
    unheld = [name for name in facts.named("unused_gradients") if not facts.may_change(name)]
    if not unheld:
        return None
    return f"no optimizer holds {_owners(unheld)}, although gradients reach it: no change there"


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _owners(names: list[str]) -> str:
    """Return what owns parameters: the modules, and the parameters that the model itself has.

    >>> _owners(["fc.weight", "fc.bias", "gain"])
    '`fc` and `gain`'
    """
    owners = list(dict.fromkeys(_owner(name) or name for name in names))
    shown = [f"`{owner}`" for owner in owners[:_MAX_NAMES]]
    if len(owners) > _MAX_NAMES:
        shown.append(f"{plural(len(owners) - _MAX_NAMES, 'further module')}")
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if shown[1:] else shown)


Law = Callable[[TrainingFacts], str | None]

# by name, the surest first
WHOLE_MODEL: dict[str, Law] = {
    "the scaler lets steps through": _scaler_steps,
    "the learning rate is not 0": _learning_rate_is_positive,
    "the loss has gradients": _gradients_exist,
    "gradients are not all 0": _gradients_are_not_zero,
    "the optimizer holds the model": _optimizer_holds_the_model,
    "parameters change": _parameters_change,
}
PARTS: dict[str, Law] = {
    "gradients reach every part": _gradients_reach_every_part,
    "an optimizer holds every part": _optimizers_hold_every_part,
}
