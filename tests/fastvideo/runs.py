"""Runs the unmodified FastVideo in child processes; environment variables switch recording on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.ports import free_port
from tests.support import EXIT_RANK

HERE = Path(__file__).parent
EXAMPLES = HERE.parent.parent / "examples"
TIMEOUT_S = 180


@dataclass
class Run:
    """The exit status, output and files of one run."""

    status: int
    output: str
    folder: Path
    receiver: Any = None  # the OTLP receiver that it exported to, if any

    def recordings(self) -> list[Path]:
        return sorted((self.folder / "otel-torch").glob("*.jsonl"))

    def records_of(self, recording: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in recording.read_text().splitlines()]

    def records(self) -> list[dict[str, Any]]:
        return [record for path in self.recordings() for record in self.records_of(path)]

    def metadata(self) -> list[dict[str, Any]]:
        return [
            json.loads(path.with_suffix(".meta.json").read_text()) for path in self.recordings()
        ]


def run(folder: Path, wan: Path, command: list[str], **environ: str) -> Run:
    """Run `python COMMAND` in `folder` with recording on, without the settings of this process.

    FastVideo picks a free port seconds before its worker listens there: if another process has
    taken it by then, the program runs once more.
    """
    folder.mkdir(exist_ok=True)
    for name in ("model", "data"):
        (folder / name).symlink_to(wan / name)
    run = run_once(folder, command, environ)
    if run.status and "EADDRINUSE" in run.output and not run.recordings():
        print(run.output[-10_000:], "\nThe port was taken: once more.")
        run = run_once(folder, command, environ)
    if run.status:
        print(run.output[-10_000:])  # pytest shows it with each test that fails on it
    return run


def run_once(folder: Path, command: list[str], environ: dict[str, str]) -> Run:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OTEL_", "FASTVIDEO_", "TRACEPARENT"))
    }
    env = {
        **inherited,
        "OTEL_TORCH_ENABLED": "1",
        "PYTHONPATH": str(HERE / "cpu"),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        **environ,
    }
    with (folder / "output.txt").open("w+") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(TIMEOUT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
        output.seek(0)
        return Run(status, output.read(), folder)


def generate(folder: Path, wan: Path, gpus: int = 1, **environ: str) -> Run:
    """Generate two videos of three steps with guidance."""
    return run(
        folder,
        wan,
        [str(EXAMPLES / "fastvideo_generate.py"), "model", "videos", str(gpus)],
        **environ,
    )


def train(folder: Path, wan: Path, ranks: int = 1, **environ: str) -> Run:
    """Run FastVideo's classic trainer: 3 steps of 2 accumulated batches, activation checkpointing,
    FSDP.
    """
    arguments = {
        "num_gpus": ranks, "sp_size": 1, "tp_size": 1, "hsdp_replicate_dim": 1, "hsdp_shard_dim": ranks,
        "model_path": "model", "pretrained_model_name_or_path": "model", "data_path": "data", "output_dir": "checkpoints",
        "dataloader_num_workers": ranks - 1, "max_train_steps": 3, "train_batch_size": 1, "train_sp_batch_size": 1,
        "gradient_accumulation_steps": 2, "num_latent_t": 2, "num_height": 64, "num_width": 64, "num_frames": 5,
        "enable_gradient_checkpointing_type": "full", "learning_rate": 5e-5, "mixed_precision": "bf16",
        "weight_only_checkpointing_steps": 1000, "training_state_checkpointing_steps": 2, "weight_decay": 1e-4,
        "max_grad_norm": 1.0, "inference_mode": False, "checkpoints_total_limit": 3, "training_cfg_rate": 0.1,
        "multi_phased_distill_schedule": "4000-1", "dit_precision": "fp32", "num_euler_timesteps": 50, "ema_start_step": 0,
    }  # fmt: skip
    words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    program = ["-m", "fastvideo.training.wan_training_pipeline", *words, "--not_apply_cfg_solver"]
    port = str(free_port())
    if ranks > 1:
        folder.mkdir(exist_ok=True)
        (folder / "rank.py").write_text(
            f"import runpy, sys\nrunpy.run_module(sys.argv.pop(1), {{}}, '__main__', True)\n{EXIT_RANK}"
        )
        program = [
            "-m",
            "torch.distributed.run",
            "--nproc_per_node",
            str(ranks),
            "--master_port",
            port,
            "rank.py",
            *program[1:],
        ]
        return run(folder, wan, program, WANDB_MODE="offline", **environ)
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return run(folder, wan, program, WANDB_MODE="offline", **alone, **environ)


def train_with_yaml(folder: Path, wan: Path, **environ: str) -> Run:
    """Run FastVideo's newer trainer, configured by a YAML file."""
    folder.mkdir(exist_ok=True)
    shutil.copy(HERE / "programs" / "finetune.yaml", folder)
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    return run(
        folder,
        wan,
        ["-m", "fastvideo.train.entrypoint.train", "--config", "finetune.yaml"],
        **alone,
        **environ,
    )
