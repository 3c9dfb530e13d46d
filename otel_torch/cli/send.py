"""`otel-torch send`: delivers OTLP JSON lines to the endpoint that the standard variables name.

For the files of OTEL_TORCH_OTLP_FILE, written where no collector could be reached, and for those of
any file exporter. May be cut off at any moment and called again: what was acknowledged is kept
beside each file (`otel_torch.sent`).
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from otel_torch.cli.send_progress import Sent
from otel_torch.console import say
from otel_torch.rendering.progress import Progress
from otel_torch.rendering.table import escape
from otel_torch.telemetry.exporters import OTEL_SIGNALS, find_otlp_exporter

if TYPE_CHECKING:
    from otel_torch.telemetry.answer import Answer

SCHEMA = "otel_torch.send/1"
# a message, uncompressed: receivers take 4 MiB where nobody has changed it
MESSAGE_BYTES = 2 * 2**20
# what is larger as a single line is sent in parts
LINE_BYTES = 7 * 2**19
GIVE_UP_S = 60.0
_BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0)
# answers that any other message would get as well
_ALL_THE_SAME = re.compile(
    r"UNAUTHENTICATED|PERMISSION_DENIED|UNIMPLEMENTED|HTTP 40[1345]\b|WRONG_VERSION_NUMBER|(?i:certificate.verify|handshake)"
)
_SUFFIXES = (".jsonl", ".json")
_UNITS = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KIB": 2.0**10, "MIB": 2.0**20, "GIB": 2.0**30}


class BadInput(ValueError):
    """What was given cannot be sent at all; the message is the one line that a person gets."""


@dataclass(slots=True)
class Rate:
    """A limit in requests or in bytes a second.

    >>> rate = Rate.parse("2/s"); rate.wait_s(1000, now=0.0), rate.wait_s(1000, now=0.0), rate.wait_s(1000, now=10.0)
    (0.0, 0.5, 0.0)
    >>> Rate.parse("4kB/s").cost_s(1000)
    0.25
    """

    requests: float = 0.0
    bytes: float = 0.0
    _due: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Rate:
        """`5MB/s` or `20/s`; argparse names the option where it is neither."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)(/s)?", text.strip(), re.IGNORECASE)
        if match and float(match[1]) > 0:
            if match[2].upper() in _UNITS:
                return cls(bytes=float(match[1]) * _UNITS[match[2].upper()])
            if match[3] and match[2].lower() in ("", "requests", "request"):
                return cls(requests=float(match[1]))
        raise argparse.ArgumentTypeError(
            f"{text!r} is no rate; use one such as 5MB/s, or 20/s for requests"
        )

    def cost_s(self, size: int) -> float:
        """How much of the time a message of so many bytes uses up."""
        return (size / self.bytes if self.bytes else 0.0) + (
            1 / self.requests if self.requests else 0.0
        )

    def wait_s(self, size: int, now: float) -> float:
        """How long to wait before a message of so many bytes is sent. now: seconds of any clock
        that only goes forward.
        """
        start = max(now, self._due)
        self._due = start + self.cost_s(size)
        return start - now


@dataclass(slots=True)
class Part:
    """The items [first, last) of the line at [start, end), which holds `items` of them, as a
    message.
    """

    signal: str
    start: int
    end: int
    first: int
    last: int
    items: int
    request: Any
    encoded: bytes

    def halves(self) -> Sequence[Part]:
        """Two smaller ones; none of a single item."""
        from otel_torch.telemetry.otlp_requests import take_items

        if self.last - self.first < 2:
            return ()
        middle = (self.first + self.last) // 2
        cuts = ((self.first, middle), (middle, self.last))
        taken = [
            (cut, take_items(self.signal, self.request, cut[0] - self.first, cut[1] - self.first))
            for cut in cuts
        ]
        return [
            Part(
                self.signal, self.start, self.end, *cut, self.items, some, some.SerializeToString()
            )
            for cut, some in taken
        ]


