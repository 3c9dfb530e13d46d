"""Trainings by transformers and PEFT."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import Dataset

from tests.corpora.laws.models import (
    VOCABULARY,
    texts,
)
from tests.corpora.laws.program import breaks, healthy

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel, Trainer


class Texts(Dataset):
    """Texts with a training's labels."""

    def __init__(self, count: int) -> None:
        self.tokens = texts(count)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def gpt2(dropout: float = 0.1, **config: Any) -> GPT2LMHeadModel:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops, **ends, **config))


def trainer_of(model: nn.Module, settings: dict[str, Any], **parts: Any) -> Trainer:
    """Return a Trainer of `model` on 24 texts, 4 a batch, for 8 steps unless `settings` say more."""
    from transformers import Trainer, TrainingArguments

    defaults = {
        "per_device_train_batch_size": 4, "max_steps": 8, "learning_rate": 3e-3, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "logging_steps": 4,
    }  # fmt: skip
    arguments = TrainingArguments(tempfile.mkdtemp(), **(defaults | settings))
    return Trainer(model, arguments, train_dataset=Texts(24), **parts)


# ---- broken


@breaks("learning_rate_zero")
def trainer_with_a_rate_of_zero() -> None:
    trainer_of(gpt2(), {"learning_rate": 3 // 1000, "lr_scheduler_type": "constant"}).train()


@breaks("optimizer_holds_others")
def trainer_with_the_optimizer_of_another_model() -> None:
    from transformers import get_constant_schedule

    optimizer = AdamW(gpt2().parameters(), 3e-3)
    parts = (optimizer, get_constant_schedule(optimizer))
    trainer_of(gpt2(), {}, optimizers=parts).train()


@breaks("loss_ignores_inputs")
def trainer_whose_collator_pads_everything() -> None:
    from transformers import default_data_collator

    def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = default_data_collator(rows)
        # an attention mask was meant
        batch["input_ids"] = batch["input_ids"].masked_fill(batch["input_ids"] >= 0, 0)
        return batch

    trainer_of(gpt2(), {}, data_collator=collate).train()


@breaks("eval_while_training")
def pretrained_model_trains_as_it_was_loaded() -> None:
    from transformers import GPT2LMHeadModel

    path = tempfile.mkdtemp()
    gpt2().save_pretrained(path)
    model = GPT2LMHeadModel.from_pretrained(path)  # it comes in eval mode
    optimizer = AdamW(model.parameters(), 3e-3)
    for _ in range(8):
        tokens = texts()
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()


@breaks("weights_parted")
def trainer_with_a_head_of_its_own() -> None:
    model = gpt2()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    trainer_of(model, {}).train()


# ---- healthy


@healthy
def trainer_with_evaluation() -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 4, "warmup_steps": 2}
    trainer_of(gpt2(), settings, eval_dataset=Texts(8)).train()


@healthy
def trainer_with_accumulation_and_clipping() -> None:
    settings = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "bf16": True}
    trainer_of(gpt2(), settings | {"lr_scheduler_type": "cosine"}).train()


@healthy
def peft_adapters_of_low_rank() -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
    model = get_peft_model(gpt2(), config)
    model.train()
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], 0.01)
    for _ in range(8):
        tokens = texts()
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@healthy
def peft_adapters_under_the_trainer() -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    trainer_of(get_peft_model(gpt2(), config), {"learning_rate": 0.01}).train()
