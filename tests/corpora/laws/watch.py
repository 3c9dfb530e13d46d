"""Sees with hooks of its own which law a training breaks, while nothing of the product runs: the proof
that each program of the corpus has its defect, and no other.

It reads every value in the process, so that each law is a line or two here. What follows from a
broken law is left out by the order of `Watch.laws`: where no parameter changes, no part does.
"""

from __future__ import annotations

import re
from collections import defaultdict
from contextlib import ExitStack
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

MODE_DEPENDENT = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)


class Parameter:
    """What one parameter went through."""

    def __init__(self, name: str, value: Tensor) -> None:
        self.name, self.value = name, value
        self.start = value.detach().clone()
        self.gradients: list[
            str
        ] = []  # after each backward pass, before each step: none, zero, some
        self.last_gradient: Tensor | None = None
        self.used_gradients = False  # a step was made with some
        self.differentiable = False  # a forward with gradients used it
        self.held = self.cleared_since_update = False
        self.updates = self.updates_without_clearing = 0
        self.previous, self.updates_without_change = self.start, 0

    def gradient(self) -> str:
        gradient = self.value.grad
        if gradient is None:
            return "none"
        gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
        return "some" if gradient.isnan().any() or gradient.any() else "zero"

    def compare(self) -> None:
        """Count the updates since its last change."""
        is_same = torch.equal(self.previous, self.value.detach())
        self.updates_without_change = self.updates_without_change + 1 if is_same else 0
        self.previous = self.value.detach().clone()

    @property
    def has_gradients(self) -> bool:
        return "some" in self.gradients

    @property
    def changed(self) -> bool:
        return not torch.equal(self.start, self.value.detach())


class Call:
    """One call of a module that no other module called."""

    def __init__(self, module: nn.Module, inputs: list[Tensor]) -> None:
        self.module, self.inputs = module, [value.detach().clone() for value in inputs]
        self.with_gradients = torch.is_grad_enabled()
        # the same tensor as in other steps, and all of it: the training has no other data
        self.source = [(x.data_ptr(), x.untyped_storage().nbytes() - x.nbytes) for x in inputs]
        dependent = [m for m in module.modules() if isinstance(m, MODE_DEPENDENT) and matters(m)]
        self.modes = {m.training for m in dependent}


def matters(module: nn.Module) -> bool:
    """Return whether a module's mode matters to a training: its parameters train, or it drops."""
    parameters = list(module.parameters())
    return any(p.requires_grad for p in parameters) if parameters else module.p > 0


def varying(inputs: list[Tensor]) -> list[int]:
    """Return the places of inputs that are not one number alone."""
    return [i for i, x in enumerate(inputs) if bool((x != x.flatten()[0]).any())]


def digest(values: list[Tensor]) -> str:
    return str([(list(x.shape), x.double().sum().item(), x.double().std().item()) for x in values])


