"""Fine-tunes with TRL's SFTTrainer."""

import torch
from checks import check, digest, random_number
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trainer_logs import PrintLogs
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

set_seed(0)
words = ["the", "a", "model", "layer", "loss", "step", "gives", "takes", "one", "two"]
vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
config = LlamaConfig(
    vocab_size=16,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
)
trainer = SFTTrainer(
    model=LlamaForCausalLM(config),
    args=SFTConfig(
        "out",
        max_steps=3,
        per_device_train_batch_size=2,
        max_length=8,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    ),
    train_dataset=Dataset.from_list([{"text": " ".join(words[i:] + words[:i])} for i in range(8)]),
    callbacks=[PrintLogs()],
    processing_class=PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ),
)
trainer.train()
check("final", digest(trainer.model), random_number(), torch.get_num_threads())
