"""Trains LoRA adapters of PEFT with the Trainer of transformers, in bf16 with checkpointing."""

import torch
from checks import check, digest, random_number
from peft import LoraConfig, get_peft_model
from trainer_logs import PrintLogs
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

set_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
)
tokens = torch.randint(0, 64, (32, 12))
model = get_peft_model(
    LlamaForCausalLM(config), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
)
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        "out",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=3,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        gradient_checkpointing=True,
        bf16=True,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
    callbacks=[PrintLogs()],
)
trainer.train()
check("final", digest(model), random_number())
