"""Receivers that answer at length, for ever, in escape codes or with our own secrets: neither the
program nor `send` nor `doctor` takes harm.
"""

from __future__ import annotations

import base64
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.cli.test_send import log_line, run_send, write
from tests.hostile_server import ANSWERS, ESCAPES, HostileServer, answers
from tests.otlp_receiver import Receiver
from tests.telemetry.otlp.test_delivery import lost
from tests.telemetry_support import drive

LOGS = {"OTEL_TORCH_SIGNALS": "log_events"}
NINE = "run_step(0, [record(f'layer.{n}') for n in range(9)])\n"
PRINT_PEAK = "print(open('/proc/self/status').read().split('VmHWM:')[1].split('kB')[0])\n"
# kB: what the program takes without a receiver is about 50,000
PEAK = 250_000
SECRET = "s3cr3t-t0ken-of-mine"
HEADERS = {"OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer%20{SECRET}"}


class HostileGrpc(Receiver):
    """Answers each request over gRPC with two rejected items and a message.

    Args:
        compression: of the answer.
        error: the message is that of an error of this status instead.
    """

    def __init__(
        self,
        message: str,
        compression: grpc.Compression = grpc.Compression.NoCompression,
        error: grpc.StatusCode | None = None,
    ) -> None:
        super().__init__("reject", rejecting=2)
        self._message, self._compression, self._error = message, compression, error

    def _answer_grpc(self, signal: str, request: Any, context: Any) -> Any:
        if self._error is not None:
            context.abort(self._error, self._message)
        self.store(signal, request, {})
        context.set_compression(self._compression)
        response = self._respond(signal)
        response.partial_success.error_message = self._message
        return response


@pytest.fixture
def unlimited_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let servers send messages of any size."""
    make = grpc.server
    options = [("grpc.max_send_message_length", -1)]
    monkeypatch.setattr(grpc, "server", lambda pool: make(pool, options=options))


@pytest.mark.parametrize("name", [name for name in ANSWERS if "length" in name or "bomb" in name])
def test_an_answer_takes_no_memory_whatever_its_size(tmp_path: Path, name: str) -> None:
    with HostileServer(ANSWERS[name]) as server:
        done = drive(tmp_path, NINE + "finish(20)\n" + PRINT_PEAK, **LOGS, **server.environment)
    assert int(done.stdout) < PEAK
    counts = lost(done)
    if name == "rejects at length":
        assert counts == {("log_event", "rejected"): 2}
        assert "(2 of the logs rejected: xxxxx" in done.stderr
    elif "refuses" in name or "busy" in name:
        assert counts == {("log_event", "refused"): 9}
    assert max(map(len, done.stderr.splitlines()), default=0) < 400


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_an_answer_of_grpc_takes_no_memory_whatever_its_size(
    tmp_path: Path, unlimited_grpc: None, compression: grpc.Compression
) -> None:
    """Sixty megabytes are 60 kB as gzip, which is not too much to be read."""
    with HostileGrpc("x" * 60 * 2**20, compression) as receiver:
        done = drive(
            tmp_path, NINE + "finish(20)\n" + PRINT_PEAK, **LOGS, **receiver.environment("grpc")
        )
    assert int(done.stdout) < PEAK
    is_read = compression is grpc.Compression.Gzip
    expected = {("log_event", "rejected"): 2} if is_read else {("log_event", "unconfirmed"): 9}
    assert lost(done) == expected


@pytest.fixture
def blackhole() -> Iterator[str]:
    """An address that takes no connection and refuses none."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for client in waiting:
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        for client in waiting:
            client.close()


# the end alone bounds what is waited for
PATIENT = {"OTEL_EXPORTER_OTLP_TIMEOUT": "600"}
FINISH_EARLY = (
    NINE
    + """
started = time.monotonic()
finish(20)
assert time.monotonic() - started < 15
"""
)


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_what_was_never_reached_gets_less_time_than_there_is(
    tmp_path: Path, blackhole: str, protocol: str
) -> None:
    """Only an end before the deadline is explained."""
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": blackhole, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
    done = drive(tmp_path, NINE + "finish(4)", **LOGS, **PATIENT, **environ)
    assert lost(done) == {("log_event", "unconfirmed"): 9}
    assert "cannot take the data (failed to connect by the end of the program)" in done.stderr


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_what_never_answers_gets_less_time_than_there_is(tmp_path: Path, protocol: str) -> None:
    with Receiver("never") as receiver:
        environ = receiver.environment(protocol)
        done = drive(tmp_path, NINE + "finish(4)", **LOGS, **PATIENT, **environ)
    assert lost(done) == {("log_event", "unconfirmed"): 9}
    assert "did not answer (no answer by the end of the program)" in done.stderr


