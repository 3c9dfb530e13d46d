"""Called by the interpreter's start-up file, so that `OTEL_TORCH_ENABLED=1 python x.py` records.

This runs in every Python process of the environment, before the program's first line, twice in a
virtual environment, and also in helpers that never import torch. So it imports nothing while
recording is off, adds only an import hook while it is on, and never raises. While the switch is not
set, the start-up file calls this only if a variable may be a misspelling of it.
"""

import os

ON = frozenset({"1", "true", "yes", "on"})
OFF = frozenset({"", "0", "false", "no", "off"})
_started = False
_is_kept_off = False


def keep_off() -> None:
    """Never record this process: it is one of our own commands. Those that it starts may record."""
    global _is_kept_off
    _is_kept_off = True


def main() -> None:
    """Record this process once it imports torch, if OTEL_TORCH_ENABLED is on.

    Safe to call several times. Never raises.
    """
    global _started
    switch = os.environ.get("OTEL_TORCH_ENABLED", "").strip().lower()
    if _started or (switch in OFF and "OTEL_TORCH_ENABLED" in os.environ):
        return
    try:
        if not switch:
            _report_misspelled_switch()
        elif switch in ON:
            _started = True
            name_this_run()
            _exchange_code()
            _record_after_import()
        else:
            _reject_switch()
    except Exception as error:
        report_failed_start(error)


def name_this_run() -> None:
    """Put the run id into the environment, for this process and those that it starts."""
    from otel_torch.process.job import name_run

    os.environ["OTEL_TORCH_RUN_ID"] = name_run(os.environ)


def report_failed_start(error: Exception) -> None:
    """Print the line for a start that failed."""
    _say(f"cannot start: {type(error).__name__}: {error}; the program runs on unrecorded")


def _exchange_code() -> None:
    plan = os.environ.get("OTEL_TORCH_EXCHANGE")
    if plan:
        from otel_torch.code_exchange.follow_plan import follow_plan

        follow_plan(plan)


def _record_after_import() -> None:
    from otel_torch.process.import_hooks import after_import

    after_import("torch", _start)


def _start(torch: object) -> None:
    if _is_kept_off:
        return
    try:
        from otel_torch.bootstrap import start_from_env

        start_from_env()
    except Exception as error:
        report_failed_start(error)


def _reject_switch() -> None:
    _say(
        f"OTEL_TORCH_ENABLED={os.environ['OTEL_TORCH_ENABLED']!r}: "
        "use 1/true/yes/on or 0/false/no/off; using 'off'"
    )
    # So that the processes that this one starts do not print the line again.
    os.environ["OTEL_TORCH_ENABLED"] = "off"


def _report_misspelled_switch() -> None:
    for name, value in os.environ.items():
        if value.strip().lower() in ON and _is_nearly_the_switch(name):
            _say(f"{name} is no setting, nothing is recorded; did you mean OTEL_TORCH_ENABLED?")
            os.environ["OTEL_TORCH_ENABLED"] = "off"  # as in `_reject_switch`
            return


def _is_nearly_the_switch(name: str) -> bool:
    """Return whether a name has the letters of OTEL_TORCH_ENABLED, up to two edits.

    Importing difflib for this would cost more than the rest of an interpreter's start.

    >>> [_is_nearly_the_switch(name) for name in ("OTEL_PYTORCH_ENABLED", "OTEL_TORCH_JSONL")]
    [True, False]
    """
    switch, letters = "OTELTORCHENABLED", "".join(filter(str.isalpha, name.upper()))
    if abs(len(letters) - len(switch)) > 2:
        return False
    edits = list(range(len(switch) + 1))  # from the letters so far to each start of the switch
    for row, letter in enumerate(letters, 1):
        previous, edits[0] = edits[0], row
        for column, expected in enumerate(switch, 1):
            change = previous + (letter != expected)
            previous = edits[column]
            edits[column] = min(change, previous + 1, edits[column - 1] + 1)
    return edits[-1] <= 2


def _say(message: str) -> None:
    from otel_torch.process.console import say_once

    say_once(message)
