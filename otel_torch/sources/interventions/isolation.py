"""Runs every module of a port on the reference's inputs, and passes on the reference's outputs.

One wrong module makes all modules after it wrong. With OTEL_TORCH_ISOLATE errors do not propagate,
so that each recorded difference was made in the module where it is recorded. A call `y = a(x)`

1. records the port's x,
2. computes a of the reference's x,
3. records the result,
4. returns the reference's y.

Steps 1 and 3 are those of the observer. `_InputHook` is inside of it, `_OutputHook` outside.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from otel_torch.process.console import say, say_once
from otel_torch.recording.isolation_pairing import Pairing, Slot
from otel_torch.recording.tensor_files import StoredTensor, TensorFolder, tensor_key
from otel_torch.session import Session
from otel_torch.sources.events import RunEvents
from otel_torch.sources.interventions.conform_tensor import CannotConform, conform
from otel_torch.sources.models.model import Model, ModuleSite
from otel_torch.sources.modules import call_stack
from otel_torch.sources.modules.hooks import ModuleHookManager, SessionHook, has_hook, remove_hooks
from otel_torch.sources.modules.module_dict import ModuleDict
from otel_torch.sources.source import Source
from otel_torch.sources.tensors.values import walk
from otel_torch.torch_private import unobserved

# why a tensor was not replaced, for reports
REASONS = {
    "unpaired": "have no counterpart",
    "unrecorded": "are not among the reference's tensors",
    "shape": "have another shape there",
    "dtype": "have another kind of dtype there",
    "distributed": "are distributed",
    "structure": "are in a container that cannot be rebuilt",
    "error": "could not be replaced",
}


class CallKey(Protocol):
    """What identifies a call of a module in a recording."""

    model: str
    module: str
    loop: int
    step: int
    call: int
    phase: str


@dataclass(slots=True)
class _EnteredCall:
    """A call whose inputs were replaced. depth: length of the thread's call stack."""

    site: ModuleSite
    call: CallKey
    depth: int


class _CallStack(threading.local):
    """The entered calls of this thread, outermost first."""

    def __init__(self) -> None:
        self.calls: list[_EnteredCall] = []