@dataclass(slots=True)
class Outcome:
    """What became of one file. Counts by `spans`, `data_points` and `log_records`, but for those
    that say lines.

    already_lines: acknowledged before. undelivered_lines: not taken, in whole or in part, and left
    for the next time. sent_again: messages that were repeated though an earlier attempt, which
    nobody answered, may have arrived.
    """

    file: str
    bytes: int = 0
    lines: int = 0
    requests: int = 0
    already_lines: int = 0
    accepted: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    undelivered_lines: int = 0
    unreadable_lines: int = 0
    cut_off: bool = False
    replaced: bool = False
    sent_again: int = 0

    def as_json(self) -> dict[str, Any]:
        """The fields, counters as plain objects."""
        found = {name: getattr(self, name) for name in self.__slots__}
        return {
            name: dict(value) if isinstance(value, Counter) else value
            for name, value in found.items()
        }

    @property
    def status(self) -> int:
        """The exit status: 2 for lines that cannot be read, 1 for what did not arrive."""
        if self.unreadable_lines:
            return 2
        return 1 if self.rejected or self.refused or self.undelivered_lines else 0

    def describe(self) -> str:
        """One line for a person."""
        told = [_list(self.accepted, "accepted")] if self.accepted else []
        told += [_list(self.rejected, "rejected by the receiver")] if self.rejected else []
        told += [_list(self.refused, "refused")] if self.refused else []
        for number, what in (
            (self.undelivered_lines, "not delivered"),
            (self.unreadable_lines, "unreadable"),
            (self.already_lines, "acknowledged before"),
        ):
            told += [f"{_plural(number, 'line')} {what}"] if number else []
        told += (
            [f"{_plural(self.sent_again, 'message')} sent again after no answer"]
            if self.sent_again
            else []
        )
        told += ["the last line was cut off and is left out"] if self.cut_off else []
        return f"{escape(self.file)}: {'; '.join(told) or 'nothing to send'}"


_ITEMS = {"traces": "spans", "metrics": "data_points", "logs": "log_records"}


def _list(counts: Counter[str], what: str) -> str:
    return (
        ", ".join(
            _plural(number, name.rstrip("s").replace("_", " ")) for name, number in counts.items()
        )
        + f" {what}"
    )


def _plural(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


# -- the endpoint
# --------------------------------------------------------------------------------------------------


class Endpoint:
    """Where the standard variables lead, by signal; opened when first needed.

    give_up_s: how long a message that is not taken is tried again. pause: waits so many seconds.
    """

    def __init__(
        self,
        rate: Rate,
        give_up_s: float,
        tell: Callable[[str], None],
        pause: Callable[[float], Any],
    ) -> None:
        self._rate, self._give_up_s, self._tell, self._pause = rate, give_up_s, tell, pause
        self._transports: dict[str, Any] = {}
        self._exporters = {
            signal: name
            for signal in OTEL_SIGNALS
            if (name := find_otlp_exporter(signal)) is not None
        }
        self._where = {
            signal: _name(signal, exporter) for signal, exporter in self._exporters.items()
        }
        self._open = set(self._exporters)  # signals of which it is worth sending anything more

    @property
    def name(self) -> str:
        """All of it, without credentials: what progress is kept under."""
        return " ".join(dict.fromkeys(self._where.values()))

    @property
    def gone(self) -> bool:
        """Whether nothing more is sent, of any signal."""
        return not self._open

    def takes(self, signal: str) -> bool:
        """Whether it is worth sending anything more of a signal. Raises BadInput where nothing says
        where to.
        """
        if signal not in self._exporters:
            raise BadInput(
                f"there is no usable endpoint for {signal}: set OTEL_EXPORTER_OTLP_ENDPOINT, and OTEL_EXPORTER_OTLP_PROTOCOL to "
                "grpc or http/protobuf"
            )
        return signal in self._open

    def send(self, signal: str, message: bytes, outcome: Outcome) -> Answer:
        """Send until the answer is final."""
        transport = self._transport(signal)
        started, attempt = time.monotonic(), 0
        while True:
            self._pause(self._rate.wait_s(len(message), time.monotonic()))
            answer: Answer = transport.send_request(message)
            outcome.requests += 1
            hopeless = answer.kind != "accepted" and _ALL_THE_SAME.search(answer.detail)
            if hopeless or answer.kind not in ("unavailable", "unconfirmed"):
                break
            wait = max(
                answer.wait_s,
                _BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)] * random.uniform(0.8, 1.2),
            )
            if time.monotonic() - started + wait > self._give_up_s:
                break
            self._tell(
                f"{self._explain(transport, answer)}. Trying again for up to {self._give_up_s:g} s"
            )
            self._pause(wait)
            outcome.sent_again += answer.kind == "unconfirmed"
            attempt += 1
        if answer.kind != "accepted" or answer.rejected:
            self._tell(self._explain(transport, answer))
        if hopeless:
            self._open.discard(signal)
        elif answer.kind in ("unavailable", "unconfirmed"):
            self._open = {
                other for other in self._open if self._where[other] != self._where[signal]
            }
        return answer

    def close(self) -> None:
        """Give the connections back."""
        for transport in self._transports.values():
            transport.shutdown()

    def _transport(self, signal: str) -> Any:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        from otel_torch.telemetry.transport import open_transport

        if signal not in self._transports:
            head = Resource.get_empty(), InstrumentationScope("")  # what is sent has its own
            try:
                transport = open_transport(signal, self._exporters[signal], *head)
            except Exception as error:
                why = " ".join(f"{type(error).__name__}: {error}".split())
                raise BadInput(
                    f"no exporter can be made of the OTEL_EXPORTER_OTLP_* variables for {signal}: {why}"
                ) from None
            if not hasattr(transport, "send_request"):
                raise BadInput(
                    "the installed version of OpenTelemetry's OTLP exporters is not known here, nothing is sent; a Collector "
                    "with the otlpjsonfile receiver reads these files too"
                )
            self._transports[signal] = transport
        return self._transports[signal]

    def _explain(self, transport: Any, answer: Answer) -> str:
        from otel_torch.telemetry.answer import explain

        return explain(transport.endpoint, transport.protocol, answer)


