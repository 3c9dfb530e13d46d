"""Generates with a Llama, with LoRA on it, and with a T5: every token is a forward of its own."""

import torch
from checks import check
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

torch.manual_seed(0)
llama = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
)
prompt = torch.randint(3, 32, (1, 4))
options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
adapted = get_peft_model(llama, LoraConfig(target_modules=["q_proj"], r=2))
for _ in range(2):
    check("adapted", adapted.generate(input_ids=prompt, **options).tolist())
t5 = T5ForConditionalGeneration(
    T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
)
t5.generation_config.decoder_start_token_id = 0
check("t5", t5.generate(input_ids=prompt, **options).tolist())
