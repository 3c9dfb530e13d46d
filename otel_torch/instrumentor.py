"""Records under `opentelemetry-instrument python train.py`, without OTEL_TORCH_ENABLED.

There the wrapper is the switch; only an explicit `OTEL_TORCH_ENABLED=off` prevents recording. Both
ways start the same session, so that a process with both records once.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from otel_torch.process.import_hooks import after_import
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

    The settings are those of `otel_torch.start`. Nothing starts before the program imports torch.
    """

    _settings: dict[str, Any] | None = None
    _set_switch = False

    def instrumentation_dependencies(self) -> Collection[str]:
        """Return what a manual `instrument()` checks.

        The wrapper reads the same from the package's extra `instruments`.
        """
        return ("torch >= 2.12",)

    def _instrument(self, **settings: Any) -> None:
        switch = os.environ.get(_SWITCH, "").strip().lower()
        if switch and switch in OFF:
            return
        if not switch:
            # So that child processes are recorded too, even if they ignore PYTHONPATH, through
            # which the wrapper reaches them.
            os.environ[_SWITCH] = "1"
            self._set_switch = True
        self._settings = settings
        name_this_run()
        after_import("torch", self._start)

    def _uninstrument(self, **_: Any) -> None:
        if self._set_switch:
            os.environ.pop(_SWITCH, None)
        self._settings, self._set_switch = None, False
        from otel_torch.bootstrap import stop

        stop()

    def _start(self, torch: object) -> None:
        if self._settings is None:
            return  # uninstrumented before torch was imported
        try:
            from otel_torch.bootstrap import start

            start(**self._settings)
        except Exception as error:
            report_failed_start(error)
