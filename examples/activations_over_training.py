"""Plot the activations and gradients of every layer over a training run.

The initial weights of the twelve layers are too small: activations shrink from layer to layer, and
gradients on the way back, so the loss does not improve until both have recovered. `track` collects
one step at a time and `to_frame` makes a table of it. The same table then comes from a recording,
which any program writes when it runs with OTEL_TORCH_ENABLED=1.

Needs pandas and vl-convert-python: pip install 'otel-torch[html,pandas]'. Writes to the current
folder.
"""

import json
from collections.abc import Iterator

import pandas
import torch
import vl_convert
from torch import nn

import otel_torch

STEPS, DEPTH, WIDTH = 60, 12, 32
LAYERS = r"^\d+$"  # the entries of the Sequential, without itself and their submodules


def make_model() -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def train(model: nn.Module) -> Iterator[tuple[int, float]]:
    """Run an ordinary training loop; yield the number and the loss of each step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    data = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        inputs = torch.randn(256, WIDTH, generator=data)
        loss = nn.functional.mse_loss(model(inputs)[:, 0], inputs[:, 0].sign())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield step, loss.item()


def plot(frame: pandas.DataFrame, path: str) -> None:
    """Write an SVG with one line per layer: activations on the left, gradients on the right."""
    values = frame.assign(
        of=frame["grad"].map({False: "activations", True: "gradients"}),
        layer=frame["name"].astype(int),
    )
    lines = {
        "mark": {"type": "line", "strokeWidth": 1.5},
        "encoding": {
            "x": {"field": "step", "type": "quantitative", "title": "optimizer step"},
            "y": {
                "field": "std",
                "type": "quantitative",
                "scale": {"type": "log"},
                "title": "standard deviation",
            },
            "color": {
                "field": "layer",
                "type": "ordinal",
                "scale": {"scheme": "viridis"},
                "title": "layer",
            },
        },
        "width": 330,
        "height": 260,
    }
    picture = {
        "data": {
            "values": json.loads(values[["of", "layer", "step", "std"]].to_json(orient="records"))
        },
        "facet": {"column": {"field": "of", "title": None}},
        "spec": lines,
        "resolve": {"scale": {"y": "independent"}},
    }
    with open(path, "w") as file:
        file.write(vl_convert.vegalite_to_svg(picture))


def main() -> None:
    # record the run: two calls around it, or environment variables without any
    otel_torch.start(
        jsonl="training.jsonl",
        modules=LAYERS,
        stats="std",
        capture="outputs,gradients",
        training=False,
    )
    torch.manual_seed(0)
    model = make_model()

    frames = []
    with otel_torch.track(model, include=LAYERS) as tracker:
        for step, loss in train(model):
            frames.append(tracker.to_frame("std").assign(step=step))
            tracker.clear()  # hold the tensors of one step only
            if step % 10 == 0 or step == STEPS - 1:
                std = frames[-1].pivot(index="grad", columns="name", values="std")
                ends = std[["0", str(DEPTH - 1)]]
                (first, last), (first_gradient, last_gradient) = ends.to_numpy()
                print(
                    f"step {step:2}: loss {loss:.3f}; "
                    f"activations {first:.2g} in the first layer, {last:.2g} in the last; "
                    f"gradients {first_gradient:.2g} and {last_gradient:.2g}"
                )
    otel_torch.stop()
    frame = pandas.concat(frames)
    plot(frame, "activations_over_training.svg")
    layers = frame["name"].nunique()
    print(
        f"activations_over_training.svg: {len(frame)} values of {layers} layers over {STEPS} steps"
    )

    recorded = otel_torch.to_frame("training.jsonl", "std")
    both = frame.merge(
        recorded, on=["name", "grad", "step"], suffixes=("", "_recorded"), validate="one_to_one"
    )
    same = int((both["std"] == both["std_recorded"]).sum())
    print(f"training.jsonl: {same} of {len(recorded)} values are bitwise equal")


if __name__ == "__main__":
    main()
