"""The torch profiler in regions: the contents of its trace, which is written however the process
ends.
"""

from __future__ import annotations

import gzip
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from otel_torch import session
from otel_torch.regions import entry, profiler
from otel_torch.regions.entry import close_region, open_region, profiler_region, region
from otel_torch.regions.profiler import (
    DISABLE,
    ENABLE,
    TorchProfilerConfig,
    TorchProfilerController,
    get_global_controller,
    get_or_create_profiler,
    set_global_controller,
)
from tests.support import bare_session, run_python

CPU = (torch.profiler.ProfilerActivity.CPU,)
PREAMBLE = """
import sys, threading, torch
from otel_torch.regions.profiler import close, get_global_controller, get_or_create_profiler
from otel_torch.regions.entry import close_region, open_region, profiler_region

def burn(tag):
    with torch.profiler.record_function(tag):
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))

controller = get_or_create_profiler(sys.argv[1])
"""


def run(folder: Path, code: str, fresh: bool = False, **variables: str) -> str:
    """Run `code` after the preamble in a child process that exits with 0; return its stderr."""
    program = folder.parent / f"{folder.name}.py"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(PREAMBLE + code)
    variables = {"OTEL_TORCH_ENABLED": "0"} | variables
    return run_python(folder.parent, program, str(folder), fresh=fresh, **variables).stderr


def events(folder: Path) -> list[dict[str, Any]]:
    """Return the complete events of the only trace in `folder`."""
    [trace] = folder.glob("*.pt.trace.json.gz")
    with gzip.open(trace, "rt") as lines:
        return [event for event in json.load(lines)["traceEvents"] if event.get("ph") == "X"]


def names(folder: Path) -> list[str]:
    return [event["name"] for event in events(folder)]


# --- whole processes


def test_collection_is_confined_to_chosen_regions_and_exported_at_exit(tmp_path: Path) -> None:
    output = run(
        tmp_path / "new" / "folder",
        """
burn("before")
with profiler_region("profiler_region_inference_denoising"):
    burn("first")
burn("between")
with profiler_region("model_loading"):
    with profiler_region("training_train"):
        burn("nested")
    burn("after the nested")
    with profiler_region("Inference_Denoising"):
        burn("deeper")
    burn("after the deeper")
for _ in range(2):
    with profiler_region("no_such_region"):
        burn("unknown")
with profiler_region("training_train"):
    burn("not chosen")
burn("behind")
""",
        fresh=True,
        FASTVIDEO_TORCH_PROFILE_REGIONS="inference_denoising,model_loading",
        RANK="3",
    )
    folder = tmp_path / "new" / "folder"
    seen = names(folder)
    assert {"first", "nested", "after the nested", "deeper", "after the deeper"} <= set(seen)
    assert not {"before", "between", "unknown", "not chosen", "behind"} & set(seen)
    assert seen.count("fastvideo.region::profiler_region_inference_denoising") == 2
    assert seen.count("fastvideo.region::profiler_region_model_loading") == 1
    assert "fastvideo.region::profiler_region_training_train" not in seen
    assert seen.count(ENABLE) == seen.count(DISABLE) == 2
    assert output.count("is not registered") == 1 and "Toggling" not in output
    assert {path.name for path in folder.glob("summary*")} == {
        "summary_rank3.txt",
        "summary_rank3.json",
    }
    rows = json.loads((folder / "summary_rank3.json").read_text())
    assert set(rows[0]) == {"name", "shapes", "self_device_us", "device_us", "count"}
    assert [row["count"] for row in rows if row["name"] == "nested"] == [1]
    assert "aten::mm" in (folder / "summary_rank3.txt").read_text()


def test_a_region_that_is_open_when_the_profiler_stops_does_no_harm(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
with profiler_region("training_train"):
    burn("inside")
    controller.stop()
    controller.stop()
    burn("stopped")
    assert get_global_controller() is None and not controller.is_enabled and not controller.has_profiler
again = get_or_create_profiler(sys.argv[1] + "/again")
with profiler_region("training_train"):
    burn("again")
""",
    )
    assert "inside" in names(tmp_path) and "stopped" not in names(tmp_path)
    assert "again" in names(tmp_path / "again")


def test_natural_regions_and_close(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
scope = open_region("training_step", lexical=False)
burn("the step")
close_region(scope)
burn("outside")
close()
assert list(__import__("pathlib").Path(sys.argv[1]).glob("summary_rank0.json"))
""",
    )
    assert "the step" in names(tmp_path) and "outside" not in names(tmp_path)
    assert "torch.step" in names(tmp_path)


