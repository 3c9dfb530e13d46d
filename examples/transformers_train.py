"""Train a tiny causal language model to count, with AdamW, a learning-rate schedule, gradient
accumulation and validation.

An ordinary script without any tracing code. It downloads nothing and takes two seconds on a CPU.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

STEPS, ACCUMULATION, VALIDATE_EVERY = 6, 2, 3


def make_batch(generator: torch.Generator) -> torch.Tensor:
    """Return four rows of sixteen consecutive numbers, modulo the size of the vocabulary."""
    first = torch.randint(0, 64, (4, 1), generator=generator)
    return (first + torch.arange(16)) % 64


def main() -> list[float]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
            bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=2, num_training_steps=STEPS
    )

    losses = []
    for step in range(STEPS):
        model.train()
        total = 0.0
        for _ in range(ACCUMULATION):
            tokens = make_batch(generator)
            loss = model(input_ids=tokens, labels=tokens).loss / ACCUMULATION
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total)
        print(f"step {step}: loss {total:.4f}")
        if (step + 1) % VALIDATE_EVERY == 0:
            model.eval()
            with torch.no_grad():
                tokens = make_batch(generator)
                loss = model(input_ids=tokens, labels=tokens).loss
                print(f"step {step}: validation loss {loss.item():.4f}")
    return losses


if __name__ == "__main__":
    main()
