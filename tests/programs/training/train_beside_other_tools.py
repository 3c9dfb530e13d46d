"""One training with a mistake, as each of the tools on docs/coming-from.md records it.

`python train_beside_other_tools.py TOOL FOLDER`. otel_torch records programs as they are: `nothing`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

STEPS = 40
Observer = Callable[[int, float], None]


def make_model(activation: str = "gelu_new") -> GPT2LMHeadModel:
    """A GPT-2 of six blocks, with the same weights each time."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=6, n_head=4, n_embd=64, vocab_size=256, n_positions=64, bos_token_id=0, eos_token_id=0,
        activation_function=activation,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def batch() -> torch.Tensor:
    """Sequences that count on from any number."""
    return (torch.randint(256, (8, 1)) + torch.arange(48)) % 256


def train(model: GPT2LMHeadModel, after_step: Observer = lambda step, loss: None) -> None:
    """Train in half precision. The learning rate of one MLP is 700 times that of the others, so its
    numbers grow until they overflow.
    """
    mistaken = set(model.transformer.h[3].mlp.parameters())
    others = [parameter for parameter in model.parameters() if parameter not in mistaken]
    optimizer = torch.optim.AdamW(
        [{"params": others, "lr": 1e-3}, {"params": list(mistaken), "lr": 0.7}]
    )
    for step in range(STEPS):
        tokens = batch()
        with torch.autocast("cpu", torch.float16):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        after_step(step, loss.item())
        optimizer.step()
        optimizer.zero_grad()


def nothing(folder: Path) -> None:
    train(make_model())


def reference(folder: Path) -> None:
    """A forward, without training."""
    with torch.no_grad():
        make_model().eval()(batch())


def port(folder: Path) -> None:
    """The same with another activation function, as a port may have by mistake."""
    with torch.no_grad():
        make_model("gelu").eval()(batch())


def tensorboard(folder: Path) -> None:
    """Outputs and gradients of all modules as scalars and histograms, by hooks."""
    from torch.utils.tensorboard import SummaryWriter

    model, step = make_model(), 0
    with SummaryWriter(folder / "tensorboard") as writer:

        def note(name: str, module: torch.nn.Module, given: object, output: object) -> None:
            value = output[0] if isinstance(output, tuple) else output
            if not isinstance(value, torch.Tensor):
                return
            writer.add_scalar(f"abs_mean/{name}", value.float().abs().mean(), step)
            if value.isfinite().all():  # a histogram with a NaN leaves the whole card empty
                writer.add_histogram(f"outputs/{name}", value.float(), step)

        def after_step(done: int, loss: float) -> None:
            nonlocal step
            writer.add_scalar("loss", loss, done)
            for name, parameter in model.named_parameters():
                if parameter.grad is not None and parameter.grad.isfinite().all():
                    writer.add_histogram(f"gradients/{name}", parameter.grad, done)
            step = done + 1

        for name, module in model.named_modules():
            if name:
                module.register_forward_hook(partial(note, name))
        train(model, after_step)


def wandb(folder: Path) -> None:
    """The same for Weights & Biases, whose `watch` takes gradients and parameters by itself."""
    import wandb

    model, seen = make_model(), {}

    def note(name: str, module: torch.nn.Module, given: object, output: object) -> None:
        value = output[0] if isinstance(output, tuple) else output
        if isinstance(value, torch.Tensor):
            seen[f"abs_mean/{name}"] = value.float().abs().mean().item()

    run = wandb.init(dir=folder, mode="offline", project="beside", settings={"console": "off"})
    run.watch(model, log="all", log_freq=1)
    for name, module in model.named_modules():
        if name:
            module.register_forward_hook(partial(note, name))
    train(model, lambda step, loss: run.log({"loss": loss, **seen}))
    run.finish()


def profiler(folder: Path) -> None:
    """The trace of torch.profiler, which Perfetto opens."""
    model = make_model()
    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=16, warmup=1, active=3), record_shapes=True
    ) as profile:
        train(model, lambda step, loss: profile.step())
    profile.export_chrome_trace(str(folder / "profiler.json"))


def netron(folder: Path) -> None:
    """The model as a file that Netron opens."""
    model = make_model().eval()
    model.config.use_cache = False
    program = torch.onnx.export(model, (batch(),))
    assert program is not None
    for node in program.model.graph:  # Netron shows the lines of source: paths of this machine
        node.metadata_props.pop("pkg.torch.onnx.stack_trace", None)
    program.save(folder / "model.onnx")


TOOLS = {
    tool.__name__: tool for tool in (nothing, reference, port, tensorboard, wandb, profiler, netron)
}

if __name__ == "__main__":
    TOOLS[sys.argv[1]](Path(sys.argv[2]))
