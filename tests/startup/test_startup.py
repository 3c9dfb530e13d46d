"""The switch: every kind of process is covered once, and an interpreter with the switch off does
nothing at all.

Everything runs in a small environment of its own with our real start-up file in it. Its torch is
one line and its bootstrap only notes that it was called: what is tested here is whether, when and
how often.
"""

import importlib
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import zipfile

import pytest

import otel_torch
from otel_torch.process.recorded_child import STARTUP_SITE

ROOT = pathlib.Path(otel_torch.__file__).parents[1]

BOOTSTRAP = """
import os, sys

started = False

def start_from_env():
    global started
    if started:
        return
    started = True
    torch = sys.modules.get("torch")
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(f"{os.getpid()} {getattr(torch, 'loaded', False)} {os.environ['OTEL_TORCH_RUN_ID']}\\n")

def stop():
    global started
    started = False
    with open(os.environ["CALLS"], "a") as calls:
        calls.write("stop\\n")
"""


def make_environment(folder, *, start_up_file):
    """Make a virtual environment with this package, a fake torch and a fake bootstrap."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = pathlib.Path(
        sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)})
    )
    shutil.copytree(
        ROOT / "otel_torch", site / "otel_torch", ignore=shutil.ignore_patterns("__pycache__")
    )
    (site / "otel_torch" / "bootstrap.py").write_text(BOOTSTRAP)
    (site / "torch.py").write_text("loaded = True\n")
    if start_up_file:
        shutil.copy(ROOT / "packaging" / "otel_torch.pth", site)
    return folder / "bin" / "python"


@pytest.fixture(scope="session")
def with_file(tmp_path_factory):
    return make_environment(tmp_path_factory.mktemp("with") / "venv", start_up_file=True)


@pytest.fixture(scope="session")
def without_file(tmp_path_factory):
    return make_environment(tmp_path_factory.mktemp("without") / "venv", start_up_file=False)


@pytest.fixture
def execute(tmp_path):
    """Run a program with `execute(python, program, …)`; the result has `calls`, the notes of the
    bootstrap.
    """

    def execute(python, program, *, flags=(), wrapper=(), **variables):
        path, calls = tmp_path / "program.py", tmp_path / "calls"
        path.write_text(textwrap.dedent(program))
        inherited = {
            name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ
        }
        environ = {**inherited, "CALLS": str(calls), **variables}
        command = [*map(str, wrapper), str(python), *flags, str(path)]
        result = subprocess.run(
            command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        result.calls = (
            [line.split() for line in calls.read_text().splitlines()] if calls.exists() else []
        )
        return result

    return execute


ON = {"OTEL_TORCH_ENABLED": "1"}


@pytest.mark.parametrize("word", ["1", "true", "YES", " On "])
def test_on_starts_once_after_torch_is_complete(execute, with_file, word):
    result = execute(with_file, "import torch, torch", OTEL_TORCH_ENABLED=word)
    assert (result.returncode, result.stderr) == (0, "")
    assert [complete for _, complete, _ in result.calls] == ["True"]


@pytest.mark.parametrize("word", [None, "", "0", "off", "False", " no "])
def test_off_is_off(execute, with_file, word):
    program = """
        import os, sys
        print([name for name in sys.modules if name.startswith("otel_torch")], "OTEL_TORCH_RUN_ID" in os.environ)
        print([finder for finder in sys.meta_path if "otel_torch" in type(finder).__module__])
        import torch
    """
    result = execute(with_file, program, **({} if word is None else {"OTEL_TORCH_ENABLED": word}))
    assert (result.stdout, result.stderr, result.calls) == ("[] False\n[]\n", "", [])


@pytest.mark.parametrize("switch", [{}, {"OTEL_TORCH_ENABLED": "0"}])
def test_the_line_of_the_start_up_file_does_nothing_but_read_the_environment(switch):
    """As SECURITY.md says: it imports nothing, opens nothing and starts nothing."""
    program = f"""
        import os, sys
        line = compile({(ROOT / "packaging" / "otel_torch.pth").read_text()!r}, "line", "exec")
        seen, watching = [], False
        sys.addaudithook(lambda event, details: seen.append((event, *details)) if watching else None)
        watching = True
        exec(line)
        watching = False
        print([event[:2] for event in seen if event[0] != "exec"])
    """
    command = [sys.executable, "-S", "-c", textwrap.dedent(program)]
    done = subprocess.run(command, env=switch, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "name",
    [
        "OTEL_TORCH_ENABLE",
        "OTELTORCH_ENABLED",
        "OTEL_PYTORCH_ENABLED",
        "OTEL_TROCH_ENABLED",
        "OTEL_TORCH_ENABELD",
        "OTEL_TORCHENABLED",
        "otel_torch_enabled",
    ],
)
def test_a_misspelt_switch_is_one_line_for_all_processes(execute, with_file, name):
    program = "import subprocess, sys, torch; sys.exit(subprocess.run([sys.executable, '-c', 'import torch']).returncode)"
    result = execute(with_file, program, **{name: "1"})
    assert (result.returncode, result.calls) == (0, [])
    assert result.stderr == (
        f"otel_torch: {name} is no setting, nothing is recorded; did you mean OTEL_TORCH_ENABLED?\n"
    )


@pytest.mark.parametrize(
    "variables",
    [
        {"OTEL_TORCH_ENABLE": "0"},
        {"OTEL_TORCH_ENABLE": "1", "OTEL_TORCH_ENABLED": "0"},
        {"OTEL_TORCH_ENABLE": "1", "OTEL_TORCH_ENABLED": ""},
        {"OTEL_SDK_DISABLED": "1", "PYTORCH_ENABLE_MPS_FALLBACK": "1"},
        {"OTEL_BATCH_ENABLED": "1"},
        {"OTEL_PYTHON_LOGGING_AUTO_INSTRUMENTATION_ENABLED": "true"},
    ],
)
def test_other_variables_are_no_misspelt_switch(execute, with_file, variables):
    program = """
        import os, sys
        loaded = [name for name in sys.modules if name.startswith("otel_torch")]
        print(set(loaded) <= {"otel_torch", "otel_torch.startup"}, "difflib" in sys.modules)
        print(os.environ.get("OTEL_TORCH_ENABLED"))
    """
    result = execute(with_file, program, **variables)
    switch = variables.get("OTEL_TORCH_ENABLED")
    assert (result.stdout, result.stderr) == (f"True False\n{switch}\n", "")


def test_on_without_torch_is_one_import_hook(execute, with_file):
    program = """
        import os, sys, threading
        print("torch" in sys.modules, any(name.startswith("opentelemetry") for name in sys.modules), threading.active_count())
        print(sum("otel_torch" in type(finder).__module__ for finder in sys.meta_path), os.environ["OTEL_TORCH_RUN_ID"][:4])
    """
    result = execute(with_file, program, **ON)
    assert (result.stdout, result.stderr, result.calls) == ("False False 1\n1 run-\n", "", [])


def test_a_bad_word_is_one_line_for_all_processes(execute, with_file):
    program = "import subprocess, sys, torch; sys.exit(subprocess.run([sys.executable, '-c', 'import torch']).returncode)"
    result = execute(with_file, program, OTEL_TORCH_ENABLED="maybe")
    assert result.returncode == 0 and result.calls == []
    (line,) = result.stderr.splitlines()
    assert all(part in line for part in ("OTEL_TORCH_ENABLED", "'maybe'", "1/true/yes/on", "off"))


@pytest.mark.parametrize("flag", ["-E", "-I", "-s", "-O"])
def test_interpreter_flags_do_not_keep_us_out(execute, with_file, flag):
    assert len(execute(with_file, "import torch", flags=[flag], **ON).calls) == 1


def test_a_start_that_fails_is_one_line(execute, with_file):
    program = (
        "import sys; sys.modules['otel_torch.bootstrap'] = None; import torch; print(torch.loaded)"
    )
    result = execute(with_file, program, **ON)
    assert (result.returncode, result.stdout) == (0, "True\n")
    (line,) = result.stderr.splitlines()
    assert "runs on unrecorded" in line


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_new_processes_are_covered_and_of_the_same_run(execute, with_file, method):
    program = f"""
        import multiprocessing, sys, torch

        def child():
            pass

        if __name__ == "__main__":
            process = multiprocessing.get_context("{method}").Process(target=child)
            process.start()
            process.join()
            sys.exit(process.exitcode)
    """
    result = execute(with_file, program, **ON)
    assert (result.returncode, result.stderr) == (0, "")
    assert len(result.calls) == len({pid for pid, _, _ in result.calls}) == 2
    assert len({run for _, _, run in result.calls}) == 1


FORK = """
    import os, sys
    {before}
    if (pid := os.fork()) == 0:
        import torch, otel_torch.startup
        otel_torch.startup.main()
        os._exit(0)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize("before", ["import torch", "pass"])
