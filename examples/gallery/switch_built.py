"""One forward of a Switch Transformer, and its checkpoint: one embedding for encoder and decoder.

It saves the checkpoint in the folder switch, with the tensors that transformers 4 saves.
"""

import torch
from transformers import SwitchTransformersConfig, SwitchTransformersModel

torch.manual_seed(0)
config = SwitchTransformersConfig(
    vocab_size=99,
    d_model=32,
    d_kv=8,
    d_ff=64,
    num_heads=4,
    num_layers=2,
    num_decoder_layers=2,
    num_experts=4,
    tie_word_embeddings=False,
)
model = SwitchTransformersModel(config).eval()
for part in (model.encoder, model.decoder):
    part.embed_tokens.weight = model.shared.weight
weights = {
    name: tensor for name, tensor in model.state_dict().items() if "embed_tokens" not in name
}
model.save_pretrained("switch", state_dict=weights)
tokens = torch.arange(3, 15)[None]
with torch.no_grad():
    output = model(input_ids=tokens, decoder_input_ids=tokens).last_hidden_state
print(f"hidden states of norm {output.norm():.4f}")
