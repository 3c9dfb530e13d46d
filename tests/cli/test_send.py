"""`otel-torch send`: all data on disk arrives once, whatever interrupts it; failures are reported
and retried.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import signal
import subprocess
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest

from otel_torch.cli.send import parse_rate
from otel_torch.telemetry.otlp import replay
from otel_torch.telemetry.otlp.replay import ReplayOutcome
from otel_torch.telemetry.otlp.replay_endpoint import Endpoint, RateLimit
from otel_torch.telemetry.otlp.send_progress import Ranges
from tests.e2e.ports import free_port
from tests.interpreters import command_of_tests
from tests.otlp_contents import CLASSES, items, read
from tests.otlp_receiver import Receiver
from tests.support import environment, run_python
from tests.telemetry.otlp.test_otlp_file import ALL, PROGRAM

pytestmark = pytest.mark.scoreboard
PROTOCOLS = pytest.mark.parametrize("protocol", ["grpc", "http"])


def start_send(tmp_path: Path, *arguments: str | Path, **variables: str) -> subprocess.Popen[str]:
    environ = environment(tmp_path, **variables) | {"OTEL_TORCH_ENABLED": "0"}
    command = [command_of_tests("otel-torch"), "send", *map(str, arguments)]
    return subprocess.Popen(
        command,
        env=environ,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_send(
    tmp_path: Path, *arguments: str | Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    process = start_send(tmp_path, *arguments, **variables)
    out, err = process.communicate(timeout=240)
    assert "Traceback" not in err, err
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def log_line(*bodies: str, attribute: str = "") -> str:
    """Return a line of log records, as any exporter writes it."""
    attributes = [{"key": "a", "value": {"stringValue": attribute}}]
    records = [
        {"timeUnixNano": "1", "body": {"stringValue": body}, "attributes": attributes}
        for body in bodies
    ]
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "s"}}]}
    return json.dumps(
        {"resourceLogs": [{"resource": resource, "scopeLogs": [{"logRecords": records}]}]}
    )


def metric_line(points: int) -> str:
    padding = [{"key": "padding", "value": {"stringValue": "x" * 100}}]
    found = [
        {"timeUnixNano": str(n), "asInt": str(n), "attributes": padding} for n in range(points)
    ]
    return json.dumps(
        {
            "resourceMetrics": [
                {"scopeMetrics": [{"metrics": [{"name": "m", "gauge": {"dataPoints": found}}]}]}
            ]
        }
    )


SPAN_LINE = json.dumps(
    {
        "resourceSpans": [
            {"scopeSpans": [{"spans": [{"name": "one", "traceId": "01" * 16, "spanId": "02" * 8}]}]}
        ]
    }
)


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def many(path: Path, number: int = 30) -> Path:
    """Write a file of several messages: lines of 300 kB and more."""
    return write(path, *(log_line(str(n), attribute="x" * 300_000) for n in range(number)))


def bodies(receiver: Receiver) -> Counter[str]:
    return Counter(record["body"] for record in receiver.log_records())


def all_of(number: int) -> Counter[str]:
    return Counter(map(str, range(number)))


class Flaky(Receiver):
    """Accepts `accepts` requests and then changes to mode `then`; refuses requests that contain
    `bad`.
    """

    def __init__(self, accepts: int, then: str, *, bad: bytes = b"") -> None:
        super().__init__()
        self.accepts, self.then, self.bad = accepts, then, bad
        self.stuck = threading.Event()

    def choose_mode(self) -> None:
        if self.accepts == 0:
            self.mode = self.then
        self.accepts -= 1
        if self.mode == "never":
            self.stuck.set()

    def _answer_grpc(self, signal: str, request: Any, context: Any) -> Any:
        if self.bad and self.bad in request.SerializeToString():
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not to my liking")
        return super()._answer_grpc(signal, request, context)


# -- everything arrives


@PROTOCOLS
def test_a_run_that_was_written_and_sent_live_arrives_twice_the_same(
    tmp_path: Path, protocol: str
) -> None:
    with Receiver() as live, Receiver() as later:
        variables = ALL | live.environment(protocol)
        run_python(tmp_path, PROGRAM, OTEL_TORCH_OTLP_FILE="otlp", **variables)
        done = run_send(tmp_path, "otlp", **later.environment(protocol))
        again = run_send(tmp_path, "otlp", "--json", **later.environment(protocol))
    assert done.returncode == again.returncode == 0 and done.stderr == again.stderr == ""
    written = read(tmp_path / "otlp")
    for kind in CLASSES:
        assert (
            items(kind, later.requests[kind])
            == items(kind, live.requests[kind])
            == items(kind, written[kind])
        )
    number = sum(items("logs", later.requests["logs"]).values())
    assert done.stdout.splitlines()[0] == f"otlp/logs.jsonl: {number} log records accepted"
    assert [
        (file["requests"], file["already_lines"] > 0) for file in json.loads(again.stdout)["files"]
    ] == [(0, True)] * 3


def test_lines_of_one_file_are_put_together_to_messages(tmp_path: Path) -> None:
    path = many(tmp_path / "logs.jsonl")
    with Receiver() as receiver:
        run_send(tmp_path, path, **receiver.environment())
    assert bodies(receiver) == all_of(30)
    assert 5 <= len(receiver.requests["logs"]) <= 6 and max(receiver.sizes) <= replay.MESSAGE_BYTES


@PROTOCOLS
def test_headers_compression_and_signals_own_endpoints_are_those_of_the_standard_variables(
    tmp_path: Path, protocol: str
) -> None:
    path = write(tmp_path / "any.json", log_line("0"), SPAN_LINE, metric_line(3), log_line("1"))
    with Receiver() as receiver, Receiver() as second_receiver:
        variables = receiver.environment(protocol) | {"OTEL_EXPORTER_OTLP_HEADERS": "x-team=video"}
        log_endpoint = (
            second_receiver.grpc_endpoint
            if protocol == "grpc"
            else f"{second_receiver.http_endpoint}/v1/logs"
        )
        variables |= {
            "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": log_endpoint,
            "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
        }
        done = run_send(tmp_path, path, **variables)
    assert done.returncode == 0
    assert done.stdout == f"{path}: 2 log records, 1 span, 3 data points accepted\n"
    assert bodies(second_receiver) == all_of(2) and not receiver.log_records()
    assert [span["name"] for span in receiver.spans()] == ["one"] and len(
        receiver.metric_points()
    ) == 3
    assert {headers["x-team"] for headers in receiver.headers + second_receiver.headers} == {
        "video"
    }
    if protocol == "http":
        assert {headers["content-encoding"] for headers in receiver.headers} == {"gzip"}


@PROTOCOLS
def test_what_is_larger_than_a_message_is_sent_in_parts(tmp_path: Path, protocol: str) -> None:
    large = log_line(*map(str, range(100)), attribute="x" * 90_000)
    files = [
        write(tmp_path / "logs.jsonl", large),
        write(tmp_path / "metrics.jsonl", metric_line(50_000)),
    ]
    with Receiver() as receiver:
        done = run_send(tmp_path, *files, **receiver.environment(protocol))
        assert (
            run_send(tmp_path, *files, "--json", **receiver.environment(protocol)).returncode == 0
        )
    assert done.returncode == 0, done.stderr
    assert bodies(receiver) == all_of(100)
    assert Counter(point["value"] for point in receiver.metric_points()) == Counter(range(50_000))
    assert max(receiver.sizes) < 4 * 2**20


# -- cut off, and again


@PROTOCOLS
def test_a_receiver_that_goes_away_half_way_gets_the_rest_later_and_nothing_twice(
    tmp_path: Path, protocol: str
) -> None:
    path = many(tmp_path / "logs.jsonl")
    with Flaky(3, "unavailable") as receiver:
        done = run_send(tmp_path, path, "--give-up", "0", **receiver.environment(protocol))
        first = bodies(receiver)
        receiver.mode = "accept"
        again = run_send(tmp_path, path, "--json", **receiver.environment(protocol))
    assert done.returncode == 1 and "cannot take the data" in done.stderr
    assert 0 < len(first) < 30
    assert (
        f"{len(first)} log records accepted; {30 - len(first)} lines not delivered" in done.stdout
    )
    assert again.returncode == 0 and json.loads(again.stdout)["files"][0]["already_lines"] == len(
        first
    )
    assert bodies(receiver) == all_of(30)


def test_a_sender_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    path = many(tmp_path / "logs.jsonl")
    with Flaky(2, "never") as receiver:
        process = start_send(tmp_path, path, **receiver.environment())
        assert receiver.stuck.wait(60)
        process.kill()
        process.communicate()
        first = bodies(receiver)
        receiver.mode = "accept"
        assert run_send(tmp_path, path, **receiver.environment()).returncode == 0
        assert 0 < len(first) < 30 and bodies(receiver) == all_of(30)


def test_a_sender_that_is_interrupted_says_how_to_go_on(tmp_path: Path) -> None:
    path = many(tmp_path / "logs.jsonl")
    with Flaky(2, "never") as receiver:
        process = start_send(
            tmp_path, path, OTEL_EXPORTER_OTLP_TIMEOUT="60", **receiver.environment("http")
        )
        assert receiver.stuck.wait(60)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (
            130,
            "otel_torch: stopped; run the same command to continue\n",
        )
        receiver.mode = "accept"
        assert run_send(tmp_path, path, **receiver.environment("http")).returncode == 0
        assert bodies(receiver) == all_of(30)


def test_parts_of_a_large_line_are_not_sent_twice(tmp_path: Path) -> None:
    path = write(tmp_path / "logs.jsonl", log_line(*map(str, range(100)), attribute="x" * 90_000))
    with Flaky(1, "unavailable") as receiver:
        assert run_send(tmp_path, path, "--give-up", "0", **receiver.environment()).returncode == 1
        assert 0 < len(bodies(receiver)) < 100
        receiver.mode = "accept"
        assert run_send(tmp_path, path, **receiver.environment()).returncode == 0
    assert bodies(receiver) == all_of(100)


@PROTOCOLS
def test_what_is_not_taken_is_tried_again(tmp_path: Path, protocol: str) -> None:
    path = write(tmp_path / "logs.jsonl", log_line("0"))
    with Receiver("unavailable") as receiver:
        receiver.recover_after_failures = 3
        done = run_send(tmp_path, path, **receiver.environment(protocol))
    assert done.returncode == 0 and bodies(receiver) == all_of(1)
    assert len(done.stderr.splitlines()) == 1 and done.stderr.endswith(
        ". Retrying for up to 60 s\n"
    )


def test_a_file_that_grows_is_sent_from_where_it_ended(tmp_path: Path) -> None:
    path = write(tmp_path / "logs.jsonl", log_line("0"))
    with Receiver() as receiver:
        for number in (1, 2):
            run_send(tmp_path, path, **receiver.environment())
            with path.open("a") as file:
                file.write(log_line(str(number)) + "\n")
        run_send(tmp_path, path, **receiver.environment())
    assert bodies(receiver) == all_of(3)


def test_a_last_line_without_an_end_is_sent_once(tmp_path: Path) -> None:
    path = tmp_path / "logs.jsonl"
    path.write_text(log_line("0"))
    with Receiver() as receiver:
        run_send(tmp_path, path, **receiver.environment())
        write(path, log_line("0"), log_line("1"))
        run_send(tmp_path, path, **receiver.environment())
    assert bodies(receiver) == all_of(2)


def test_a_line_that_a_kill_cut_off_is_said_and_no_error(tmp_path: Path) -> None:
    path = tmp_path / "logs.jsonl"
    path.write_text(log_line("0") + "\n" + log_line("1")[:50])
    only = tmp_path / "only.jsonl"
    only.write_text(log_line("1")[:50])
    with Receiver() as receiver:
        done = run_send(tmp_path, path, only, **receiver.environment())
        write(path, log_line("0"), log_line("1"))
        later = run_send(tmp_path, path, **receiver.environment())
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert first == f"{path}: 1 log record accepted; the last line was cut off and is skipped"
    assert second == f"{only}: the last line was cut off and is skipped"
    assert later.returncode == 0 and bodies(receiver) == all_of(2)


def test_a_file_that_was_renamed_is_known_and_one_in_its_place_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "logs.jsonl", log_line("0"))
    with Receiver() as receiver:
        run_send(tmp_path, path, **receiver.environment())
        path.rename(tmp_path / "logs.1.jsonl")
        write(path, log_line("1"))
        done = run_send(tmp_path, tmp_path, **receiver.environment())
    assert done.returncode == 0 and bodies(receiver) == all_of(2)
    assert done.stderr.count("logs.jsonl is not the file that was sent before") == 1


def test_another_file_that_begins_alike_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "logs.jsonl", log_line("0"), log_line("1"))
    with Receiver() as receiver:
        run_send(tmp_path, path, **receiver.environment())
        write(path, log_line("0"), log_line("2"))
        done = run_send(tmp_path, path, **receiver.environment())
    assert "is not the file that was sent before" in done.stderr and bodies(receiver) == Counter(
        {"0": 2, "1": 1, "2": 1}
    )


def test_another_receiver_gets_all_of_it_and_so_does_one_that_is_to_get_it_again(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "logs.jsonl", log_line("0"))
    with Receiver() as one, Receiver() as second_receiver:
        for arguments in ((one,), (second_receiver,), (one, "--again"), (second_receiver,)):
            receiver, *options = arguments
            assert run_send(tmp_path, path, *options, **receiver.environment()).returncode == 0
    assert (bodies(one)["0"], bodies(second_receiver)["0"]) == (2, 1)


def test_where_nothing_can_be_kept_everything_arrives_and_it_is_said(tmp_path: Path) -> None:
    path = write(tmp_path / "logs.jsonl", log_line("0"))
    with Receiver() as receiver:
        run_send(tmp_path, path, **receiver.environment())
        (beside,) = tmp_path.glob(".otel-torch-sent.*")
        beside.unlink()
        beside.mkdir()
        done = run_send(tmp_path, path, **receiver.environment())
    assert done.returncode == 0 and bodies(receiver)["0"] == 2
    assert "cannot be stored beside" in done.stderr
    assert [name.name for name in tmp_path.glob(".otel-torch-sent.*")] == [beside.name]


# -- not everything is taken


@PROTOCOLS
def test_what_a_receiver_rejects_is_counted_and_not_sent_again(
    tmp_path: Path, protocol: str
) -> None:
    path = write(tmp_path / "logs.jsonl", log_line("0", "1", "2"))
    with Receiver("reject", rejecting=2) as receiver:
        done = run_send(tmp_path, path, **receiver.environment(protocol))
        again = run_send(tmp_path, path, **receiver.environment(protocol))
    assert (done.returncode, again.returncode, len(receiver.requests["logs"])) == (1, 0, 1)
    assert "1 log record accepted; 2 log records rejected by the receiver" in done.stdout
    assert "2 of the logs rejected: not all of it" in done.stderr


@PROTOCOLS
def test_what_a_receiver_refuses_is_counted_and_tried_next_time(
    tmp_path: Path, protocol: str
) -> None:
    path = write(tmp_path / "logs.jsonl", log_line("0"), log_line("1"))
    with Receiver("refuse") as receiver:
        done = run_send(tmp_path, path, **receiver.environment(protocol))
        receiver.mode = "accept"
        again = run_send(tmp_path, path, **receiver.environment(protocol))
    assert done.returncode == 1 and f"{path}: 2 log records refused" in done.stdout
    assert "refuses the data" in done.stderr
    assert again.returncode == 0 and bodies(receiver) == all_of(2)


def test_one_line_that_is_refused_takes_no_other_with_it(tmp_path: Path) -> None:
    path = write(
        tmp_path / "logs.jsonl",
        *(log_line(str(n), attribute="bad" if n == 11 else "") for n in range(20)),
    )
    with Flaky(-1, "accept", bad=b"bad") as receiver:
        done = run_send(tmp_path, path, **receiver.environment())
    assert done.returncode == 1 and "19 log records accepted; 1 log record refused" in done.stdout
    assert bodies(receiver) == all_of(20) - Counter({"11": 1})


def test_a_receiver_that_lets_nobody_in_is_not_asked_for_each_line(tmp_path: Path) -> None:
    with Receiver() as receiver:
        endpoint = f"{receiver.http_endpoint}/v1/nothing"  # answered with 404
        done = run_send(tmp_path, many(tmp_path / "logs.jsonl"), "--json", OTEL_EXPORTER_OTLP_LOGS_ENDPOINT=endpoint,
                        OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf")  # fmt: skip
    (file,) = json.loads(done.stdout)["files"]
    assert (done.returncode, file["requests"], file["undelivered_lines"]) == (1, 1, 30)
    assert "its address has to end in /v1/logs" in done.stderr


@PROTOCOLS
def test_a_receiver_that_speaks_no_tls_is_not_asked_for_long(tmp_path: Path, protocol: str) -> None:
    path = write(tmp_path / "logs.jsonl", log_line("0"))
    with Receiver() as receiver:
        variables = {
            name: value.replace("http:", "https:")
            for name, value in receiver.environment(protocol).items()
        }
        done = run_send(tmp_path, path, **variables)
    assert done.returncode == 1 and "1 line not delivered" in done.stdout
    assert (
        len(done.stderr.splitlines()) == 1
        and "it does not use TLS" in done.stderr
        and "Retrying" not in done.stderr
    )


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_nobody_there_is_one_line_and_status_1(tmp_path: Path, protocol: str) -> None:
    path = write(tmp_path / "any.jsonl", log_line("0"), SPAN_LINE)
    done = run_send(tmp_path, path, "--give-up", "0", "--json", OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
                    OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{free_port()}")  # fmt: skip
    (file,) = json.loads(done.stdout)["files"]
    assert (done.returncode, file["undelivered_lines"], file["accepted"]) == (1, 2, {})
    assert len(done.stderr.splitlines()) == 1 and "start a collector there" in done.stderr
    assert not list(tmp_path.glob(".otel-torch-sent.*"))


@PROTOCOLS
def test_no_answer_is_not_taken_for_one(tmp_path: Path, protocol: str) -> None:
    path = write(tmp_path / "logs.jsonl", log_line("0"))
    with Receiver("never") as receiver:
        done = run_send(
            tmp_path,
            path,
            "--give-up",
            "0",
            OTEL_EXPORTER_OTLP_TIMEOUT="1",
            **receiver.environment(protocol),
        )
    assert done.returncode == 1 and "1 line not delivered" in done.stdout


def test_lines_in_between_that_cannot_be_read_are_said_and_the_others_arrive(
    tmp_path: Path,
) -> None:
    path = write(
        tmp_path / "logs.jsonl", log_line("0"), "half a {", '{"resourceLogs": 3}', "", log_line("1")
    )
    with Receiver() as receiver:
        done = run_send(tmp_path, path, **receiver.environment())
    assert done.returncode == 2 and bodies(receiver) == all_of(2)
    assert "2 lines unreadable" in done.stdout
    assert len(done.stderr.splitlines()) == 1 and f"{path}, line 2: not JSON" in done.stderr


# -- bad input

SOMEWHERE = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    ("content", "variables", "said"),
    [
        (None, SOMEWHERE, "file.jsonl: No such file or directory"),
        ("hello\n", SOMEWHERE, "file.jsonl: no OTLP JSON: not JSON"),
        ("\x00\x01\n", SOMEWHERE, "file.jsonl: is binary, of no kind that is known here"),
        ('{"module": "a"}\n', SOMEWHERE, "resourceSpans, resourceMetrics, resourceLogs; this line holds none"),
        (log_line("0") + "\n", {}, "no usable endpoint for logs: set OTEL_EXPORTER_OTLP_ENDPOINT"),
        (log_line("0") + "\n", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9"}, "no usable endpoint for logs"),
        (log_line("0") + "\n", SOMEWHERE | {"OTEL_EXPORTER_OTLP_PROTOCOL": "smoke"}, "no usable endpoint for logs"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_status_2(
    tmp_path: Path, content: str | None, variables: dict[str, str], said: str
) -> None:
    if content is not None:
        (tmp_path / "file.jsonl").write_text(content)
    done = run_send(tmp_path, "file.jsonl", **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr.splitlines()[-1]
    assert (
        len(done.stderr.splitlines()) == 1
        or "OTEL_EXPORTER_OTLP_PROTOCOL='smoke' is not supported" in done.stderr
    )


def test_nothing_is_sent_where_one_of_the_files_is_none(tmp_path: Path) -> None:
    path = write(tmp_path / "logs.jsonl", log_line("0"))
    with Receiver() as receiver:
        assert run_send(tmp_path, path, "missing.jsonl", **receiver.environment()).returncode == 2
        (tmp_path / "empty").mkdir()
        assert run_send(tmp_path, path, "empty", **receiver.environment()).returncode == 2
        assert run_send(tmp_path, path, "--rate", "fast", **receiver.environment()).returncode == 2
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            done = run_send(tmp_path, path, **receiver.environment())
            assert done.returncode == 2 and "is being sent by another process" in done.stderr
    assert not receiver.requests["logs"]


@pytest.mark.parametrize(("name", "value"), [("TIMEOUT", "soon"), ("COMPRESSION", "brotli")])
def test_a_variable_that_no_exporter_can_be_made_of_is_one_line(
    tmp_path: Path, name: str, value: str
) -> None:
    path = write(tmp_path / "logs.jsonl", log_line("0"))
    done = run_send(tmp_path, path, **SOMEWHERE, **{f"OTEL_EXPORTER_OTLP_{name}": value})
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "OTEL_EXPORTER_OTLP_* variables for logs" in done.stderr and value in done.stderr


def test_an_empty_file_is_nothing_to_send(tmp_path: Path) -> None:
    (tmp_path / "logs.jsonl").write_text("")
    done = run_send(tmp_path, "logs.jsonl", **SOMEWHERE)
    assert (done.returncode, done.stdout) == (0, "logs.jsonl: nothing to send\n")


# -- pieces


def test_a_rate_spreads_messages_over_time() -> None:
    rate, now, waits = parse_rate("1MB/s"), 0.0, []
    for _ in range(4):
        waits.append(rate.wait_s(500_000, now))
        now += waits[-1]
    assert waits == [0.0, 0.5, 0.5, 0.5]
    assert (parse_rate("20/s").cost_s(10**9), parse_rate("4 MiB").cost_s(2**20)) == (0.05, 0.25)
    assert RateLimit().wait_s(10**9, 0.0) == RateLimit().cost_s(1) == 0.0
    for text in ("", "fast", "20", "-1MB", "0/s", "5 parsecs/s"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a rate"):
            parse_rate(text)


def test_the_rate_holds_for_every_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    with Receiver() as receiver:
        for name, value in receiver.environment().items():
            monkeypatch.setenv(name, value)
        endpoint = Endpoint(parse_rate("1/s"), 0.0, print, pauses.append)
        for _ in range(3):
            endpoint.send("logs", b"", ReplayOutcome("x"))
        endpoint.close()
    assert pauses[0] == 0.0 and all(0 < pause <= 2 for pause in pauses[1:])


class _Busy(BaseHTTPRequestHandler):
    answers: list[tuple[int, dict[str, str]]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        status, headers = self.answers.pop(0)
        self.send_response(status)
        for name, value in headers.items() | {("content-length", "0")}:
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def test_a_receiver_that_asks_for_time_gets_it_by_http(monkeypatch: pytest.MonkeyPatch) -> None:
    _Busy.answers = [(429, {"retry-after": "37"}), (503, {"retry-after": "41"}), (200, {})]
    server, pauses = HTTPServer(("127.0.0.1", 0), _Busy), list[float]()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv(
        "OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}"
    )
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    endpoint = Endpoint(RateLimit(), 60.0, lambda text: None, pauses.append)
    assert endpoint.send("logs", b"", ReplayOutcome("x")).kind == "accepted"
    endpoint.close()
    server.shutdown()
    server.server_close()
    assert [pause for pause in pauses if pause] == [37.0, 41.0]


def test_a_receiver_that_asks_for_time_gets_it_by_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    from google.rpc.error_details_pb2 import RetryInfo

    class Busy(Receiver):
        def _answer_grpc(self, signal: str, request: Any, context: Any) -> Any:
            if not self.headers:
                self.headers.append({})
                info = RetryInfo()
                info.retry_delay.seconds = 37
                context.set_trailing_metadata(
                    (("google.rpc.retryinfo-bin", info.SerializeToString()),)
                )
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "later")
            return super()._answer_grpc(signal, request, context)

    pauses: list[float] = []
    with Busy() as receiver:
        for name, value in receiver.environment().items():
            monkeypatch.setenv(name, value)
        endpoint = Endpoint(RateLimit(), 60.0, lambda text: None, pauses.append)
        assert endpoint.send("logs", b"", ReplayOutcome("x")).kind == "accepted"
        endpoint.close()
    assert [pause for pause in pauses if pause] == [37.0]


def test_what_is_repeated_without_an_answer_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from otel_torch.telemetry.otlp.answer import Answer

    class Silent:
        endpoint, protocol = "somewhere", "grpc"
        answers = [
            Answer("unconfirmed", "no answer"),
            Answer("unavailable", "busy"),
            Answer("accepted"),
        ]

        def send_request(self, message: bytes) -> Answer:
            return self.answers.pop(0)

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(
        "otel_torch.telemetry.otlp.transport.open_transport", lambda *given: Silent()
    )
    outcome = ReplayOutcome("x")
    assert (
        Endpoint(RateLimit(), 60.0, lambda text: None, lambda seconds: None)
        .send("logs", b"", outcome)
        .kind
        == "accepted"
    )
    assert (outcome.requests, outcome.sent_again) == (3, 1)


def test_exporters_of_another_make_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(
        "otel_torch.telemetry.otlp.grpc_transport.GrpcTransport",
        lambda *given: object().there_is_none,
    )  # type: ignore[attr-defined]
    from otel_torch.cli.main import main

    assert main(["send", str(write(tmp_path / "logs.jsonl", log_line("0")))]) == 2
    assert "version of OpenTelemetry's OTLP exporters is not supported" in capsys.readouterr().err


def test_ranges_hold_what_was_put_in() -> None:
    import random

    chance = random.Random(3)
    ranges, expected = Ranges(), set[int]()
    for _ in range(300):
        first = chance.randint(0, 200)
        last = first + chance.randint(1, 5)
        ranges.add(first, last)
        expected |= set(range(first, last))
        merged = list(ranges)
        assert {number for one in merged for number in range(*one)} == expected
        assert all(before[1] < after[0] for before, after in pairwise(merged))
        start, end = sorted(chance.sample(range(210), 2))
        assert {number for one in ranges.missing(start, end) for number in range(*one)} == set(
            range(start, end)
        ) - expected


def test_the_files_of_a_read_only_copy_are_found(tmp_path: Path) -> None:
    """A copied folder includes the progress of its files."""
    write(tmp_path / "a" / "logs.jsonl", log_line("0"))
    with Receiver() as receiver:
        run_send(tmp_path, "a", **receiver.environment())
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        assert run_send(tmp_path, "b", **receiver.environment()).returncode == 0
    assert bodies(receiver) == all_of(1) and os.listdir(tmp_path / "b")
