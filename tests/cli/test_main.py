"""The command line: exit statuses, errors as one line on stderr, never a traceback, and a doctor that
does not reveal secrets.
"""

import dataclasses
import json
import os
import socket
import subprocess
import sys

import numpy
import pytest

from otel_torch import __version__
from otel_torch.cli import doctor
from otel_torch.cli import main as cli
from otel_torch.settings import Settings
from tests.support import environment, run_command

SECRET = "hunter2"


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("OTEL_", "FASTVIDEO_")) or name == "RANK":
            monkeypatch.delenv(name)


@pytest.fixture
def undelivered(monkeypatch):
    """Keep the doctor from sending probes; their delivery is tested elsewhere."""
    monkeypatch.setattr(
        doctor,
        "CHECKS",
        tuple(check for check in doctor.CHECKS if check is not doctor.find_delivery),
    )


def test_help_lists_every_command_and_imports_none():
    code = "import sys; from otel_torch.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: print(sorted(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert all(f"    {name}" in shown for name in cli.COMMANDS)
    loaded = shown.splitlines()[-1]
    assert not any(
        f"'{module}'" in loaded
        for module in ("torch", "opentelemetry", *(home for home, _ in cli.COMMANDS.values()))
    )


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: otel-torch {name}")


def test_version():
    result = run_command("--version")
    assert (result.returncode, result.stdout) == (0, f"otel-torch {__version__}\n")


