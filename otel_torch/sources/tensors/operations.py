"""Records the output of every ATen operation inside selected modules (OTEL_TORCH_OPERATIONS).

A module's output shows that the module is wrong, but not which of its lines. Recording operations
everywhere would multiply the cost of a run, so it is limited to the forwards of a few modules.

A module that computes `(x * 2).relu()` gets, besides `out`, the records

    op[0].aten.mul.out
    op[1].aten.relu.out
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from otel_torch import torch_private
from otel_torch.process.console import say, say_once
from otel_torch.rendering.near_name import near_name
from otel_torch.sources.events import RunEvents
from otel_torch.sources.models.model import Model, ModuleSite
from otel_torch.sources.modules import call_stack
from otel_torch.sources.modules.hooks import (
    ModuleHookManager,
    SessionHook,
    TorchHook,
    has_hook,
    remove_hooks,
)
from otel_torch.sources.modules.module_dict import ModuleDict
from otel_torch.sources.source import Source
from otel_torch.sources.tensors.values import walk, walk_inputs

_HOOK = "otel_torch.operations"

# operations that are not recorded: they leave memory uninitialized, or keep numbers and their order
UNRECORDED_OPERATIONS = frozenset(
    f"aten.{name}"
    for name in (
        "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
        "_reshape_alias", "_unsafe_view", "alias", "detach", "squeeze", "unsqueeze", "view",
    )
)  # fmt: skip

# records a tensor, given its label, in a certain call of a module
RecordTensor = Callable[[str, torch.Tensor], None]


class _OperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # as torch has it
    """Records the operations of one module call.

    depth: length of the thread's call stack when the call began.
    """

    def __init__(self, record_tensor: RecordTensor, depth: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.depth = depth
        self._record_tensor = record_tensor
        self._count = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep compiled parts compiled; otherwise they would run eagerly and round differently."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # an operation belongs to the innermost recorded module; a mode whose call has ended, but
        # which was not exited, records nothing
        is_innermost = _active.modes and _active.modes[-1] is self
        if is_innermost and len(call_stack.current()) >= self.depth:
            self._record(func, result)
        return result

    @torch_private.unseen_by_function_modes
    def _record(self, func: Any, result: Any) -> None:
        try:
            name = str(func).rpartition(".")[0] or str(func)
            if name in UNRECORDED_OPERATIONS:
                return
            tensors = [
                (label, tensor)
                for label, tensor in walk(result, "out")
                if tensor.is_floating_point() or tensor.is_complex()
            ]
            if tensors:
                for label, tensor in tensors:
                    self._record_tensor(f"op[{self._count}].{name}.{label}", tensor)
                self._count += 1
        except Exception as error:
            say_once(f"an operation was not recorded: {type(error).__name__}: {error}")


class _ActiveModes(threading.local):
    """The modes of this thread, outermost first."""

    def __init__(self) -> None:
        self.modes: list[_OperationMode] = []

    def exit_current(self) -> None:
        """Exit the mode of the current call, if any, and those of inner calls that raised."""
        while self.modes and self.modes[-1].depth >= len(call_stack.current()):
            self.modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]


_active = _ActiveModes()


class _OperationHook(SessionHook):
    """Records while the module's own forward runs, without the hooks around it."""

    hook_name = _HOOK

    def __init__(
        self, recorder_for: Callable[[ModuleSite], RecordTensor | None], site: ModuleSite
    ) -> None:
        self._recorder_for, self._site = recorder_for, site

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not torch.compiler.is_compiling():
            self._enter_mode(args, kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        _exit_mode()
        return output

    def _enter_mode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            _active.exit_current()
            record_tensor = self._recorder_for(self._site)
            if record_tensor is None:
                return
            if any(torch_private.is_fake(tensor) for _, tensor in walk_inputs(args, kwargs)):
                return
            mode = _OperationMode(record_tensor, len(call_stack.current()))
            mode.__enter__()  # type: ignore[no-untyped-call]
            _active.modes.append(mode)
        except Exception as error:
            say_once(
                f"operations of {self._site.model.name} are not recorded: "
                f"{type(error).__name__}: {error}"
            )


def _exit_mode(*hook_arguments: Any) -> None:
    """Exit the current call's mode. Torch calls this even if forward raised.

    A mode that stayed active would slow down everything after it.
    """
    if not torch.compiler.is_compiling() and _active.modes:
        _active.exit_current()


class Operations(Source):
    """Records the operations of modules whose canonical name matches `pattern`.

    pattern: None if only `zoom` selects one.
    recorder_for: returns the function that records tensors in the current call of a site, or None
    if that call is not recorded.
    """

    def __init__(
        self,
        pattern: re.Pattern[str] | None,
        recorder_for: Callable[[ModuleSite], RecordTensor | None],
        events: RunEvents,
    ) -> None:
        self._pattern, self._recorder_for = pattern, recorder_for
        self._attached: ModuleDict[Any] = ModuleDict()
        self._matched = False
        self._selected: WeakValueDictionary[tuple[str, str], ModuleSite] = WeakValueDictionary()
        self._zoomed: ModuleSite | None = None
        self._names: list[str] = []  # of the largest model, until a module matches
        events.compiled_call.append(self._on_compiled_call)

    def attach(self, model: Model, sites: list[ModuleSite]) -> None:
        """Attach to the matching sites.

        Call this last, so that operations of other hooks are not recorded.
        """
        if self._pattern is not None and not self._matched:
            self._names = max(self._names, [site.names[0][0] for site in sites], key=len)
        for site in sites:
            self._selected[model.name, site.name] = site
            if self._matches(site):
                self._matched = True
                self._attach_to(site)

    def _attach_to(self, site: ModuleSite) -> None:
        module = site.module()
        if module is None or has_hook(module, _OperationHook.name()):
            return
        try:
            hook = _OperationHook(self._recorder_for, site)
            ModuleHookManager.get_from_or_default(module).append_forward_hook(hook)
            self._attached[module] = module.register_forward_hook(
                TorchHook(_exit_mode), always_call=True
            )
        except Exception as error:
            say_once(
                f"{site.model.name}: operations of {type(module).__name__} are not recorded "
                f"({type(error).__name__}: {error})"
            )

    # -- one module, for its next call

    @property
    def is_zoomed(self) -> bool:
        """Whether `zoom` has selected a module whose next call has not been recorded yet."""
        return self._zoomed is not None

    def zoom(self, model: str, module: str) -> None:
        """Record the operations of a module until `end_zoom`. It must not be running."""
        self._zoomed = self._selected.get((model, module))
        if self._zoomed is not None:
            self._attach_to(self._zoomed)

    def end_zoom(self) -> None:
        """Stop recording the operations of that module, unless the pattern selects it."""
        site, self._zoomed = self._zoomed, None
        module = None if site is None else site.module()
        if site is None or module is None or self._matches(site):
            return
        if (handle := self._attached.pop(module)) is not None:
            handle.remove()
            remove_hooks([module], _HOOK)

    def _matches(self, site: ModuleSite) -> bool:
        pattern = self._pattern
        return pattern is not None and any(pattern.search(name) for name, _ in site.names)

    def _on_compiled_call(self, site: ModuleSite) -> None:
        """Report that a matching module runs in a compiled graph, without single operations."""
        if self._matches(site) or site is self._zoomed:
            say_once(
                f"{site.model.name}: operations of compiled code are not recorded; "
                "set TORCHDYNAMO_DISABLE=1 to run it eagerly"
            )

    def finish(self) -> None:
        """Report a pattern that matched nothing, which is probably a typo."""
        if self._pattern is not None and not self._matched:
            pattern = self._pattern.pattern
            say(
                f"OTEL_TORCH_OPERATIONS={pattern!r} matches none of the recorded modules"
                f"{near_name(pattern, self._names)}"
            )

    def uninstall(self) -> None:
        for handle in self._attached.values():
            handle.remove()
        remove_hooks(self._attached, _HOOK)
        self._attached.clear()
