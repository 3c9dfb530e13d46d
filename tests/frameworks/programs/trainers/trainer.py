"""Trains with the Trainer of transformers: accumulation, evaluation, checkpointing, clipping."""

import torch
from checks import check, digest, exact, random_number
from trainer_logs import PrintLogs
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)


class Tokens(torch.utils.data.Dataset):
    def __init__(self, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, 64, (length, 12), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


set_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
trainer = Trainer(
    model=LlamaForCausalLM(config),
    args=TrainingArguments(
        "out",
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=6,
        eval_strategy="steps",
        eval_steps=2,
        logging_steps=1,
        save_strategy="no",
        gradient_checkpointing=True,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    ),
    train_dataset=Tokens(64, seed=1),
    eval_dataset=Tokens(8, seed=2),
    callbacks=[PrintLogs()],
)
trainer.train()
for entry in trainer.state.log_history:
    if "eval_loss" in entry:
        check("evaluated", entry["step"], exact(entry["eval_loss"]))
check("final", digest(trainer.model), random_number())
