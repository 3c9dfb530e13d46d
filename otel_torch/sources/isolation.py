"""Every module of a port computes from the reference's inputs, and what it hands on is the
reference's output.

One wrong module makes all after it wrong. Here nothing is inherited: what a module is about to be
given is recorded and then put right, what it returns is recorded and then put right, so that each
recorded error was made where it is seen.
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
from torch.utils.weak import WeakIdKeyDictionary

from otel_torch.console import say, say_once
from otel_torch.recording.isolation_pairing import Pairing, Slot
from otel_torch.recording.tensor_files import StoredTensor, TensorFolder, tensor_key
from otel_torch.session import Session
from otel_torch.sources import modules
from otel_torch.sources.conform_tensor import Stays, fitted
from otel_torch.sources.events import RunEvents
from otel_torch.sources.hooks import ForwardHook, ModuleHookManager, remove_hooks
from otel_torch.sources.modules import Model, ModuleSite
from otel_torch.sources.source import Source
from otel_torch.sources.values import walk
from otel_torch.torch_private import unobserved

# why a tensor stayed as it was, in words
_REASONS = {
    "unpaired": "have no counterpart",
    "unrecorded": "are not among the reference's tensors",
    "shape": "have another shape there",
    "dtype": "are of another kind there",
    "distributed": "are distributed",
    "structure": "lie in something that cannot be taken apart",
    "error": "could not be put right",
}


class Call(Protocol):
    """Which call of a module is going on."""

    model: str
    module: str
    loop: int
    step: int
    call: int
    phase: str


@dataclass(slots=True)
class _Entered:
    site: ModuleSite
    call: Call
    depth: int


class _Open(threading.local):
    """The calls that this thread is in, outermost first."""

    def __init__(self) -> None:
        self.calls: list[_Entered] = []


class _PutRight(torch.autograd.Function):
    """The reference's numbers in place of the port's; gradients go on to where the port's came
    from.
    """

    @staticmethod
    def forward(context: Any, own: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return right.view_as(right)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _Inputs(ForwardHook):
    """Puts right what is handed to a module, once its observer has seen what that was."""

    def __init__(self, isolation: Isolation, site: ModuleSite) -> None:
        self._isolation, self._site = isolation, site

    @classmethod
    def name(cls) -> str:
        return "otel_torch.isolation.inputs"

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if torch.compiler.is_compiling():
            return args, kwargs
        return self._isolation.entered(self._site, args, kwargs)


class _Outputs(ForwardHook):
    """Puts right what a module hands on, once its observer has seen what that was."""

    def __init__(self, isolation: Isolation, site: ModuleSite) -> None:
        self._isolation, self._site = isolation, site

    @classmethod
    def name(cls) -> str:
        return "otel_torch.isolation.outputs"

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if torch.compiler.is_compiling():
            return output
        return self._isolation.left(self._site, output)


class Isolation(Source):
    """Feeds the observed modules of a port.

    `folder` has the reference's whole tensors and the pairing. `session` has the rank, known when
    the first model runs. `current_call(site)` returns the current call of a site, None if it is not
    observed. If the folder cannot be used, this is reported in one line and nothing is fed.
    """

    def __init__(
        self,
        folder: str,
        session: Session,
        current_call: Callable[[ModuleSite], Call | None],
        events: RunEvents,
    ) -> None:
        self._folder, self._session, self._current_call = folder, session, current_call
        self._open = _Open()
        self._attached: Any = WeakIdKeyDictionary()
        self._pairing: Pairing | None = None
        self._tensors: TensorFolder | None = None
        self._ready: bool | None = None
        self._fed: Counter[str] = Counter()
        self._stayed: dict[Slot, str] = {}
        self._outside = 0  # tensors of steps that the reference does not have
        self._lock = threading.Lock()
        events.compiled_call.append(self._on_compiled_call)

    # -- attaching
    # ----------------------------------------------------------------------------------------------

    def attach_around(self, model: Model, sites: list[ModuleSite]) -> None:
        """To be called before the observers are attached: what is put right after them must be
        outside of them.
        """
        if self._is_ready():
            self._attach(model, sites, _Outputs)

    def attach_within(self, model: Model, sites: list[ModuleSite]) -> None:
        """To be called after the observers were attached, and before anything that changes what a
        module computes.
        """
        if self._is_ready():
            self._attach(model, sites, _Inputs)

    def _attach(
        self, model: Model, sites: list[ModuleSite], hook: type[_Inputs] | type[_Outputs]
    ) -> None:
        for site in sites:
            module = site.module()
            if module is None or not site.names:
                continue
            try:
                ModuleHookManager.get_from_or_default(module).append_forward_hook(hook(self, site))
                self._attached[module] = True
            except Exception as error:
                say_once(
                    f"{model.name}: {type(module).__name__} takes no hook and is not isolated ({type(error).__name__}: {error})"
                )

    def _is_ready(self) -> bool:
        if self._ready is None:
            try:
                self._pairing = Pairing.load(self._folder)
                self._tensors = TensorFolder(self._folder, self._session.job.rank)
                self._ready = True
                say_once(
                    f"OTEL_TORCH_ISOLATE={self._folder}: modules compute from the reference's values, not from their own"
                )
            except (ValueError, OSError) as error:
                self._ready = False
                say(f"OTEL_TORCH_ISOLATE: {error}. Nothing is isolated")
        return self._ready

    def uninstall(self) -> None:
        """Take the hooks off again."""
        remove_hooks(self._attached, _Inputs.name(), _Outputs.name())
        self._attached.clear()

    # -- calls
    # ----------------------------------------------------------------------------------------------

    def entered(
        self, site: ModuleSite, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the module is to be given instead."""
        try:
            calls, depth = self._open.calls, len(modules.call_stack())
            while calls and calls[-1].depth >= depth:
                calls.pop()  # that one's forward raised
            call = self._current_call(site)
            if call is None:
                return args, kwargs
            calls.append(_Entered(site, call, depth))
            right = tuple(
                self._put_right(call, f"in[{index}]", value) for index, value in enumerate(args)
            )
            return right, {
                key: self._put_right(call, f"in.{key}", value) for key, value in kwargs.items()
            }
        except Exception as error:
            self._failed(site, error)
            return args, kwargs

    def left(self, site: ModuleSite, output: Any) -> Any:
        """What the module is to hand on instead."""
        try:
            calls, depth = self._open.calls, len(modules.call_stack())
            while calls and calls[-1].depth > depth:
                calls.pop()  # see above
            if calls and calls[-1].site is site and calls[-1].depth == depth:
                return self._put_right(calls.pop().call, "out", output)
        except Exception as error:
            self._failed(site, error)
        return output

    def _put_right(self, call: Call, label: str, value: Any) -> Any:
        """The value with the reference's tensors in it, as far as they are known."""

        def swap(label: str, own: torch.Tensor) -> torch.Tensor:
            slot = call.model, call.module, label
            try:
                right = self._right(call, slot, own)
            except Stays as reason:
                self._stays(slot, str(reason))
                return own
            except Exception as error:
                self._stays(slot, "error")
                say_once(
                    f"{call.model}: a tensor could not be put right: {type(error).__name__}: {error}"
                )
                return own
            with self._lock:
                self._fed["input" if label.startswith("in") else "output"] += 1
            return right

        if not walk(value, label):
            return value
        return rebuilt(
            value,
            label,
            swap,
            lambda label: self._stays((call.model, call.module, label), "structure"),
        )

    def _right(self, call: Call, slot: Slot, own: torch.Tensor) -> torch.Tensor:
        assert self._pairing is not None and self._tensors is not None
        partner = self._pairing.partner(slot, call.loop, call.step, call.call)
        if partner is None:
            raise Stays("unpaired")
        if hasattr(own, "to_local"):
            raise Stays("distributed")
        (model, module, tensor), (loop, step, number) = partner
        if not self._tensors.has(loop, step):
            raise Stays("step")
        stored = self._tensors.find(
            loop, step, tensor_key(model, module, tensor, number, call.phase)
        )
        if stored is None:
            raise Stays("unrecorded")
        right = _read_fitted(stored, own)
        if own.requires_grad and torch.is_grad_enabled():
            return _PutRight.apply(own, right)  # type: ignore[no-untyped-call, no-any-return]
        return right

    def _on_compiled_call(self, site: ModuleSite) -> None:
        """A compiled program runs a call of the site, where nothing can be exchanged."""
        if self._ready:
            say_once(
                f"{site.model.name}: what is compiled is not isolated; TORCHDYNAMO_DISABLE=1 runs it eagerly"
            )

    # -- what is said
    # ----------------------------------------------------------------------------------------------

    def _stays(self, slot: Slot, reason: str) -> None:
        with self._lock:
            if reason == "step":  # a warm-up is compared with nothing: it says nothing of the place
                self._outside += 1
            else:
                self._stayed.setdefault(slot, reason)

    def _failed(self, site: ModuleSite, error: Exception) -> None:
        say_once(f"{site.model.name}: a call was not isolated: {type(error).__name__}: {error}")
        self._stays((site.model.name, site.name, ""), "error")

    def describe(self) -> dict[str, Any]:
        """For the recording's metadata: how many tensors were put right; how many are of steps that
        the reference does not have; and which places were not put right, with the reason.
        """
        with self._lock:
            return {
                "inputs": self._fed["input"],
                "outputs": self._fed["output"],
                "outside": self._outside,
                "stayed": [[*slot, reason] for slot, reason in self._stayed.items()],
            }

    def finish(self) -> None:
        """At the end: how much was isolated, and what was not."""
        if not self._ready:
            return
        reasons = Counter(self._stayed.values())
        said = f"{self._fed['input']} inputs and {self._fed['output']} outputs were the reference's"
        if self._outside:
            said += f", {self._outside} tensors are of steps that it does not have"
        if reasons:
            most = reasons.most_common()
            model, module, tensor = next(
                slot for slot, reason in self._stayed.items() if reason == most[0][0]
            )
            why = ", ".join(f"{count} {_REASONS.get(reason, reason)}" for reason, count in most)
            said += f"; of the other places {why} (for example {module or model} {tensor})"
        say(f"OTEL_TORCH_ISOLATE: {said}")


