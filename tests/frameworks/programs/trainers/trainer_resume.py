"""Evaluates, trains two steps with transformers' Trainer, and resumes from its checkpoint."""

import torch
from checks import check, digest
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


class Sentences(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(6) + index
        return {"input_ids": tokens, "labels": torch.tensor(index % 2)}


class Print(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        check("step", state.global_step)


def make_trainer(steps: int) -> Trainer:
    config = BertConfig(
        vocab_size=32,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
    )
    return Trainer(
        model=BertForSequenceClassification(config),
        args=TrainingArguments(
            "out", max_steps=steps, per_device_train_batch_size=4, save_steps=2, save_strategy="steps",
            eval_strategy="steps", eval_steps=2, report_to=[], use_cpu=True, disable_tqdm=True,
        ),
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
        callbacks=[Print()],
    )  # fmt: skip


set_seed(0)
first = make_trainer(2)
first.evaluate()
first.train()
second = make_trainer(4)
second.train(resume_from_checkpoint="out/checkpoint-2")
check("final", digest(second.model))
