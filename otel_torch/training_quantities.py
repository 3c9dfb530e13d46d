"""The table of what is recorded of a training: the names of rows, span attributes and metrics.

A quantity is a row of a recording (phase `train`) or, where it is time or memory, an attribute of
the step's scope: two identical runs write identical rows.

To add one, add its line here and describe it in docs/record-format.md and docs/training.md. Imports
neither torch nor OpenTelemetry.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

PHASE = "train"
# attribute of a metric point whose quantity belongs to a group of an optimizer
PARAM_GROUP = "torch.param_group"
# attribute of a metric point of a law of training
LAW = "torch.law"

SAMPLES = "torch.training.samples"
TOKENS = "torch.training.tokens"
DEVICE_MEMORY = "torch.training.device_memory"


@dataclass(frozen=True, slots=True)
class Quantity:
    """How one quantity of a training step is exported.

    Args:
        metric: the name of its metric, and of the attribute of the step's span.
        kind: of the metric; a counter takes the sum of all steps.
        unit: of the metric, in UCUM; empty for a number without a unit of its own.
        text: description of the metric.
        by_module: whether modules have values of their own besides the total.
        group: the attribute that has the group of a row, `0` of `lr[0]`.
    """

    metric: str
    kind: Literal["gauge", "counter", "histogram"]
    unit: str
    text: str
    by_module: bool = False
    group: str = PARAM_GROUP


# by the name of the row's tensor, without the group
ROWS: dict[str, Quantity] = {
    "loss": Quantity("torch.training.loss", "gauge", "", "What the program called backward on"),
    "lr": Quantity("torch.training.learning_rate", "gauge", "", "Learning rate of a group"),
    "weight_decay": Quantity("torch.training.weight_decay", "gauge", "", "Weight decay of a group"),
    "optimizer_step": Quantity(
        "torch.training.optimizer_step",
        "gauge",
        "{step}",
        "Steps that the state of a group counts, as Adam's does",
    ),
    "grad_norm": Quantity(
        "torch.training.gradient_norm", "gauge", "", "L2 norm of the gradients, not clipped", True
    ),
    "grad_norm_clipped": Quantity(
        "torch.training.gradient_norm_clipped", "gauge", "", "L2 norm of the gradients, clipped"
    ),
    "early_clips": Quantity(
        "torch.training.early_clips",
        "counter",
        "{clip}",
        "Times that gradients were clipped before all batches of a step were added up",
    ),
    "late_clips": Quantity(
        "torch.training.late_clips",
        "counter",
        "{clip}",
        "Times that gradients were clipped after the step that used them",
    ),
    "uncleared": Quantity(
        "torch.training.uncleared_gradients",
        "counter",
        "{step}",
        "Steps whose gradients add to those of the step before",
    ),
    "eval_forwards": Quantity(
        "torch.training.eval_forwards",
        "counter",
        "{step}",
        "Steps that trained in eval mode, where dropout or batch norm depend on it",
    ),
    "train_evaluations": Quantity(
        "torch.training.train_evaluations",
        "counter",
        "{forward}",
        "Forwards of an evaluation in training mode, where dropout or batch norm depend on it",
    ),
    "repeated_batch": Quantity(
        "torch.training.repeated_batches",
        "counter",
        "{step}",
        "Steps with the batch of the step before, made anew",
    ),
    "rewritten": Quantity(
        "torch.training.rewritten_parameters",
        "counter",
        "{step}",
        "Steps that begin with other parameters than the step before has left, with other ranks",
    ),
    "unused_losses": Quantity(
        "torch.training.unused_losses",
        "gauge",
        "{loss}",
        "Losses that gave a model gradients that no optimizer has used, at the end of the run",
    ),
    "equal_outputs": Quantity(
        "torch.training.equal_outputs",
        "counter",
        "{step}",
        "Steps with the same output for all samples of a batch that differ",
    ),
    "rounded_away": Quantity(
        "torch.training.rounded_away",
        "gauge",
        "1",
        "Share of the elements in half precision with a gradient that a step does not change",
    ),
    "broken_law": Quantity(
        "torch.training.broken_laws",
        "counter",
        "{law}",
        "Laws of training that were found to be broken",
        group=LAW,
    ),
    "param_norm": Quantity(
        "torch.training.parameter_norm", "gauge", "", "L2 norm of the parameters", True
    ),
    "update_ratio": Quantity(
        "torch.training.update_ratio",
        "gauge",
        "1",
        "L2 norm of what the optimizer changed, over the L2 norm of the parameters",
        True,
    ),
    "loss_scale": Quantity(
        "torch.training.loss_scale", "gauge", "", "What the gradient scaler multiplies losses by"
    ),
    "skipped": Quantity(
        "torch.training.skipped_steps",
        "counter",
        "{step}",
        "Optimizer steps that the gradient scaler skipped",
    ),
    "dead": Quantity(
        "torch.training.dead_units",
        "gauge",
        "1",
        "Share of the units behind a ReLU that were zero in every sample of a batch",
        True,
    ),
}

# of these a step has a row only where it breaks a law of training
OF_LAWS = frozenset({
    "early_clips", "late_clips", "uncleared", "eval_forwards", "train_evaluations",
    "repeated_batch", "rewritten", "equal_outputs", "broken_law",
})  # fmt: skip

STEP_DURATION = Quantity(
    "torch.training.step.duration", "histogram", "s", "Duration of a training step"
)

# by model, module and the name of the row's tensor
NONFINITE = Quantity(
    "torch.training.nonfinite", "counter", "{value}", "Values of a training, NaN or infinite"
)

# by the attribute of the step's scope; the first two are divided by the step's duration
SCOPE_ATTRIBUTES: dict[str, Quantity] = {
    SAMPLES: Quantity(
        "torch.training.throughput.samples", "gauge", "{sample}/s", "Samples trained on per second"
    ),
    TOKENS: Quantity(
        "torch.training.throughput.tokens", "gauge", "{token}/s", "Tokens trained on per second"
    ),
    DEVICE_MEMORY: Quantity(
        DEVICE_MEMORY, "gauge", "By", "Peak of the memory allocated on the device so far"
    ),
}
RATES = frozenset({SAMPLES, TOKENS})


class RowName(NamedTuple):
    """The name of a row's tensor. `group`: of an optimizer; None if the quantity has none."""

    quantity: str
    group: str | None


def row_label(quantity: str, group: str | None) -> str:
    """Return the tensor name of a row.

    >>> row_label("lr", "decay"), row_label("loss", None)
    ('lr[decay]', 'loss')
    """
    return quantity if group is None else f"{quantity}[{group}]"


@functools.lru_cache(maxsize=1024)
def split_label(label: str) -> RowName:
    """Split the tensor name of a row into its quantity and its group.

    >>> split_label("lr[decay]"), split_label("loss")
    (RowName(quantity='lr', group='decay'), RowName(quantity='loss', group=None))
    """
    match = re.fullmatch(r"([^[]+)\[(.*)\]", label, re.DOTALL)
    return RowName(label, None) if match is None else RowName(match[1], match[2])