class Watch:
    """Watches all trainings of a block; afterwards `laws()` says what they broke."""

    def __init__(self) -> None:
        self.events = ""  # z all cleared, b backward, c clip, s step, k skipped step
        self.calls: list[Call] = []
        self.parameters: dict[int, Parameter] = {}
        self.statistics: dict[nn.Module, Tensor] = {}
        self.optimizers: dict[int, Optimizer] = {}
        self.rates: list[float] = []
        self.held_gradients = self.scaler_steps = self.depth = 0
        self.own: set[int] = set()  # the parameters of modules that ran
        self.holds_own = False
        self.scheduled: dict[LRScheduler, int] = {}
        self.scheduled_early: list[str] = []
        self.loaded_weights: Any = None
        self.loaded_optimizer: Any = None
        self.lost: set[str] = set()
        self.step_gradients: list[str] = []
        self._stack = ExitStack()

    def __enter__(self) -> Watch:
        enter = self._stack.enter_context
        watched = [
            (nn.Module, "__call__", self.call),
            (Tensor, "backward", self.backward),
            (torch.amp.GradScaler, "step", self.scaler_step),
            (torch, "load", self.load),
            (LRScheduler, "_initial_step", self.schedule_made),
        ]
        for place in (nn.utils, nn.utils.clip_grad):
            watched += [(place, f"clip_grad_{kind}_", self.clip) for kind in ("norm", "value")]
        kinds = [LRScheduler, *LRScheduler.__subclasses__()]
        watched += [(kind, "step", self.schedule) for kind in kinds if "step" in vars(kind)]
        for holder, name, replacement in watched:
            enter(patch.object(holder, name, self.around(getattr(holder, name), replacement)))
        for handle in (
            register_optimizer_step_pre_hook(self.before_step),
            register_optimizer_step_post_hook(self.after_step),
        ):
            self._stack.callback(handle.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @staticmethod
    def around(original: Any, replacement: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        return run

    # ---- what happens

    def call(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        values = [*args, *(value for name, value in kwargs.items() if name != "labels")]
        inputs = [value for value in values if isinstance(value, Tensor)]
        root = self.depth == 0 and not isinstance(module, nn.modules.loss._Loss)
        compiled = torch.compiler.is_compiling() or any(map(is_functorch_wrapped_tensor, inputs))
        if root and not compiled:
            self.calls.append(Call(module, inputs))
        for name, parameter in module.named_parameters(recurse=root):
            self.own.add(id(parameter))
            if not parameter.requires_grad or not parameter.is_leaf:
                continue
            if id(parameter) not in self.parameters:
                place = f"{type(module).__name__}:{name}"
                self.parameters[id(parameter)] = Parameter(place, parameter)
            self.parameters[id(parameter)].differentiable |= torch.is_grad_enabled()
        if torch.is_grad_enabled():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and matters(module):
                self.statistics.setdefault(module, module.running_mean.clone())
            if root and self.loaded_weights is not None:
                self.compare_loaded(module)
        self.depth += 1
        try:
            return original(module, *args, **kwargs)
        finally:
            self.depth -= 1

    def backward(self, original: Any, *args: Any, **kwargs: Any) -> None:
        for parameter in self.parameters.values():
            if parameter.gradient() != "some":
                parameter.cleared_since_update = True
        if all(parameter.gradient() != "some" for parameter in self.parameters.values()):
            self.events += "z"
        original(*args, **kwargs)
        self.events += "b"
        for parameter in self.parameters.values():
            parameter.gradients.append(parameter.gradient())

    def clip(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.events += "c"
        return original(*args, **kwargs)

    def scaler_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.scaler_steps += 1
        before = self.events
        result = original(*args, **kwargs)
        if self.events == before:
            self.events += "k"
        return result

    def load(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = original(*args, **kwargs)
        if not isinstance(loaded, dict):  # a whole model brings no weights for another one
            return loaded
        self.loaded_weights = loaded.get("net", loaded)
        self.loaded_optimizer = loaded.get("optimizer")
        return loaded

    def schedule_made(self, original: Any, scheduler: LRScheduler) -> None:
        early = list(self.scheduled_early)
        original(scheduler)
        self.scheduled_early = early
        self.scheduled[scheduler] = 0

    def schedule(self, original: Any, scheduler: LRScheduler, *args: Any, **kwargs: Any) -> None:
        optimizer = getattr(scheduler.optimizer, "optimizer", scheduler.optimizer)  # accelerate's
        if id(optimizer) not in self.optimizers:
            self.scheduled_early.append(type(scheduler).__name__)
        self.scheduled[scheduler] = self.scheduled.get(scheduler, 0) + 1
        original(scheduler, *args, **kwargs)

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self.loaded_optimizer is not None:
            if self.loaded_optimizer["state"] and not optimizer.state:
                self.lost.add("optimizer")
            self.loaded_optimizer = None
        self.optimizers[id(optimizer)] = optimizer
        self.rates += [float(group["lr"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            for value in group["params"]:
                self.held_gradients += value.grad is not None
                self.holds_own |= id(value) in self.own
                if value.requires_grad and id(value) not in self.parameters:
                    self.parameters[id(value)] = Parameter("no module's", value)
                if parameter := self.parameters.get(id(value)):
                    parameter.held = True
                    if value.grad is not parameter.last_gradient:  # set by hand
                        parameter.cleared_since_update = True
                    parameter.last_gradient = value.grad
                    parameter.gradients.append(parameter.gradient())
                    parameter.used_gradients |= parameter.gradients[-1] == "some"
                    if parameter.updates and not parameter.cleared_since_update:
                        parameter.updates_without_clearing += 1
                    parameter.updates += 1
                    parameter.compare()
                    parameter.cleared_since_update = False
        gradients = [p.value.grad for p in self.parameters.values()]
        self.step_gradients.append(digest([g.to_dense() for g in gradients if g is not None]))

    def after_step(self, *_: Any) -> None:
        self.events += "s"

    def compare_loaded(self, module: nn.Module) -> None:
        saved, self.loaded_weights = self.loaded_weights, None
        mine = module.state_dict()
        common = [k for k in saved if k in mine and saved[k].shape == mine[k].shape]
        if not any(torch.equal(saved[k], mine[k]) for k in common if mine[k].ndim > 1):
            self.lost.add("weights")

    # ---- what it means

    def trained(self) -> list[Parameter]:
        return [p for p in self.parameters.values() if p.value.requires_grad and p.gradients]

    def training_calls(self) -> list[Call]:
        held = {id(p.value) for p in self.trained() if p.has_gradients}
        return [
            c
            for c in self.calls
            if c.with_gradients and any(id(p) in held for p in c.module.parameters())
        ]

    def laws(self) -> dict[str, str]:
        """Return the laws that are broken, each with what shows it."""
        trained, events = self.trained(), self.events
        gradients = {g for p in trained for g in p.gradients}
        whole = {
            "every_step_skipped": self.scaler_steps and "s" not in events,
            "learning_rate_zero": self.rates and not any(self.rates),
            "no_gradients": gradients == {"none"} and "b" in events,
            "gradients_zero": "zero" in gradients and "some" not in gradients,
            "optimizer_holds_others": "s" in events
            and not self.held_gradients
            and not self.holds_own,
            "rounded_away": [p.name for p in trained if self.is_rounded_away(p)],
            "nothing_changes": "some" in gradients
            and (not any(p.changed for p in trained) or self.has_stopped()),
        }
        for law, shown in whole.items():
            if shown:
                return {law: str(shown)}
        ignored = self.ignores_inputs()
        parts = {
            "loss_ignores_inputs": ignored,
            "no_gradient": not ignored and self.without_gradient(),
            "not_held": [
                p.name for p in trained if p.has_gradients and not p.held and not p.changed
            ],
            "never_changes": [
                p.name for p in trained if p.used_gradients and p.held and not p.changed
            ],
            "optimizer_remade": len(self.optimizers) >= 5
            and len(self.optimizers) == events.count("s"),
            "gradients_not_cleared": [
                p.name for p in trained if p.updates_without_clearing > max(2, p.updates // 2)
            ],
            "clipped_after_step": "sc" in events,
            "clipped_early": re.search("b[^skz]*c[^skz]*b", events),
            "eval_while_training": self.is_eval(),
            "train_while_evaluating": self.evaluates_in_train_mode(),
            "scheduler_never_stepped": [
                type(s).__name__ for s, n in self.scheduled.items() if not n
            ],
            "scheduler_before_optimizer": self.scheduled_early,
            "same_batch": not ignored and self.is_same_batch(),
            "weights_parted": self.parted(),
            "batch_norm_still": not self.is_eval() and self.still_statistics(),
            "state_not_continued": sorted(self.lost),
        }
        return {law: str(shown) for law, shown in parts.items() if shown}

    def has_stopped(self) -> bool:
        """Whether nothing has changed in more than half of the updates, up to the last."""
        held = [p for p in self.trained() if p.held]
        return bool(held) and all(2 * p.updates_without_change > max(p.updates, 6) for p in held)

    def is_rounded_away(self, parameter: Parameter) -> bool:
        if parameter.value.dtype != torch.bfloat16 or parameter.value.ndim < 2:
            return False
        kept = (parameter.start == parameter.value).float().mean()
        return parameter.has_gradients and bool(kept > 0.9)

    def without_gradient(self) -> list[str]:
        """Names of what gets no gradient though its model trains; 0 from a dead unit counts, too."""
        return [p.name for p in self.trained() if p.differentiable and not p.has_gradients]

    def is_eval(self) -> bool:
        calls = self.training_calls()
        return bool(calls) and calls[-1].modes == {False}

    def evaluates_in_train_mode(self) -> bool:
        trained = {id(call.module) for call in self.training_calls()}
        return any(
            call.modes == {True}
            for call in self.calls
            if id(call.module) in trained and not call.with_gradients
        )

    def is_same_batch(self) -> bool:
        by_module = defaultdict(list)
        for call in self.training_calls():
            by_module[id(call.module)].append(call)
        for calls in by_module.values():
            whole = all(left == 0 for call in calls for _, left in call.source[:1])
            if len({str(call.source) for call in calls}) == 1 and whole:
                continue
            # it comes again from elsewhere: what is reused on purpose lies in the same place
            again = [
                digest(a.inputs) == digest(b.inputs) and a.source != b.source
                for a, b in pairwise(calls)
            ]
            alike = len({digest(call.inputs) for call in calls}) == 1
            if len(calls) > 4 and (alike or 2 * sum(again) >= len(again)):
                return True
        return False

    def ignores_inputs(self) -> bool:
        calls = self.training_calls()
        if not calls:
            return False
        if not any(varying(call.inputs) for call in calls):
            return True
        module, inputs = calls[-1].module.eval(), calls[-1].inputs
        changed = list(inputs)
        for place in varying(inputs)[:1]:
            value = inputs[place]
            changed[place] = torch.randn_like(value) if value.is_floating_point() else value.roll(1)
        try:
            with torch.no_grad():
                outputs = [module(*values) for values in (inputs, changed)]
        except Exception:  # what else the call needs is not kept
            return False
        tensors = [getattr(output, "logits", output) for output in outputs]
        tensors = [next(iter(v.values())) if type(v) is dict else v for v in tensors]
        tensors = [value[0] if isinstance(value, tuple) else value for value in tensors]
        rows = tensors[0]  # all alike is found equal here, though batches differ
        alike = rows.ndim > 1 and len(rows) > 1 and torch.equal(rows, rows[:1].expand_as(rows))
        return alike or torch.equal(*tensors)

    def parted(self) -> list[str]:
        matrices = [
            p
            for p in self.trained()
            if p.differentiable and p.value.ndim == 2 and p.start.std() > 0
        ]
        return [
            f"{a.name} and {b.name}"
            for i, a in enumerate(matrices)
            for b in matrices[:i]
            if a.start.shape == b.start.shape
            and torch.equal(a.start, b.start)
            and not torch.equal(a.value, b.value)
            and a.held
            and b.held
        ]

    def still_statistics(self) -> bool:
        return any(torch.equal(start, m.running_mean) for m, start in self.statistics.items())

    def rank_facts(self) -> dict[str, Any]:
        """Return what must be alike on all ranks, and what must not."""
        averaged = self.trained()
        return {
            "start": digest([p.start for p in averaged]),
            "end": digest([p.value.detach() for p in averaged]),
            "gradients": self.step_gradients,
            "batches": [digest(call.inputs) for call in self.training_calls()],
        }


def laws_of_ranks(ranks: list[dict[str, Any]]) -> dict[str, str]:
    """Return the laws that ranks break together."""
    first, second = ranks
    apart = {name: first[name] != second[name] for name in first}
    laws = {
        "same_batch_on_ranks": not apart["batches"],
        "gradients_not_averaged": apart["gradients"],
        "replicas_differ": not apart["gradients"] and apart["end"],
    }
    return {law: "" for law, broken in laws.items() if broken}
