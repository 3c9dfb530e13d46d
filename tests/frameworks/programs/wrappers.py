"""A model in the wrappers of several libraries, and a LoRA adapter."""

import peft
import torch
from checks import check, digest, exact, random_number
from lightning.fabric import Fabric
from timm.utils import ModelEmaV3
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=16,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=16,
)
adapted = peft.get_peft_model(
    LlamaForCausalLM(config), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
)
optimizer = torch.optim.SGD(adapted.parameters(), lr=0.1)
ids = torch.arange(8)[None]
for step in range(2):
    loss = adapted(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    check("adapter", step, exact(loss.detach()))

net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
average = ModelEmaV3(net)
fabric = Fabric(accelerator="cpu")
fabric_net, fabric_optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
for step in range(2):
    loss = fabric_net(torch.ones(2, 4)).square().mean()
    fabric.backward(loss)
    fabric_optimizer.step()
    fabric_optimizer.zero_grad()
    average.update(net)
    check("fabric", step, exact(loss.detach()), exact(average(torch.ones(2, 4)).sum().detach()))
check("final", digest(adapted), digest(net), random_number())
