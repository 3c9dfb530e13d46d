"""Records under `opentelemetry-instrument python train.py`, without OTEL_TORCH_ENABLED.

There the wrapper is the switch; only an explicit `OTEL_TORCH_ENABLED=off` prevents recording. Both
ways start the same session, so that a process with both records once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from typing import Any

from otel_torch.process.console import say_once
from otel_torch.process.import_hooks import after_import
from otel_torch.settings import options_to_variables
from otel_torch.startup import OFF, name_this_run, report_failed_start

try:
    from opentelemetry.instrumentation.instrumentor import (  # type: ignore[attr-defined]
        BaseInstrumentor,
    )
except ImportError:
    raise ImportError(
        "OtelTorchInstrumentor needs opentelemetry-instrumentation: "
        "pip install 'otel-torch[instrument]'"
    ) from None

_SWITCH = "OTEL_TORCH_ENABLED"


class OtelTorchInstrumentor(BaseInstrumentor):  # type: ignore[misc]
    """Starts recording with `instrument(**settings)`, and stops it with `uninstrument()`.

    The settings are those of `otel_torch.start`; a declarative configuration file has them under
    `instrumentation/development: python: torch:`. Nothing starts before the program imports torch.

    There is no typed attribute `configuration`, which the SDK would check a file's options with: a
    misspelled one would end in a TypeError, after which the wrapper records with the defaults.
    """

    # what the variables that it has set were before; None while it is off
    _previous: dict[str, str | None] | None = None

    def instrumentation_dependencies(self) -> Collection[str]:
        """Return what a manual `instrument()` checks.

        The wrapper reads the same from the package's extra `instruments`.
        """
        return ("torch >= 2.12",)

    def _instrument(self, **settings: Any) -> None:
        switch = os.environ.get(_SWITCH, "").strip().lower()
        if (switch and switch in OFF) or (not settings and _is_off_in_file()):
            return
        variables = options_to_variables(settings, say_once)
        if not switch:
            variables.setdefault(_SWITCH, "1")
        # In the environment, so that child processes are recorded alike, even if they ignore
        # PYTHONPATH, through which the wrapper reaches them; and so that a process that the
        # start-up file starts first has the same settings.
        self._previous = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        name_this_run()
        after_import("torch", self._start)

    def _uninstrument(self, **_: Any) -> None:
        for name, value in (self._previous or {}).items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        self._previous = None
        from otel_torch.bootstrap import stop

        stop()

    def _start(self, torch: object) -> None:
        if self._previous is None:
            return  # uninstrumented before torch was imported
        try:
            from otel_torch.bootstrap import start_from_env

            start_from_env()
        except Exception as error:
            report_failed_start(error)


def _is_off_in_file() -> bool:
    """Return whether the declarative file has `torch: {enabled: false}`. The SDK then skips this
    instrumentor, but the wrapper calls it afterwards, without options, as all others.
    """
    configuration = sys.modules.get("opentelemetry.configuration")  # by now the SDK has read it
    file = os.environ.get("OTEL_CONFIG_FILE")
    if configuration is None or not file:
        return False
    try:
        instrumentation = configuration.load_config_file(file).instrumentation_development
        return instrumentation.python["torch"].get("enabled", True) is False
    except Exception:
        return False  # the file has no such section, or the SDK has reported what is wrong with it
