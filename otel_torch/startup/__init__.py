"""What an interpreter's start-up file calls: makes `OTEL_TORCH_ENABLED=1 python anything.py` the
whole installation.

Runs in every Python process of the environment, helpers that never see torch included, twice in a
virtual environment, and before the program's first line. So it imports nothing while off, leaves
nothing but an import hook while on, and never raises.
"""

import os

ON = frozenset({"1", "true", "yes", "on"})
OFF = frozenset({"", "0", "false", "no", "off"})
_armed = False


def main() -> None:
    """Record this process from its import of torch on, if `OTEL_TORCH_ENABLED` says so. Safe to
    call often; never raises.
    """
    global _armed
    word = os.environ.get("OTEL_TORCH_ENABLED", "").strip().lower()
    if _armed or word in OFF:
        return
    try:
        if word in ON:
            _armed = True
            name_this_run()
            _arm()
        else:
            _refuse()
    except Exception as error:
        say_not_started(error)


def name_this_run() -> None:
    """Put the run's id into the environment, for this process and those that it starts."""
    from otel_torch.job import name_run

    os.environ["OTEL_TORCH_RUN_ID"] = name_run(os.environ)


def say_not_started(error: Exception) -> None:
    """The one line for a start that failed."""
    _say(f"cannot start: {type(error).__name__}: {error}; the program runs on unrecorded")


def _arm() -> None:
    from otel_torch.startup.import_hooks import after_import

    after_import("torch", _start)


def _start(torch: object) -> None:
    try:
        from otel_torch.bootstrap import start_from_env

        start_from_env()
    except Exception as error:
        say_not_started(error)


def _refuse() -> None:
    _say(
        f"OTEL_TORCH_ENABLED={os.environ['OTEL_TORCH_ENABLED']!r}: use 1/true/yes/on or 0/false/no/off; using 'off'"
    )
    os.environ["OTEL_TORCH_ENABLED"] = (
        "off"  # so that the processes this one starts do not all say it again
    )


def _say(message: str) -> None:
    from otel_torch.console import say_once

    say_once(message)
