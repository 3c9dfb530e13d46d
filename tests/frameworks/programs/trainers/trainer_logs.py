"""Prints what a Trainer of transformers logs."""

from checks import logged
from transformers import TrainerCallback

_NAMES = {"loss": "loss", "learning_rate": "lr[0]", "grad_norm": "grad_norm"}


class PrintLogs(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        for name, quantity in _NAMES.items():
            if name in logs:
                logged(quantity, state.global_step - 1, logs[name])
