"""The same forward with the model loaded from the folder switch."""

import torch
from transformers import SwitchTransformersModel

torch.manual_seed(1)
model = SwitchTransformersModel.from_pretrained("switch").eval()
tokens = torch.arange(3, 15)[None]
with torch.no_grad():
    output = model(input_ids=tokens, decoder_input_ids=tokens).last_hidden_state
print(f"hidden states of norm {output.norm():.4f}")