def rebuilt(
    value: Any,
    label: str,
    swap: Callable[[str, torch.Tensor], torch.Tensor],
    refuse: Callable[[str], None],
) -> Any:
    """The value with `swap(label, tensor)` in each tensor's place; labels are those of
    `values.walk`. What is not of tuples, lists, dicts and dataclasses is told to `refuse`.

    >>> rebuilt([(torch.zeros(1),)], "out", lambda label, tensor: tensor + 1, print)
    [(tensor([1.]),)]
    """
    if isinstance(value, torch.Tensor):
        return swap(label, value)
    if not walk(value, label):
        return value
    kind = type(value)
    if issubclass(kind, tuple) and len(names := getattr(kind, "_fields", ())) == len(value):
        return kind(
            *(
                rebuilt(item, f"{label}.{name}", swap, refuse)
                for name, item in zip(names, value, strict=True)
            )
        )
    if kind in (tuple, list):
        return kind(
            rebuilt(item, f"{label}[{index}]", swap, refuse) for index, item in enumerate(value)
        )
    try:
        if isinstance(value, Mapping):
            copied: Any = value.copy()  # type: ignore[attr-defined]
            for key, item in value.items():
                copied[key] = rebuilt(item, f"{label}.{key}", swap, refuse)
            return copied
        if is_dataclass(value):
            copied = copy.copy(value)
            for one in fields(value):
                item = getattr(value, one.name)
                object.__setattr__(
                    copied, one.name, rebuilt(item, f"{label}.{one.name}", swap, refuse)
                )
            return copied
    except Exception:
        pass
    refuse(label)
    return value


@functools.lru_cache(maxsize=4)  # a step's file, and those of the steps around it
def _opened(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="pt")


@unobserved
def _read_fitted(stored: StoredTensor, own: torch.Tensor) -> torch.Tensor:
    """The reference's tensor with the port's shape, type and device. Raises Stays where it is
    another thing.
    """
    return fitted(_opened(stored.path).get_tensor(stored.key), own)