def test_other_threads_are_said_and_disturb_nothing(tmp_path: Path) -> None:
    output = run(
        tmp_path,
        """
def work():
    for _ in range(50):
        with profiler_region("model_loading"):
            burn("other thread")
with profiler_region("model_loading"):
    burn("first")
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
for _ in range(50):
    with profiler_region("inference_denoising"):
        burn("mine")
    assert not controller.is_enabled
for thread in threads: thread.join()
""",
    )
    assert names(tmp_path).count("mine") == 50 and "other thread" not in names(tmp_path)
    assert output.count("sees only the thread that started it") == 1


def test_a_profiler_that_never_collected_says_so_and_writes_nothing(tmp_path: Path) -> None:
    output = run(tmp_path, "burn('outside')", OTEL_TORCH_PROFILER_REGIONS="training_step")
    assert output.count("collected nothing") == 1 and "profiler_region_training_step" in output
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_leaves_the_profiler_to_its_parent(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
import os
with profiler_region("model_loading"):
    burn("parent")
child = os.fork()
if child == 0:
    good = get_global_controller() is None and not controller.has_profiler
    with profiler_region("model_loading"):
        pass
    os._exit(0 if good else 1)
assert os.waitpid(child, 0)[1] == 0
""",
    )
    assert "parent" in names(tmp_path)


def test_a_later_profiler_of_the_program_is_not_blind(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
with profiler_region("model_loading"):
    pass
controller.stop()
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
    burn("own")
assert "own" in {event.key for event in own.key_averages()}
""",
    )


# --- in this process


class Switches:
    """A fake torch profiler that records when it is switched: Kineto can run only once in a process
    at a time.
    """

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")

    def toggle_collection_dynamic(self, enable: bool, activities: Any) -> None:
        self.calls.append(enable)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(entry, "_explicit", set())
    for name in [name for name in os.environ if "PROFILE" in name]:
        monkeypatch.delenv(name)
    yield
    set_global_controller(None)
    session.become(None)


def test_toggles_are_events_of_the_outermost_regions_scope() -> None:
    seen = bare_session()
    controller = TorchProfilerController(Switches(), CPU)
    controller.start()
    with region("model_loading"), region("inference_denoising"):
        inside = controller.is_enabled
    assert (inside, controller.is_enabled) == (True, False)
    inner, outer = seen.closed
    assert inner.events == []
    assert [(name, attributes) for _, name, attributes in outer.events] == [
        (ENABLE, {}),
        (DISABLE, {}),
    ]
    assert outer.start_ns <= outer.events[0][0] <= outer.events[1][0] <= outer.end_ns


def test_collection_follows_the_depth_and_exceptions() -> None:
    switches = Switches()
    controller = TorchProfilerController(
        switches, CPU, TorchProfilerConfig({"profiler_region_model_loading": True})
    )
    controller.start()
    with (
        pytest.raises(KeyError),
        controller.region("model_loading"),
        controller.region("model_loading"),
    ):
        raise KeyError
    with controller.region("training_train"):
        pass
    controller.stop()
    assert switches.calls == ["start", False, True, False, "stop"]


def test_a_natural_region_carries_the_events_of_a_call_site_in_it() -> None:
    seen = bare_session()
    controller = TorchProfilerController(
        Switches(), CPU, TorchProfilerConfig({"profiler_region_inference_denoising": True})
    )
    controller.start()
    natural = open_region("inference_denoising")
    with region("inference_denoising"):
        pass
    close_region(natural)
    assert [name for _, name, _ in seen.closed[0].events] == [ENABLE, DISABLE] and seen.closed == [
        natural
    ]


def test_a_region_may_be_profiled_though_no_span_was_asked_for() -> None:
    seen, switches = bare_session(REGIONS="training_*"), Switches()
    TorchProfilerController(switches, CPU).start()
    close_region(open_region("inference_denoising"))
    with region("model_loading"):
        pass
    assert seen.closed == [] and switches.calls == ["start", False, True, False, True, False]