def test_fork_starts_once_whether_torch_came_before_or_after(execute, with_file, before):
    result = execute(with_file, FORK.format(before=before), **ON)
    assert (result.returncode, len(result.calls)) == (0, 1)


def test_a_worker_takes_its_jobs_id_over_a_made_one(execute, with_file):
    program = """
        import os, subprocess, sys
        worker = {**os.environ, "TORCHELASTIC_RUN_ID": "job7", "TORCHELASTIC_RESTART_COUNT": "2"}
        sys.exit(subprocess.run([sys.executable, "-c", "import torch"], env=worker).returncode)
    """
    assert [run for _, _, run in execute(with_file, program, **ON).calls] == ["job7.2"]


def test_a_given_run_id_is_kept(execute, with_file):
    assert [
        run
        for _, _, run in execute(with_file, "import torch", OTEL_TORCH_RUN_ID="mine", **ON).calls
    ] == ["mine"]


def test_the_start_file_names_what_the_pth_calls():
    module, function = (ROOT / "packaging" / "otel_torch.start").read_text().strip().split(":")
    assert (
        getattr(importlib.import_module(module), function)
        is importlib.import_module("otel_torch.startup").main
    )


# the face


@pytest.mark.parametrize("name", sorted(set(otel_torch.__all__) - {"__version__"}))
def test_every_public_name_is_where_the_face_says(name):
    if name == "OtelTorchInstrumentor":
        pytest.importorskip(
            "opentelemetry.instrumentation", reason="the extra `instrument` is not installed"
        )
    assert callable(getattr(otel_torch, name))
    assert name in dir(otel_torch)


