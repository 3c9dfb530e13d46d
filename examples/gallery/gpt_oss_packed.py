"""The same two documents packed into one row, with positions that begin again at 0."""

import torch
from transformers import GptOssForCausalLM

model = GptOssForCausalLM.from_pretrained("gpt_oss").eval()
documents = torch.arange(5, 14), torch.arange(40, 47)
tokens = torch.cat(documents)[None]
positions = torch.cat([torch.arange(len(document)) for document in documents])[None]
with torch.no_grad():
    logits = model(tokens, position_ids=positions, use_cache=False).logits[0]
for document, rows in zip(documents, logits.split([len(each) for each in documents]), strict=True):
    loss = torch.nn.functional.cross_entropy(rows[:-1], document[1:])
    print(f"{len(document)} tokens, loss {loss:.4f}")
