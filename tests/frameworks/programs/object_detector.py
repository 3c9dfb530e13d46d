"""Trains, validates and uses a YOLO of ultralytics on images of its own."""

from pathlib import Path

import numpy
import torch
from checks import check, digest, logged, random_number
from PIL import Image
from ultralytics import YOLO, settings

settings.update({"sync": False})
random = numpy.random.default_rng(0)
for part in ("train", "val"):
    for folder in ("images", "labels"):
        Path("data", folder, part).mkdir(parents=True)
    for index in range(4):
        pixels = random.integers(0, 255, (64, 64, 3), dtype=numpy.uint8)
        Image.fromarray(pixels).save(f"data/images/{part}/{index}.png")
        Path(f"data/labels/{part}/{index}.txt").write_text("0 0.5 0.5 0.4 0.4\n")
Path("data.yaml").write_text(
    f"path: {Path('data').resolve()}\ntrain: images/train\nval: images/val\nnames: {{0: thing}}\n"
)


def watch(trainer) -> None:
    """Print what each batch and each step of the optimizer has."""
    steps = 0
    optimizer_step = trainer.optimizer_step

    def step() -> None:
        nonlocal steps
        groups = trainer.optimizer.param_groups
        for index, group in enumerate(groups):
            logged(f"lr[{index}]", steps, group["lr"])
        gradients = [parameter.grad for group in groups for parameter in group["params"]]
        used = [gradient for gradient in gradients if gradient is not None]
        logged("grad_norm", steps, torch.nn.utils.get_total_norm(used))
        optimizer_step()
        steps += 1

    trainer.optimizer_step = step


model = YOLO("yolo11n.yaml")
model.add_callback("on_train_start", watch)
model.train(
    data="data.yaml",
    epochs=2,
    imgsz=64,
    batch=2,
    workers=0,
    plots=False,
    device="cpu",
    project="runs",
    seed=0,
    amp=False,
)
check("final", digest(model.model), random_number())
boxes = model.predict("data/images/val/0.png", imgsz=64, verbose=False)[0].boxes
check("boxes", len(boxes))