def test_importing_the_face_loads_nothing_else(execute, with_file):
    program = "import sys; before = set(sys.modules); import otel_torch; print(sorted(set(sys.modules) - before))"
    assert execute(with_file, program).stdout == "['otel_torch']\n"


def test_what_needs_no_torch_imports_none():
    program = """
        import sys, otel_torch
        for home in sorted(otel_torch._WITHOUT_TORCH):
            for name in otel_torch._HOMES[home]:
                getattr(otel_torch, name)
        print("torch" in sys.modules, sorted(otel_torch._WITHOUT_TORCH - set(otel_torch._HOMES)))
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    words = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "False []\n"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        otel_torch.no_such_name  # noqa: B018


# otel-torch run


def wrap(python, *arguments):
    return (python, "-m", "otel_torch", "run", *arguments)


@pytest.mark.parametrize("environment", ["with_file", "without_file"])
def test_run_is_the_switch_with_and_without_the_start_up_file(execute, environment, request):
    python = request.getfixturevalue(environment)
    program = "import os, sys, torch; print(os.environ['OTEL_TORCH_ENABLED'], os.environ['OTEL_TORCH_RUN_ID'][:4]); sys.exit(7)"
    result = execute(python, program, wrapper=wrap(python))
    assert (result.returncode, result.stdout, result.stderr) == (7, "1 run-\n", "")
    assert len(result.calls) == 1


def test_without_file_is_really_without(execute, without_file):
    assert execute(without_file, "import torch", **ON).calls == []


def test_run_covers_spawned_children_without_the_start_up_file(execute, without_file):
    program = "import subprocess, sys, torch; sys.exit(subprocess.run([sys.executable, '-c', 'import torch']).returncode)"
    result = execute(without_file, program, wrapper=wrap(without_file))
    assert len({pid for pid, _, _ in result.calls}) == len(result.calls) == 2
    assert len({run for _, _, run in result.calls}) == 1


def test_run_hands_on_to_the_programs_own_sitecustomize(execute, without_file, tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("HERE = __file__\n")
    program = """
        import os, sys, sitecustomize, torch
        print(sitecustomize.HERE == os.environ["OWN"], any("startup/site" in folder for folder in sys.path))
    """
    own = tmp_path / "own"
    result = execute(
        without_file,
        program,
        wrapper=wrap(without_file),
        PYTHONPATH=str(own),
        OWN=str(own / "sitecustomize.py"),
    )
    assert (result.stdout, result.stderr) == ("True False\n", "")
    assert len(result.calls) == 1


def test_an_error_in_the_programs_own_sitecustomize_looks_as_it_always_does(
    execute, without_file, tmp_path
):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("1 / 0\n")
    bare = execute(without_file, "import torch", PYTHONPATH=str(tmp_path / "own"))
    wrapped = execute(
        without_file, "import torch", wrapper=wrap(without_file), PYTHONPATH=str(tmp_path / "own")
    )
    assert "ZeroDivisionError" in bare.stderr
    # twice: `otel-torch run` is itself a Python with that PYTHONPATH
    assert (wrapped.returncode, wrapped.stderr) == (bare.returncode, 2 * bare.stderr)
    assert len(wrapped.calls) == 1


def test_run_with_a_python_that_has_not_got_us_says_so_once(execute, with_file, tmp_path):
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True
    )
    program = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', 'print(1)']).returncode)"
    result = execute(tmp_path / "bare" / "bin" / "python", program, wrapper=wrap(with_file))
    assert (result.returncode, result.stdout) == (0, "1\n")
    (line,) = result.stderr.splitlines()
    assert "not installed for" in line


def test_run_in_run_is_one_run(execute, with_file):
    program = "import os, torch; print(os.environ['PYTHONPATH'].count('startup/site'))"
    result = execute(with_file, program, wrapper=wrap(with_file, *wrap(with_file)))
    assert result.stdout == "1\n" and len(result.calls) == 1
    assert pathlib.Path(STARTUP_SITE, "sitecustomize.py").exists()


# opentelemetry-instrument


@pytest.fixture(scope="session")
def instrumented(tmp_path_factory):
    """Make an environment that also sees this interpreter's packages and our entry points."""
    pytest.importorskip(
        "opentelemetry.instrumentation", reason="the extra `instrument` is not installed"
    )
    python = make_environment(tmp_path_factory.mktemp("instrumented") / "venv", start_up_file=True)
    site = next((python.parents[1] / "lib").glob("python*/site-packages"))
    (site / "zz_others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # metadata of a torch that satisfies the extra, and of ourselves
    (site / "torch-2.12.0.dist-info").mkdir()
    (site / "torch-2.12.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.12.0\n"
    )
    return python


def instrument(python):
    code = "import sys; from opentelemetry.instrumentation.auto_instrumentation import run; sys.exit(run())"
    return (python, "-c", code)


@pytest.mark.parametrize("switch", [{}, ON], ids=["wrapper", "both"])
def test_opentelemetry_instrument_is_a_switch(execute, instrumented, switch):
    program = "import os, torch; print(os.environ['OTEL_TORCH_ENABLED'], os.environ['OTEL_TORCH_RUN_ID'][:4])"
    result = execute(instrumented, program, wrapper=instrument(instrumented), **switch)
    assert (result.returncode, result.stdout) == (0, "1 run-\n"), result.stderr
    assert {complete for _, complete, _ in result.calls} == {"True"}


def test_opentelemetry_instrument_respects_off(execute, instrumented):
    result = execute(
        instrumented, "import torch", wrapper=instrument(instrumented), OTEL_TORCH_ENABLED="off"
    )
    assert (result.returncode, result.calls) == (0, [])


def test_opentelemetry_instrument_knows_our_settings_as_options(execute, instrumented):
    program = "import os; print(os.environ['OTEL_TORCH_STEPS'])"
    result = execute(
        instrumented, program, wrapper=(*instrument(instrumented), "--torch_steps", "0-3")
    )
    assert result.stdout == "0-3\n", result.stderr


def test_uninstrument_before_torch_means_nothing_happens(execute, instrumented):
    program = """
        import os
        from otel_torch import OtelTorchInstrumentor
        OtelTorchInstrumentor().instrument()
        OtelTorchInstrumentor().uninstrument()
        import torch
        print("OTEL_TORCH_ENABLED" in os.environ)
        OtelTorchInstrumentor().instrument()
    """
    result = execute(instrumented, program)
    assert result.stdout == "False\n", result.stderr
    assert [call[0] == "stop" for call in result.calls] == [True, False]


def test_settings_of_the_instrumentor_hold_for_processes_started_by_it_too(execute, instrumented):
    program = """
        import os, subprocess, sys
        from otel_torch import OtelTorchInstrumentor
        OtelTorchInstrumentor().instrument(steps=[0, 2], noise=False, modules=None)
        child = "import os, torch; print(os.environ['OTEL_TORCH_STEPS'], os.environ['OTEL_TORCH_NOISE'])"
        subprocess.run([sys.executable, "-E", "-c", child])
        import torch
        print(os.environ["OTEL_TORCH_MODULES"], flush=True)
        OtelTorchInstrumentor().uninstrument()
        print(os.environ["OTEL_TORCH_STEPS"], "OTEL_TORCH_NOISE" in os.environ)
    """
    before = {"OTEL_TORCH_STEPS": "7", "OTEL_TORCH_MODULES": "x"}
    result = execute(instrumented, program, **ON, **before)
    assert (result.stdout, result.stderr) == ("0,2 off\nx\n7 False\n", "")
    assert [call[-1].startswith("run-") for call in result.calls] == [True, True, False]


def test_without_contrib_the_instrumentor_says_what_to_install(execute, with_file):
    program = "import otel_torch\ntry: otel_torch.OtelTorchInstrumentor\nexcept ImportError as error: print(error)"
    assert "otel-torch[instrument]" in execute(with_file, program).stdout


# packaging


def test_the_wheel_has_the_start_up_files_beside_the_package(tmp_path):
    pytest.importorskip(
        "hatch_vcs", reason="hatchling builds the wheel, hatch-vcs names its version"
    )
    code = f"from hatchling.build import build_wheel; print(build_wheel({str(tmp_path)!r}))"
    environ = os.environ | {"CC": "no-such-compiler"}  # the kernel is not what is tested
    built = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    with zipfile.ZipFile(tmp_path / built.stdout.split()[-1]) as wheel:
        inside = set(wheel.namelist())
        assert {
            "otel_torch.pth",
            "otel_torch.start",
            "otel_torch/py.typed",
            "otel_torch/startup/site/sitecustomize.py",
        } <= inside
        entry_points = wheel.read(
            next(name for name in inside if name.endswith("entry_points.txt"))
        ).decode()
    metadata = next(name.split("/")[0] for name in inside if name.endswith("METADATA"))
    assert metadata.endswith(".dist-info")
    assert {name.split("/")[0] for name in inside} == {
        "otel_torch.pth",
        "otel_torch.start",
        "otel_torch",
        metadata,
    }
    assert all(
        group in entry_points
        for group in (
            "console_scripts",
            "opentelemetry_instrumentor",
            "opentelemetry_environment",
            "vllm.general_plugins",
        )
    )