def test_a_profiler_that_fails_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(Switches):
        def toggle_collection_dynamic(self, enable: bool, activities: Any) -> None:
            if enable:
                raise RuntimeError("no kineto")

    seen, runs = bare_session(), 0
    TorchProfilerController(Broken(), CPU).start()
    for _ in range(2):
        with profiler_region("model_loading"):
            runs += 1
    assert runs == 2 == len(seen.closed) and get_global_controller() is None
    assert capsys.readouterr().err.count("no kineto") == 1


def test_there_is_one_live_controller() -> None:
    controller = TorchProfilerController(Switches(), CPU)
    assert get_global_controller() is controller is get_or_create_profiler("/nowhere")
    with pytest.raises(RuntimeError):
        TorchProfilerController(Switches(), CPU)
    controller.stop()
    assert get_global_controller() is None
    TorchProfilerController(Switches(), CPU)


def test_a_disabled_controller_still_lets_regions_be_spans() -> None:
    seen = bare_session()
    controller = get_or_create_profiler(None)
    assert get_global_controller() is None and set(CPU) <= set(controller.activities)
    assert not (
        controller.is_enabled
        or controller.has_profiler
        or controller.is_region_enabled("model_loading")
    )
    with controller.region("model_loading"):
        pass
    controller.start()
    controller.stop()
    assert len(seen.closed) == 1 and seen.closed[0].events == []


def test_configuration_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    everything = TorchProfilerConfig.from_env()
    assert len(everything.regions) >= 18 and all(everything.regions.values()) and everything.others
    monkeypatch.setenv(
        "OTEL_TORCH_PROFILER_REGIONS", " Model_Loading, profiler_region_distillation_*, wrong_name"
    )
    monkeypatch.setenv(
        "OTEL_TORCH_MODULES", "("
    )  # a bad value elsewhere is not this one's business
    chosen = TorchProfilerConfig.from_env()
    assert (
        chosen.regions["profiler_region_model_loading"]
        and len(chosen.regions) == 5
        and not chosen.others
    )
    assert capsys.readouterr().err.count("wrong_name") == 1
    monkeypatch.setenv("OTEL_TORCH_PROFILER_REGIONS", "training_checkpoint_saving")
    assert TorchProfilerConfig.from_env().regions["profiler_region_training_save_checkpoint"]
    monkeypatch.setenv("OTEL_TORCH_PROFILER_REGIONS", "wrong_name")
    with pytest.raises(ValueError, match="no registered region"):
        TorchProfilerConfig.from_env()


def test_names_that_are_all_unknown_switch_the_profiler_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = bare_session(PROFILER_REGIONS="nonsense_region")
    with get_or_create_profiler(str(tmp_path)).region("model_loading"):
        pass
    assert get_global_controller() is None and len(seen.closed) == 1
    assert capsys.readouterr().err.count("the torch profiler is off") == 1


def test_a_folder_that_cannot_be_made_switches_the_profiler_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert not get_or_create_profiler(str(tmp_path / "file" / "folder")).has_profiler
    assert "the torch profiler is off" in capsys.readouterr().err


def test_regions_of_ones_own_are_profiled_where_all_are() -> None:
    bare_session(REGIONS="mine")
    switches = Switches()
    TorchProfilerController(switches, CPU).start()
    with region("mine"):
        pass
    assert switches.calls == ["start", False, True, False]


def test_concurrent_regions_leave_collection_off() -> None:
    switches = Switches()
    controller = TorchProfilerController(switches, CPU)
    controller.start()

    def work() -> None:
        for _ in range(200):
            with controller.region("model_loading"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    assert (
        not controller.is_enabled
        and switches.calls.count(True) == switches.calls.count(False) - 1 == 200
    )


def test_without_the_private_switch_kinetos_own_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.delattr(torch.autograd, "_enable_record_function")
    monkeypatch.setattr(
        torch.profiler.profile,
        "toggle_collection_dynamic",
        lambda self, on, kinds: asked.append((on, kinds)),
    )
    profiler._QuietProfile(activities=CPU).toggle_collection_dynamic(True, CPU)
    assert asked and asked[0][0] is True and set(CPU) <= asked[0][1]
