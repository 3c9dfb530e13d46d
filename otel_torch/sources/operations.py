"""What happens inside one module: each ATen operation's output becomes a record of that module.

A module's output says that it is wrong, not which of its lines is. To watch operations everywhere
would multiply the cost of a run; here they are watched in the forwards of a few modules only, and
nowhere else.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from otel_torch import torch_private
from otel_torch.console import say, say_once
from otel_torch.sources import modules
from otel_torch.sources.events import RunEvents
from otel_torch.sources.hooks import ForwardHook, ModuleHookManager, TorchHook, remove_hooks
from otel_torch.sources.modules import Model, ModuleSite
from otel_torch.sources.source import Source
from otel_torch.sources.values import walk, walk_inputs

_HOOK = "otel_torch.operations"

# what has no numbers yet, and what hands on the same numbers in the same order: nothing happens
# there
_NOTHING_HAPPENS = frozenset(
    f"aten.{name}"
    for name in (
        "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
        "_reshape_alias", "_unsafe_view", "alias", "detach", "squeeze", "unsqueeze", "view",
    )
)  # fmt: skip

# takes a tensor that an operation returned, with its label; bound to the call in which that
# happened
Take = Callable[[str, torch.Tensor], None]


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # as torch has it
    """Sees the operations of one module call. `depth`: how many calls the thread was in when it
    began.
    """

    def __init__(self, take: Take, depth: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.depth = depth
        self._take = take
        self._seen = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled parts stay compiled while this watches; otherwise they would run eagerly, with
        other rounding.
        """
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        # an operation belongs to the innermost module that is watched; a watch that nobody ended
        # sees nothing
        if _open.watches and _open.watches[-1] is self and len(modules.call_stack()) >= self.depth:
            self._record(func, found)
        return found

    @torch_private.unseen_by_function_modes
    def _record(self, func: Any, found: Any) -> None:
        try:
            name = str(func).rpartition(".")[0] or str(func)
            tensors = [
                (label, one)
                for label, one in walk(found, "out")
                if one.is_floating_point() or one.is_complex()
            ]
            if tensors and name not in _NOTHING_HAPPENS:
                for label, tensor in tensors:
                    self._take(f"op[{self._seen}].{name}.{label}", tensor)
                self._seen += 1
        except Exception as error:
            say_once(f"an operation was not recorded: {type(error).__name__}: {error}")


class _Open(threading.local):
    """The watches of this thread, outermost first."""

    def __init__(self) -> None:
        self.watches: list[_Watch] = []

    def end(self) -> None:
        """End the watches of the call that is ending or beginning, and of those inside it that were
        abandoned.
        """
        while self.watches and self.watches[-1].depth >= len(modules.call_stack()):
            self.watches.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]


_open = _Open()


class _Around(ForwardHook):
    """Watches while the module's own forward runs, without the hooks around it."""

    def __init__(self, begin: Callable[[ModuleSite], Take | None], site: ModuleSite) -> None:
        self._begin, self._site = begin, site

    @classmethod
    def name(cls) -> str:
        return _HOOK

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not torch.compiler.is_compiling():
            self._enter(args, kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        _end()
        return output

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            _open.end()
            take = self._begin(self._site)
            if take is None or any(
                torch_private.is_fake(tensor) for _, tensor in walk_inputs(args, kwargs)
            ):
                return
            watch = _Watch(take, len(modules.call_stack()))
            watch.__enter__()  # type: ignore[no-untyped-call]
            _open.watches.append(watch)
        except Exception as error:
            say_once(
                f"operations of {self._site.model.name} are not recorded: {type(error).__name__}: {error}"
            )


def _end(*of_the_hook: Any) -> None:
    """Torch calls this even where forward raised: a watch that stayed would slow down all that
    comes after.
    """
    if not torch.compiler.is_compiling() and _open.watches:
        _open.end()


class Operations(Source):
    """Watches the modules whose canonical name matches.

    begin: says of a site where its operations go; None where its call is not recorded.
    """

    def __init__(
        self,
        pattern: re.Pattern[str],
        begin: Callable[[ModuleSite], Take | None],
        events: RunEvents,
    ) -> None:
        self._pattern, self._begin = pattern, begin
        self._attached: Any = WeakIdKeyDictionary()
        self._matched = False
        events.compiled_call.append(self._on_compiled_call)

    def attach(self, model: Model, sites: list[ModuleSite]) -> None:
        """Watch those of the sites that match; to be called last, so that what other hooks compute
        is not seen.
        """
        for site in sites:
            module = site.module()
            if module is None or not any(self._pattern.search(name) for name, _ in site.names):
                continue
            self._matched = True
            try:
                ModuleHookManager.get_from_or_default(module).append_forward_hook(
                    _Around(self._begin, site)
                )
                self._attached[module] = module.register_forward_hook(
                    TorchHook(_end), always_call=True
                )
            except Exception as error:
                say_once(
                    f"{model.name}: operations of {type(module).__name__} are not recorded ({type(error).__name__}: {error})"
                )

    def _on_compiled_call(self, site: ModuleSite) -> None:
        """A compiled program runs a call of the site: there are no single operations any more."""
        if any(self._pattern.search(name) for name, _ in site.names):
            say_once(
                f"{site.model.name}: operations of compiled code are not recorded; TORCHDYNAMO_DISABLE=1 runs it eagerly"
            )

    def finish(self) -> None:
        """At the end: a pattern that matches nothing is probably a typing mistake."""
        if not self._matched:
            say(
                f"OTEL_TORCH_OPERATIONS={self._pattern.pattern!r} matches none of the recorded modules"
            )

    def uninstall(self) -> None:
        """Stop watching."""
        for handle in list(self._attached.values()):
            handle.remove()
        remove_hooks(self._attached, _HOOK)
        self._attached.clear()