@pytest.mark.parametrize(
    "arguments, reported",
    [
        ([], "required: COMMAND"),
        (["dance"], "invalid choice: 'dance'"),
        (["doctor", "--loud"], "unrecognized arguments: --loud"),
        (["run"], "nothing to run"),
        (["run", "no_such_program"], "no_such_program: no such command"),
        (["run", "train.py"], "did you mean: otel-torch run python train.py"),
        (["show", "no/such/recording.jsonl"], "no/such/recording.jsonl"),
    ],
)
def test_bad_usage_is_status_2_and_one_line(arguments, reported):
    result = run_command(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("otel_torch: ") and reported in line


@pytest.mark.parametrize("word", ["report", "view", "compare", "list", "rm"])
def test_a_command_that_resembles_none_is_answered_by_the_list_of_them(word, capsys):
    assert cli.main([word]) == 2
    assert f"choose from {', '.join(cli.COMMANDS)}" in capsys.readouterr().err


COMMANDS_THAT_IMPORT_TORCH = {
    "doctor": ["doctor"],
    "import": ["import", "dump.npz"],
    "scan": ["scan", "model.py:Net", "--input", "input=1x2"],
}


@pytest.mark.parametrize("name", COMMANDS_THAT_IMPORT_TORCH)
def test_a_command_does_not_record_itself(name, tmp_path):
    numpy.savez(tmp_path / "dump.npz", fc=numpy.ones(3))
    (tmp_path / "model.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Linear):\n"
        "    def __init__(self):\n        super().__init__(2, 2)\n"
    )
    # a forked interpreter has imported this package, and hides that its modules wait for each other
    command = [sys.executable, "-m", "otel_torch", *COMMANDS_THAT_IMPORT_TORCH[name]]
    environ = environment(tmp_path / "recorded")
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done
    expected = {"import": "otel_torch: 1 records in dump.recording.jsonl\n"}
    assert done.stderr == expected.get(name, "")
    assert not (tmp_path / "recorded").exists()


def test_an_internal_error_is_one_line_too(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "run", lambda arguments: [][1])
    assert cli.main(["doctor"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "doctor: IndexError" in line


def test_a_reader_that_closes_the_pipe_is_not_an_error():
    code = "import sys; from otel_torch.cli import doctor, main; doctor.run = lambda _: [print('x' * 10000) for _ in range(100)] and 0"
    program = f"{code}; sys.exit(main.main(['doctor']))"
    writer = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    writer.stdout.read(1)
    writer.stdout.close()
    assert (writer.stderr.read(), writer.wait(60)) == (b"", 0)


def test_run_passes_on_the_program_s_options_and_accepts_a_double_dash(tmp_path):
    for separator in ([], ["--"]):
        result = run_command(
            "run",
            *separator,
            sys.executable,
            "-c",
            "import sys; print(sys.argv)",
            "--version",
            "-x",
        )
        assert (result.returncode, result.stdout) == (0, "['-c', '--version', '-x']\n")


# doctor


def findings(capsys, expected=None, **variables):
    status = cli.main(["doctor", "--json"])
    printed = capsys.readouterr().out
    report = json.loads(printed)
    assert report["schema"] == "otel_torch.doctor/1"
    assert status == (0 if report["ok"] else 2)
    return (
        report["ok"],
        [(row["about"], row["ok"], row["text"]) for row in report["findings"]],
        printed,
    )


def test_doctor_with_nothing_set_is_fine(capsys, undelivered, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fine, rows, _ = findings(capsys)
    assert fine
    texts = [text for _, _, text in rows]
    assert any(text.startswith("torch 2") for text in texts)
    assert "OTEL_TORCH_ENABLED is off: nothing is recorded" in texts
    assert sum("no endpoint is named" in text for text in texts) == 3
    assert os.listdir(tmp_path) == []


def test_doctor_shows_values_of_its_own_variables_only(capsys, undelivered, monkeypatch):
    monkeypatch.setenv("OTEL_TORCH_MODULES", r"^blocks\.")
    monkeypatch.setenv("FASTVIDEO_TRACE_STEPS", "0-3")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization={SECRET}")
    monkeypatch.setenv(
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        f"https://me:{SECRET}@collector.example:4318/{SECRET}?key={SECRET}",
    )
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", f"token={SECRET}")
    fine, rows, printed = findings(capsys)
    assert fine and SECRET not in printed
    texts = [text for _, _, text in rows]
    assert r"OTEL_TORCH_MODULES=^blocks\.: from the environment" in texts
    assert "FASTVIDEO_TRACE_STEPS=0-3: from the environment" in texts
    assert "OTEL_EXPORTER_OTLP_HEADERS (value not shown): from the environment" in texts
    assert "traces: to https://collector.example:4318" in texts
    assert any(about == "record" and r"/^blocks\./" in text for about, _, text in rows)


def test_doctor_says_which_source_wins_for_every_variable_that_is_set(tmp_path):
    file = tmp_path / "otel.yaml"
    file.touch()
    variables = {
        "FASTVIDEO_TRACE_LAYERS": "x",
        "FASTVIDEO_TRACE_STATS": "mean",
        "OTEL_CONFIG_FILE": str(file),
        "OTEL_SERVICE_NAME": "x",
        "OTEL_TORCH_MODULES": "blocks",
        "OTEL_TORCH_NVTX": "maybe",
        "OTEL_TORCH_STEPS": "soon",
        "OTEL_TRACES_EXPORTER": "console",
    }
    found = [(row.ok, row.text) for row in doctor.find_settings(variables) if row.about == "set"]
    assert [text for ok, text in found if ok is None] == [
        "FASTVIDEO_TRACE_LAYERS=x: not used, because OTEL_TORCH_MODULES is set",
        "FASTVIDEO_TRACE_STATS=mean: from the environment",
        "OTEL_CONFIG_FILE (value not shown): from the environment",
        "OTEL_SERVICE_NAME (value not shown): from the environment",
        "OTEL_TORCH_MODULES=blocks: from the environment",
        "OTEL_TORCH_NVTX=maybe: not used, the default is",
        "OTEL_TORCH_STEPS=soon: not used, and nothing is recorded",
        "OTEL_TRACES_EXPORTER (value not shown): not used, because OTEL_CONFIG_FILE is set",
        "what a program passes to otel_torch.start() wins over these",
    ]
    wrong = [text for ok, text in found if ok is False]
    assert wrong and all(text.startswith("OTEL_TORCH_STEPS") for text in wrong)


def test_doctor_says_that_a_disabled_sdk_wins():
    variables = {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1"}
    endpoint = next(row.text for row in doctor.find_settings(variables) if row.about == "set")
    assert endpoint.endswith("not used, because OTEL_SDK_DISABLED is set")


@pytest.mark.parametrize(
    "name, value, reported",
    [
        ("OTEL_TORCH_MODULES", "(", "not a regular expression"),
        ("OTEL_TORCH_STEPS", "soon", "0,2,10-20"),
        ("OTEL_TORCH_STATS", "mean,average", "unknown entry 'average' is skipped"),
        ("OTEL_TORCH_ENABLED", "perhaps", "1/true/yes/on"),
        ("OTEL_TORCH_STAT", "mean", "did you mean OTEL_TORCH_STATS?"),
        ("OTEL_TORCH_JSONL", "/dev/null/recording.jsonl", "cannot be written"),
        ("OTEL_TORCH_JSONL", "/", "is a folder"),
    ],
)
def test_doctor_finds_settings_that_cannot_work(
    capsys, undelivered, monkeypatch, name, value, reported
):
    monkeypatch.setenv(name, value)
    fine, rows, _ = findings(capsys)
    assert not fine
    assert any(ok is False and reported in text for _, ok, text in rows), rows


def test_doctor_as_text_marks_problems(capsys, undelivered, monkeypatch):
    monkeypatch.setenv("OTEL_TORCH_MODULES", "(")
    assert cli.main(["doctor"]) == 2
    assert any(line.startswith("NO set") for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    "variables, lines",
    [
        ({}, ["OTEL_TORCH_ENABLED=1 PROGRAM_COMMAND"]),
        ({"OTEL_TORCH_ENABLED": "1"}, []),
        ({"OTEL_TORCH_MODULES": "("}, ["otel-torch doctor"]),
        (
            {"OTEL_TORCH_STAT": SECRET},
            ["OTEL_TORCH_STATS=VALUE PROGRAM_COMMAND", "otel-torch doctor"],
        ),
    ],
)
def test_doctor_says_what_to_do_next(capsys, undelivered, monkeypatch, tmp_path, variables, lines):
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    cli.main(["doctor"])
    text = capsys.readouterr().out
    assert [
        line.strip() for line in text.partition("Next: ")[2].splitlines() if line[0] == " "
    ] == lines
    cli.main(["doctor", "--json"])
    printed = capsys.readouterr().out
    steps = json.loads(printed)["next"]
    assert [
        " ".join(
            [
                *(f"{name}={value}" for name, value in step.get("environment", {}).items()),
                *step["command"],
            ]
        )
        for step in steps
    ] == lines
    assert SECRET not in printed + text


def test_doctor_survives_a_check_that_fails(capsys, monkeypatch):
    def find_trouble(environ):
        raise RuntimeError("trouble")
        yield

    monkeypatch.setattr(doctor, "CHECKS", (find_trouble, doctor.find_versions))
    fine, rows, _ = findings(capsys)
    assert (
        not fine and rows[0] == ("find_trouble", False, "RuntimeError: trouble") and len(rows) > 1
    )


@pytest.mark.parametrize(
    "variables, traces",
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1"}, "to http://a:1"),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1",
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://[::1]:2/v1",
            },
            "to http://[::1]:2",
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "a:1"}, "to a:1"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:port"}, "to an address that cannot be read"),
        ({"OTEL_TRACES_EXPORTER": "console"}, "to the exporter that OTEL_TRACES_EXPORTER names"),
        (
            {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1"},
            "not exported, OTEL_TRACES_EXPORTER is none",
        ),
    ],
)
def test_doctor_reports_the_destination_of_each_signal(variables, traces):
    assert next(iter(doctor.find_endpoints(variables))).text == f"traces: {traces}"


def test_doctor_says_what_to_set_for_jaeger():
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1"}
    *_, activations = doctor.find_endpoints(endpoint)
    assert activations.text == "activations: with the logs, which Jaeger does not store"
    assert activations.next_step.environment["OTEL_TORCH_SIGNALS"] == "spans,span_events"
    for signals in ("spans,span_events", "spans,span_events,log_events", "metrics"):
        results = doctor.find_endpoints(endpoint | {"OTEL_TORCH_SIGNALS": signals})
        assert [result.text.split(":")[0] for result in results] == ["traces", "metrics", "logs"]


def test_doctor_names_the_configuration_file(tmp_path):
    file = tmp_path / "otel.yaml"
    variables = {
        "OTEL_CONFIG_FILE": str(file),
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1",
    }
    (missing,) = doctor.find_endpoints(variables)
    assert (missing.ok, missing.text) == (False, f"OTEL_CONFIG_FILE: {file} is no file")
    file.touch()
    (named,) = doctor.find_endpoints(variables)
    assert named.ok is None and named.text.startswith(f"as {file} says (OTEL_CONFIG_FILE)")


def test_doctor_checks_only_enabled_signals(monkeypatch):
    with socket.socket() as unheard:  # bound, but not listening
        unheard.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_TORCH_SIGNALS": "spans"}
        findings = {
            finding.text.split(":")[0]: finding for finding in doctor.find_delivery(environ)
        }
    assert {signal: finding.ok for signal, finding in findings.items()} == {
        "traces": False,
        "metrics": None,
        "logs": None,
    }
    assert "OTEL_TORCH_SIGNALS does not ask for it" in findings["logs"].text


def test_the_environment_module_knows_every_setting():
    from otel_torch.startup import environment_variables

    names = {row.metadata["name"] for row in dataclasses.fields(Settings)}
    assert names <= set(dir(environment_variables))