def _name(signal: str, exporter: str) -> str:
    from otel_torch.telemetry.answer import name_endpoint

    return name_endpoint(signal, "grpc" if exporter.endswith("grpc") else "http")


# -- the files
# --------------------------------------------------------------------------------------------------


def find_files(given: Sequence[str], tell: Callable[[str], None]) -> list[tuple[Path, str | None]]:
    """The files that are meant, folders searched, with the signal of each one's first line; None
    for an empty one.

    What is in a folder and holds no OTLP is told and left out. Raises BadInput for a file that is
    missing or holds none.
    """
    found: dict[Path, str | None] = {}
    for name in given:
        path = Path(name).expanduser()
        if not path.is_dir():
            found[path] = _look_into(path)
            continue
        inside = [
            one for one in sorted(path.rglob("*")) if one.suffix in _SUFFIXES and one.is_file()
        ]
        inside = [
            one
            for one in inside
            if not one.name.endswith(".meta.json") and not one.name.startswith(".")
        ]
        usable, others = {}, []
        for one in inside:
            try:
                usable[one] = _look_into(one)
            except BadInput:
                others.append(one)
        if not usable:
            raise BadInput(f"{escape(name)}: holds no files of OTLP JSON lines")
        if others:
            number, example = _plural(len(others), "file"), escape(others[0].name)
            tell(f"{escape(name)}: {number} left out for want of OTLP in it, such as {example}")
        found |= usable
    return list(found.items())


def _look_into(path: Path) -> str | None:
    from otel_torch.telemetry.otlp_json import NotOtlp, read_line

    try:
        with path.open("rb") as file:
            first = next((line for line in file if line.strip()), b"")
    except OSError as error:
        raise BadInput(f"{escape(str(path))}: {error.strerror}") from None
    if not first or (not first.endswith(b"\n") and first.lstrip().startswith(b'{"')):
        try:
            return read_line(first)[0]
        except NotOtlp:
            return None  # empty, or cut off in its first line
    try:
        return read_line(first)[0]
    except NotOtlp as error:
        raise BadInput(
            f"{escape(str(path))}: no lines of OTLP JSON: {escape(str(error))}"
        ) from None


