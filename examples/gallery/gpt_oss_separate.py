"""Two documents, each in a forward of its own. It saves the model in the folder gpt_oss."""

import torch
from transformers import GptOssConfig, GptOssForCausalLM

torch.manual_seed(0)
config = GptOssConfig(
    vocab_size=99,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=32,
    num_local_experts=4,
    num_experts_per_tok=2,
    initializer_range=0.3,
    pad_token_id=0,
    eos_token_id=2,
)
model = GptOssForCausalLM(config).eval()
model.save_pretrained("gpt_oss")
for document in (torch.arange(5, 14), torch.arange(40, 47)):
    with torch.no_grad():
        loss = model(document[None], labels=document[None], use_cache=False).loss
    print(f"{len(document)} tokens, loss {loss:.4f}")