@pytest.mark.parametrize(
    ("name", "reason"),
    [("is busy", "refused"), ("asks to wait", "refused"), ("resets", "unconfirmed")],
)
def test_what_never_accepted_anything_gets_less_time_than_there_is(
    tmp_path: Path, name: str, reason: str
) -> None:
    with HostileServer(ANSWERS[name]) as server:
        done = drive(tmp_path, FINISH_EARLY, **LOGS, **PATIENT, **server.environment)
    assert lost(done) == {("log_event", reason): 9}


DRIPPING = ["drips its head", "drips its body", "continues for ever"]


@pytest.mark.parametrize("name", [*DRIPPING, "is silent"])
def test_what_was_cut_off_at_the_end_counts_as_unconfirmed(tmp_path: Path, name: str) -> None:
    """A head that ends early looks like a whole one."""
    with HostileServer(ANSWERS[name]) as server:
        done = drive(tmp_path, NINE + "finish(3)", **LOGS, **PATIENT, **server.environment)
    assert lost(done) == {("log_event", "unconfirmed"): 9}


@pytest.mark.parametrize("name", DRIPPING)
def test_a_request_ends_at_its_timeout_while_the_answer_drips(tmp_path: Path, name: str) -> None:
    timeout = {"OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    with HostileServer(ANSWERS[name]) as server:
        done = drive(
            tmp_path,
            NINE + "finish(60)\n" + PRINT_PEAK,
            **LOGS,
            **timeout,
            **server.environment,
        )
    assert lost(done) == {("log_event", "unconfirmed"): 9}
    assert "did not answer (ReadTimeout: Read timed out); it is too slow" in done.stderr


def assert_is_fit_to_print(text: str) -> None:
    """Check that a text has no control characters and nothing of the secret."""
    assert all(char.isprintable() or char == "\n" for char in text), text
    for secret in (SECRET, SECRET.upper(), base64.b64encode(SECRET.encode()).decode()):
        assert secret not in text
    assert SECRET[:8] not in text and SECRET[-8:] not in text


ECHO = answers(f"401 {ESCAPES}sent {{authorization}} {SECRET.upper()} {'y' * 3000}")
ECHOED = (
    f"{ESCAPES}sent Bearer {SECRET}, {base64.b64encode(SECRET.encode()).decode()}, "
    f"Bearer%20{SECRET} {SECRET * 100}"
)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_what_a_server_says_is_fit_to_print(tmp_path: Path, protocol: str) -> None:
    server: Any = (
        HostileServer(ECHO)
        if protocol == "http"
        else HostileGrpc(ECHOED, error=grpc.StatusCode.UNAUTHENTICATED)
    )
    with server:
        environ = server.environment if protocol == "http" else server.environment("grpc")
        done = drive(tmp_path, NINE + "finish(20)", **LOGS, **HEADERS, **environ)
        probed = drive(
            tmp_path,
            "from otel_torch.telemetry.probe import probe\n"
            "for result in probe(os.environ): print(result.detail)",
            **HEADERS,
            **environ,
        )
        path = write(tmp_path / "logs.jsonl", log_line("a"))
        sent = run_send(tmp_path, path, **HEADERS, **environ)
    for text in (done.stderr, probed.stdout, sent.stdout, sent.stderr):
        assert_is_fit_to_print(text)
        assert max(map(len, text.splitlines())) < 400
    for text in (done.stderr, probed.stdout, sent.stderr):
        assert "it denies access: check OTEL_EXPORTER_OTLP_HEADERS" in text


@pytest.mark.parametrize("name", DRIPPING)
def test_send_ends_while_an_answer_drips(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "logs.jsonl", log_line("a"))
    timeout = {"OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    with HostileServer(ANSWERS[name]) as server:
        done = run_send(tmp_path, path, "--give-up", "1", **timeout, **server.environment)
    assert done.returncode == 1
    assert "1 line not delivered" in done.stdout
    assert "did not answer" in done.stderr