class Delivery:
    """Sends one file. Lines are put together to messages in their order; what is acknowledged is
    kept at once.
    """

    def __init__(
        self,
        path: Path,
        file: BinaryIO,
        endpoint: Endpoint,
        tell: Callable[[str], None],
        progress: Progress,
    ) -> None:
        self.outcome = Outcome(str(path))
        self._path, self._file, self._endpoint, self._tell, self._progress = (
            path,
            file,
            endpoint,
            tell,
            progress,
        )
        self._sent = Sent(path, endpoint.name, file)
        self._batch: list[Part] = []
        self._batch_bytes = 0
        self._unfinished: set[int] = set()  # where lines begin of which something was not taken
        self._size = max(1, os.fstat(file.fileno()).st_size)

    def run(self, *, again: bool) -> Outcome:
        """Send what has not been acknowledged; all of it where it is to be sent again."""
        self.outcome.replaced = self._sent.replaced
        if self._sent.replaced:
            self._tell(
                f"{escape(str(self._path))} is another file than the one that was sent from here; sent from its beginning"
            )
        if again:
            self._sent.forget()
        for number, start, end, line in self._lines():
            self._progress(
                f"{escape(self._path.name)}: {100 * start // self._size} %, {self.outcome.requests} messages"
            )
            if not line.strip():
                continue
            if self._sent.lines.covers(start, end):
                self.outcome.already_lines += 1
            elif self._endpoint.gone:
                self._unfinished.add(start)
            else:
                self._take(number, start, end, line)
        self._flush()
        self.outcome.undelivered_lines += len(self._unfinished)
        return self.outcome

    def _lines(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Number, where it begins and ends, and the bytes of each line; the last may lack its end,
        and yet get it.
        """
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, 1):
            start, end = end, end + len(line) + (not line.endswith(b"\n"))
            self.outcome.bytes += len(line)
            yield number, start, end, line

    def _take(self, number: int, start: int, end: int, line: bytes) -> None:
        from otel_torch.telemetry.otlp_json import NotOtlp, read_line
        from otel_torch.telemetry.otlp_requests import count_items, take_items

        try:
            signal, request = read_line(line)
        except NotOtlp as error:
            if not line.endswith(b"\n"):
                self.outcome.cut_off = True
                return
            self.outcome.unreadable_lines += 1
            if self.outcome.unreadable_lines == 1:
                self._tell(
                    f"{escape(str(self._path))}, line {number}: {escape(str(error))}; left out, like any other such line"
                )
            return
        self.outcome.lines += 1
        if not self._endpoint.takes(signal):
            self._unfinished.add(start)
            return
        items = count_items(signal, request)
        if not items:
            return
        for first, last in list(self._sent.parts(start).missing(0, items)):
            some = (
                request if (first, last) == (0, items) else take_items(signal, request, first, last)
            )
            self._put(Part(signal, start, end, first, last, items, some, some.SerializeToString()))

    def _put(self, part: Part) -> None:
        """Into the next message, in two where it is too large for any."""
        halves = part.halves() if len(part.encoded) > LINE_BYTES else ()
        if halves:
            for half in halves:
                self._put(half)
            return
        if self._batch and (
            self._batch[0].signal != part.signal
            or self._batch_bytes + len(part.encoded) > MESSAGE_BYTES
        ):
            self._flush()
        self._batch.append(part)
        self._batch_bytes += len(part.encoded)

    def _flush(self) -> None:
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        if batch:
            self._deliver(batch)

    def _deliver(self, batch: Sequence[Part]) -> None:
        """Send parts of one signal as one message. Requests are put together by writing one behind
        the other.
        """
        signal = batch[0].signal
        if not self._endpoint.takes(signal):
            self._unfinished.update(part.start for part in batch)
            return
        answer = self._endpoint.send(signal, b"".join(part.encoded for part in batch), self.outcome)
        items = sum(part.last - part.first for part in batch)
        if answer.kind == "accepted":
            rejected = min(max(answer.rejected, 0), items)
            self.outcome.accepted += Counter({_ITEMS[signal]: items - rejected})
            self.outcome.rejected += Counter({_ITEMS[signal]: rejected})
            self._acknowledge(batch)
        elif not self._endpoint.takes(signal):
            self._unfinished.update(part.start for part in batch)
        elif len(batch) > 1:  # too large, or one of them is not to its liking: which?
            self._deliver(batch[: len(batch) // 2])
            self._deliver(batch[len(batch) // 2 :])
        elif answer.kind == "too_large" and (halves := batch[0].halves()):
            for half in halves:
                self._deliver([half])
        else:
            self.outcome.refused[_ITEMS[signal]] += items

    def _acknowledge(self, batch: Sequence[Part]) -> None:
        for part in batch:
            self._sent.acknowledge(part.start, part.end, part.first, part.last, part.items)
        if problem := self._sent.save():
            self._tell(
                f"what was acknowledged cannot be kept beside {escape(str(self._path))} ({problem}): cut off, it would be sent "
                "again"
            )


# -- the command
# --------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `otel-torch send`."""
    parser.description = (
        "Delivers OTLP JSON lines (OTEL_TORCH_OTLP_FILE, or any file exporter's) to the endpoint that the standard "
        "OTEL_EXPORTER_OTLP_* variables name. What was acknowledged is kept beside each file and not sent again. Exit status: "
        "0 all accepted, 1 something refused or not delivered, 2 bad input."
    )
    parser.add_argument(
        "files", metavar="FILE", nargs="+", help="files of OTLP JSON lines, or folders of them"
    )
    parser.add_argument(
        "--rate",
        metavar="RATE",
        type=Rate.parse,
        default=Rate(),
        help="at most so much: 5MB/s, or 20/s requests",
    )
    parser.add_argument(
        "--give-up",
        metavar="SECONDS",
        type=float,
        default=GIVE_UP_S,
        help="how long a message is tried again (default: 60)",
    )
    parser.add_argument(
        "--again", action="store_true", help="send what was acknowledged before as well"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a line a file"
    )


def run(arguments: argparse.Namespace) -> int:
    """Send the files. Returns the exit status; bad input is one line on stderr."""
    with Progress() as progress:

        def tell(text: str) -> None:
            progress.clear()
            if text not in told:
                told.add(text)
                say(text)

        told: set[str] = set()
        thread = threading.current_thread()
        name, thread.name = (
            thread.name,
            "otel_torch-send",
        )  # the exporters' own warnings are kept off the terminal by that
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # ... and what gRPC's core prints by this
        endpoint = Endpoint(
            arguments.rate,
            arguments.give_up,
            tell,
            lambda seconds: time.sleep(seconds) if seconds > 0 else None,
        )
        outcomes: list[Outcome] = []
        try:
            files = find_files(arguments.files, tell)
            for signal in {signal for _, signal in files if signal is not None}:
                endpoint.takes(signal)
            for path, _ in files:
                outcomes.append(_send(path, endpoint, tell, progress, again=arguments.again))
        except BadInput as error:
            tell(str(error))
            return 2
        except KeyboardInterrupt:
            tell("stopped; the same command goes on from here")
            return 130
        finally:
            endpoint.close()
            thread.name = name
    _report(outcomes, endpoint, as_json=arguments.json)
    return max((outcome.status for outcome in outcomes), default=0)


def _send(
    path: Path, endpoint: Endpoint, tell: Callable[[str], None], progress: Progress, *, again: bool
) -> Outcome:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(f"{escape(str(path))} is being sent by another process") from None
        except OSError:
            pass  # a file system without locks
        return Delivery(path, file, endpoint, tell, progress).run(again=again)


def _report(outcomes: Sequence[Outcome], endpoint: Endpoint, *, as_json: bool) -> None:
    if as_json:
        status = max((outcome.status for outcome in outcomes), default=0)
        files = [outcome.as_json() for outcome in outcomes]
        print(
            json.dumps(
                {"schema": SCHEMA, "status": status, "endpoint": endpoint.name, "files": files}
            )
        )
        return
    for outcome in outcomes:
        print(outcome.describe())
    sys.stdout.flush()