class _ReplaceValues(torch.autograd.Function):
    """Replaces a tensor's values; gradients flow to the port's tensor."""

    @staticmethod
    @unobserved
    def forward(context: Any, port: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        return reference.view_as(reference)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _InputHook(SessionHook):
    """Replaces the inputs of a module, after its observer has recorded them."""

    hook_name = "otel_torch.isolation.inputs"

    def __init__(self, isolation: Isolation, site: ModuleSite) -> None:
        self._isolation, self._site = isolation, site

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if torch.compiler.is_compiling():
            return args, kwargs
        return self._isolation.replace_inputs(self._site, args, kwargs)


class _OutputHook(SessionHook):
    """Replaces the output of a module, after its observer has recorded it."""

    hook_name = "otel_torch.isolation.outputs"

    def __init__(self, isolation: Isolation, site: ModuleSite) -> None:
        self._isolation, self._site = isolation, site

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if torch.compiler.is_compiling():
            return output
        return self._isolation.replace_output(self._site, output)


class Isolation(Source):
    """Replaces the values of a port's observed modules by those of the reference.

    `folder` has the reference's whole tensors and the pairing. `session` has the rank, known when
    the first model runs. `current_call(site)` returns the current call of a site, None if it is not
    observed. If the folder cannot be used, this is reported in one line and nothing is replaced.
    """

    def __init__(
        self,
        folder: str,
        session: Session,
        current_call: Callable[[ModuleSite], CallKey | None],
        events: RunEvents,
    ) -> None:
        self._folder, self._session, self._current_call = folder, session, current_call
        self._stack = _CallStack()
        self._attached: ModuleDict[bool] = ModuleDict()
        self._pairing: Pairing | None = None
        self._tensors: TensorFolder | None = None
        self._ready: bool | None = None  # None until the folder was opened
        self._replaced: Counter[str] = Counter()  # "input", "output"
        self._unreplaced: dict[Slot, str] = {}  # the reason, a key of REASONS
        self._of_unrecorded_steps = 0  # tensors of steps that the reference does not have
        self._lock = threading.Lock()
        events.compiled_call.append(self._on_compiled_call)

    # -- attaching

    def attach_around(self, model: Model, sites: list[ModuleSite]) -> None:
        """Attach the hooks that replace outputs. Call this before observers are attached."""
        if self._is_ready():
            self._attach(model, sites, _OutputHook)

    def attach_within(self, model: Model, sites: list[ModuleSite]) -> None:
        """Attach the hooks that replace inputs.

        Call this after observers are attached, and before hooks that change what a module computes.
        """
        if self._is_ready():
            self._attach(model, sites, _InputHook)

    def _attach(
        self, model: Model, sites: list[ModuleSite], hook: type[_InputHook] | type[_OutputHook]
    ) -> None:
        for site in sites:
            module = site.module()
            if module is None or not site.names or has_hook(module, hook.name()):
                continue
            try:
                ModuleHookManager.get_from_or_default(module).append_forward_hook(hook(self, site))
                self._attached[module] = True
            except Exception as error:
                say_once(
                    f"{model.name}: {type(module).__name__} takes no hook and is not isolated "
                    f"({type(error).__name__}: {error})"
                )

    def _is_ready(self) -> bool:
        """Open the folder at the first call; return whether it can be used."""
        if self._ready is None:
            try:
                self._pairing = Pairing.load(self._folder)
                self._tensors = TensorFolder(self._folder, self._session.job.rank)
                self._ready = True
                say_once(
                    f"OTEL_TORCH_ISOLATE={self._folder}: modules compute from the reference's "
                    "values instead of their own"
                )
            except (ValueError, OSError) as error:
                self._ready = False
                say(f"OTEL_TORCH_ISOLATE: {error}. Nothing is isolated")
        return self._ready

    def uninstall(self) -> None:
        remove_hooks(self._attached, _InputHook.name(), _OutputHook.name())
        self._attached.clear()

    # -- replacing

    def replace_inputs(
        self, site: ModuleSite, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for forward. Never raises."""
        try:
            calls, depth = self._stack.calls, len(call_stack.current())
            while calls and calls[-1].depth >= depth:
                calls.pop()  # its forward raised
            call = self._current_call(site)
            if call is None:
                return args, kwargs
            calls.append(_EnteredCall(site, call, depth))
            new_args = tuple(
                self._replace_tensors(call, f"in[{index}]", value)
                for index, value in enumerate(args)
            )
            new_kwargs = {
                key: self._replace_tensors(call, f"in.{key}", value)
                for key, value in kwargs.items()
            }
            return new_args, new_kwargs
        except Exception as error:
            self._report_failed_call(site, error)
            return args, kwargs

    def replace_output(self, site: ModuleSite, output: Any) -> Any:
        """Return the output for the caller. Never raises."""
        try:
            calls, depth = self._stack.calls, len(call_stack.current())
            while calls and calls[-1].depth > depth:
                calls.pop()  # its forward raised
            if calls and calls[-1].site is site and calls[-1].depth == depth:
                return self._replace_tensors(calls.pop().call, "out", output)
        except Exception as error:
            self._report_failed_call(site, error)
        return output

    def _replace_tensors(self, call: CallKey, label: str, value: Any) -> Any:
        """Return the value with the reference's tensors, as far as they are known."""

        def replace(label: str, port: torch.Tensor) -> torch.Tensor:
            slot = call.model, call.module, label
            try:
                tensor = self._replacement(call, slot, port)
            except CannotConform as reason:
                self._count_unreplaced(slot, str(reason))
                return port
            except Exception as error:
                self._count_unreplaced(slot, "error")
                say_once(
                    f"{call.model}: a tensor could not be replaced: {type(error).__name__}: {error}"
                )
                return port
            with self._lock:
                self._replaced["input" if label.startswith("in") else "output"] += 1
            return tensor

        def refuse(label: str) -> None:
            self._count_unreplaced((call.model, call.module, label), "structure")

        return rebuilt(value, label, replace, refuse) if walk(value, label) else value

    def _replacement(self, call: CallKey, slot: Slot, port: torch.Tensor) -> torch.Tensor:
        """Return the reference's tensor; raise CannotConform with the reason if there is none."""
        assert self._pairing is not None and self._tensors is not None
        partner = self._pairing.partner(slot, call.loop, call.step, call.call)
        if partner is None:
            raise CannotConform("unpaired")
        if hasattr(port, "to_local"):
            raise CannotConform("distributed")
        (model, module, tensor), (loop, step, number) = partner
        if not self._tensors.has(loop, step):
            raise CannotConform("step")
        key = tensor_key(model, module, tensor, number, call.phase)
        stored = self._tensors.find(loop, step, key)
        if stored is None:
            raise CannotConform("unrecorded")
        reference = _read_conformed(stored, port)
        if port.requires_grad and torch.is_grad_enabled():
            return _ReplaceValues.apply(port, reference)  # type: ignore[no-any-return]
        return reference

    # -- reporting

    def _on_compiled_call(self, site: ModuleSite) -> None:
        """Report that a module runs in a compiled graph, where no value can be replaced."""
        if self._ready:
            say_once(
                f"{site.model.name}: compiled code is not isolated; "
                "set TORCHDYNAMO_DISABLE=1 to run it eagerly"
            )

    def _count_unreplaced(self, slot: Slot, reason: str) -> None:
        with self._lock:
            if reason == "step":  # a warm-up step, which is not compared: no fault of the slot
                self._of_unrecorded_steps += 1
            else:
                self._unreplaced.setdefault(slot, reason)

    def _report_failed_call(self, site: ModuleSite, error: Exception) -> None:
        say_once(f"{site.model.name}: a call was not isolated: {type(error).__name__}: {error}")
        self._count_unreplaced((site.model.name, site.name, ""), "error")

    def describe(self) -> dict[str, Any]:
        """Return the metadata: counts of replaced tensors, and what was not replaced and why."""
        with self._lock:
            return {
                "inputs": self._replaced["input"],
                "outputs": self._replaced["output"],
                "outside": self._of_unrecorded_steps,
                "stayed": [[*slot, reason] for slot, reason in self._unreplaced.items()],
            }

    def finish(self) -> None:
        """Report how much was isolated, and what was not."""
        if not self._ready:
            return
        inputs, outputs = self._replaced["input"], self._replaced["output"]
        line = f"{inputs} inputs and {outputs} outputs were replaced by the reference's"
        if self._of_unrecorded_steps:
            line += f", {self._of_unrecorded_steps} tensors are of steps that it does not have"
        reasons = Counter(self._unreplaced.values()).most_common()
        if reasons:
            model, module, tensor = next(
                slot for slot, reason in self._unreplaced.items() if reason == reasons[0][0]
            )
            counts = [f"{count} {REASONS.get(reason, reason)}" for reason, count in reasons]
            line += f"; not replaced: {', '.join(counts)} (for example {module or model} {tensor})"
        say(f"OTEL_TORCH_ISOLATE: {line}")


def rebuilt(
    value: Any,
    label: str,
    replace: Callable[[str, torch.Tensor], torch.Tensor],
    refuse: Callable[[str], None],
) -> Any:
    """Return the value with `replace(label, tensor)` in place of each tensor.

    Labels are those of `values.walk`. Tuples, lists, dicts and dataclasses are rebuilt. For any
    other container of tensors `refuse(label)` is called, and it stays as it is.

    >>> rebuilt([(torch.zeros(1),)], "out", lambda label, tensor: tensor + 1, print)
    [(tensor([1.]),)]
    """
    if isinstance(value, torch.Tensor):
        return replace(label, value)
    if not walk(value, label):
        return value
    kind = type(value)
    names = getattr(kind, "_fields", ())
    if issubclass(kind, tuple) and len(names) == len(value):
        pairs = zip(names, value, strict=True)
        return kind(*(rebuilt(item, f"{label}.{name}", replace, refuse) for name, item in pairs))
    if kind in (tuple, list):
        return kind(
            rebuilt(item, f"{label}[{index}]", replace, refuse) for index, item in enumerate(value)
        )
    try:
        if isinstance(value, Mapping):
            copied: Any = value.copy()  # type: ignore[attr-defined]
            for key, item in value.items():
                copied[key] = rebuilt(item, f"{label}.{key}", replace, refuse)
            return copied
        if is_dataclass(value):
            copied = copy.copy(value)
            for field in fields(value):
                item = getattr(value, field.name)
                new_item = rebuilt(item, f"{label}.{field.name}", replace, refuse)
                object.__setattr__(copied, field.name, new_item)
            return copied
    except Exception:
        pass
    refuse(label)
    return value


@functools.lru_cache(maxsize=4)  # the file of a step, and of its neighbors
def _opened(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="pt")


@unobserved
def _read_conformed(stored: StoredTensor, port: torch.Tensor) -> torch.Tensor:
    """Read the reference's tensor, with the shape, dtype and device of `port`.

    Raises CannotConform if it is a tensor of another kind.
    """
    return conform(_opened(stored.path).get_tensor(stored.key), port)
