"""Runs of FastVideo, which take 10 to 25 seconds each and are shared by many tests."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fastvideo.runs import HERE, Run, generate, run, train, train_with_yaml
from tests.otlp_receiver import Receiver

# programs for child processes: importing them to look for doctests would run them
collect_ignore_glob = ["cpu/*", "programs/*"]


@pytest.fixture(scope="session")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a tiny Wan model in `model` and a data set in `data`."""
    if importlib.util.find_spec("fastvideo") is None:
        pytest.skip("fastvideo is not installed; `make test-fastvideo` does")
    folder = tmp_path_factory.mktemp("wan")
    program = "from pathlib import Path; import tiny_wan; tiny_wan.make_model(Path('model')); tiny_wan.make_dataset(Path('data'))"
    environ = {**os.environ, "PYTHONPATH": str(HERE), "OTEL_TORCH_ENABLED": "0"}
    subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environ, check=True, capture_output=True
    )
    return folder


@pytest.fixture(scope="session")
def generation(tmp_path_factory: pytest.TempPathFactory, wan: Path) -> Run:
    """Generate with one worker; only the master switch and the endpoint are set."""
    with Receiver() as receiver:
        run = generate(
            tmp_path_factory.mktemp("generation") / "run", wan, **receiver.environment("grpc")
        )
    run.receiver = receiver
    return run


@pytest.fixture(scope="session")
def unrecorded(tmp_path_factory: pytest.TempPathFactory, wan: Path) -> Run:
    """Generate with the master switch off."""
    return generate(tmp_path_factory.mktemp("unrecorded") / "run", wan, OTEL_TORCH_ENABLED="0")


@pytest.fixture(scope="session")
def own_variables(tmp_path_factory: pytest.TempPathFactory, wan: Path) -> Run:
    """Generate with FastVideo's own trace and profiler, switched on by its own variables."""
    return generate(
        tmp_path_factory.mktemp("own_variables") / "run",
        wan,
        FASTVIDEO_TRACE_ACTIVATIONS="1",
        FASTVIDEO_TRACE_LAYERS=r"^blocks\.[0-9]+$",
        FASTVIDEO_TRACE_STATS="abs_mean,shape",
        FASTVIDEO_TRACE_STEPS="0,2",
        FASTVIDEO_TRACE_OUTPUT="trace.jsonl",
        FASTVIDEO_TORCH_PROFILER_DIR="profile",
        FASTVIDEO_TORCH_PROFILE_REGIONS="inference_denoising",
    )


@pytest.fixture(scope="session")
def two_workers(tmp_path_factory: pytest.TempPathFactory, wan: Path) -> Run:
    """Generate with the sequence split over two workers."""
    return generate(tmp_path_factory.mktemp("two_workers") / "run", wan, gpus=2)


@pytest.fixture(scope="session")
def broken(tmp_path_factory: pytest.TempPathFactory, wan: Path) -> Run:
    """Generate, but the transformer's fifth forward, the first of step 2, raises between two
    blocks.
    """
    with Receiver() as receiver:
        run = generate(
            tmp_path_factory.mktemp("broken") / "run",
            wan,
            BREAK_AT_FORWARD="4",
            **receiver.environment("http/protobuf"),
        )
    run.receiver = receiver
    return run


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory, wan: Path) -> Run:
    """Run the denoise stages of other model families."""
    return run(
        tmp_path_factory.mktemp("families") / "run", wan, [str(HERE / "programs" / "families.py")]
    )


@pytest.fixture(scope="session")
def start_and_stop(tmp_path_factory: pytest.TempPathFactory, wan: Path) -> Run:
    """Run a program that starts and stops recording itself, after importing FastVideo."""
    program = str(HERE / "programs" / "start_and_stop.py")
    return run(
        tmp_path_factory.mktemp("start_and_stop") / "run", wan, [program], OTEL_TORCH_ENABLED="0"
    )


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory, wan: Path) -> Run:
    """Run the classic trainer in one process."""
    return train(tmp_path_factory.mktemp("training") / "run", wan)


@pytest.fixture(scope="session")
def training_in_two_ranks(tmp_path_factory: pytest.TempPathFactory, wan: Path) -> Run:
    """Run the classic trainer under torchrun: weights sharded over two ranks, DataLoader workers."""
    return train(tmp_path_factory.mktemp("training_in_two_ranks") / "run", wan, ranks=2)


@pytest.fixture(scope="session")
def new_training(tmp_path_factory: pytest.TempPathFactory, wan: Path) -> Run:
    """Run the newer trainer in one process."""
    return train_with_yaml(tmp_path_factory.mktemp("new_training") / "run", wan)
