"""Activation patching: find the layer and the token that decide a model's answer.

A small GPT-2 learns capitals in seconds: `. France . ? -> Paris`, with the country at any position.
Attention works only in its second layer, so the right result is known: the country reaches the `?`
in that layer.

Two prompts differ only in the country. Each number is the share of the clean prompt's answer that a
single activation of it carries into the run of the corrupted prompt: 0 none, 1 all. The model is an
ordinary one from transformers.
"""

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import otel_torch

COUNTRIES = ("Chile", "China", "Egypt", "France", "Italy", "Japan", "Kenya", "Peru")
CAPITALS = ("Santiago", "Beijing", "Cairo", "Paris", "Rome", "Tokyo", "Nairobi", "Lima")
WORDS = (".", "?", *COUNTRIES, *CAPITALS)
LENGTH, LAYERS, MIXING = 6, 4, 1


def encode(prompt: str) -> torch.Tensor:
    return torch.tensor([[WORDS.index(word) for word in prompt.split()]])


def make_model() -> GPT2LMHeadModel:
    """Return a GPT-2 in which the attention of all layers but one adds nothing."""
    config = GPT2Config(
        n_layer=LAYERS, n_head=4, n_embd=64, n_positions=LENGTH, vocab_size=len(WORDS),
        bos_token_id=0, eos_token_id=0, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    for number, block in enumerate(model.transformer.h):
        if number != MIXING:
            for parameter in block.attn.c_proj.parameters():
                nn.init.zeros_(parameter).requires_grad_(False)
    return model


def train(model: GPT2LMHeadModel, steps: int = 150) -> float:
    """Train the model on the capitals; return the share of correct answers at the end."""
    optimizer = torch.optim.Adam(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=3e-3
    )
    share = 0.0
    for _ in range(steps):
        facts = torch.randint(len(COUNTRIES), (64,))
        tokens = torch.zeros(64, LENGTH, dtype=torch.long)
        positions = torch.randint(LENGTH - 1, (64,))
        tokens[torch.arange(64), positions] = WORDS.index(COUNTRIES[0]) + facts
        tokens[:, -1] = WORDS.index("?")
        answers = WORDS.index(CAPITALS[0]) + facts
        logits = model(tokens).logits[:, -1]
        loss = nn.functional.cross_entropy(logits, answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        share = (logits.argmax(-1) == answers).float().mean().item()
    return share


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    model = make_model()
    with torch.enable_grad():
        share = train(model)
    model.eval()
    clean, corrupted = encode(". France . . . ?"), encode(". Italy . . . ?")
    paris, rome = WORDS.index("Paris"), WORDS.index("Rome")
    print(
        f"trained: {share:.0%} right; France -> {WORDS[model(clean).logits[0, -1].argmax()]}",
        end=", ",
    )
    print(f"Italy -> {WORDS[model(corrupted).logits[0, -1].argmax()]}")

    def lead(logits: torch.Tensor) -> float:
        return (logits[0, -1, paris] - logits[0, -1, rome]).item()

    most, least = lead(model(clean).logits), lead(model(corrupted).logits)

    def share_of(logits: torch.Tensor) -> float:
        return (lead(logits) - least) / (most - least)

    # cache one clean run; each patch is a run of the corrupted prompt
    it = otel_torch.interleave(model)
    cache = otel_torch.Cache(list(model.transformer.h), include_inputs=True, include_output=False)
    with cache.attach(model) as clean_run:
        model(clean)
    print("\nthe input of a layer (the residual stream), from a cache of the clean run")
    print(f"{'':10}{''.join(f'{WORDS[token]:>8}' for token in clean[0])}")
    effect = torch.zeros(LAYERS, LENGTH)
    for layer in range(LAYERS):
        for position in range(LENGTH):
            with it.invoke(corrupted) as run:
                stream = run.transformer.h[layer].input.clone()
                stream[:, position] = clean_run.transformer.h[layer].input[:, position]
                run.transformer.h[layer].input = stream
                effect[layer, position] = share_of(run.result.logits)
        print(f"layer {layer}   {''.join(f'{value:8.2f}' for value in effect[layer].tolist())}")

    # run both prompts at once; a module's output of the clean run replaces the corrupted one's
    print("\nthe output of a part of a layer, from a concurrent clean run")
    parts = {"attention": "attn.c_proj", "mlp": "mlp.c_proj"}
    for layer in range(LAYERS):
        for name, part in parts.items():
            module = f"transformer.h.{layer}.{part}"
            with it.invoke(clean) as source, it.invoke(corrupted) as patched:
                patched[module].output = source[module].output
                print(f"layer {layer} {name:10}{share_of(patched.result.logits):8.2f}")

    country = int((clean != corrupted).nonzero()[0, 1])
    loss_of_effect = effect[:-1, country] - effect[1:, country]
    mixing_layer = int(loss_of_effect.argmax())
    print(f"\nthe country goes from token {country} to the `?` in layer {mixing_layer}")


if __name__ == "__main__":
    main()
