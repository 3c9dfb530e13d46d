"""Real ports, written by other people: FastVideo's models against their originals in diffusers and
transformers.

This is what `otel-torch diff` is tested on. FastVideo re-implements these models with other module
trees, other names, fused projections and other kernels; with tiny configurations and random weights
they run on a CPU in a tenth of a second.

A program is one side of one pair, run once. It knows nothing of being watched, recording is
switched on by environment:

    OTEL_TORCH_ENABLED=1 OTEL_TORCH_CAPTURE=parity OTEL_TORCH_JSONL=reference.jsonl \\
        python tests/corpora/side.py ports wan_t2v reference
    … python tests/corpora/side.py ports {wan_t2v | wan_gate | "wan_t2v skip@blocks.1.ffn"} port

Many in one process, each built anew:

    from tests.fastvideo.ports.quiet import quietly; quietly()      # before torch is imported
    from tests.fastvideo.ports.corpus import build
    with build("wan_t2v", "port", fault="weight.scale@blocks.0.to_q") as program:
        output = program.run()

| file | one idea |
|---|---|
| `program.py` | one side of one pair, as an unmodified program |
| `corpus.py` | `build(pair, side, bug=, fault=, dtype=, seed=)`; `PAIRS`, and `FAULTY`: real differences met on the way |
| `pair.py` | what a pair is, and FastVideo's own ways to load a checkpoint |
| `weights.py` | weights that follow from the seed and the reference's name of the parameter |
| `dits.py`, `encoders.py`, `vaes.py` | the pairs |
| `bugs.py` | `BUGS`: made by hand in FastVideo's source, with their places in both programs; `REAL`: those of `FAULTY` |
| `faults.py` | planted by a machine: `draw`, `reaches`, `Fault.parse(spec).truth(model)` |
| `report.py` | all of this measured, as JSON |

Relative L2 error of the clean ports' outputs, fp32 and bf16, and what makes each pair worth having:

| pair | fp32 | bf16 | |
|---|---|---|---|
| `wan_t2v` | 0 | 7e-3 | attention flattened into the block, norms fused with residual and modulation |
| `wan_i2v` | 0 | 7e-3 | as wan_t2v, with 257 image tokens in front of the text |
| `wan_ti2v` | 0 | 6e-3 | as wan_t2v, with a timestep for each token |
| `flux` | 2e-7 | 5e-3 | same names; attention as a module of its own |
| `flux2` | 0 | 0 | same names; another attention, linears that return a pair |
| `hunyuan` | 3e-7 | 1e-2 | no name in common; q, k, v fused, in single blocks with the mlp as well |
| `hunyuan15` | 0 | 0 | as hunyuan; three text streams, one module called three times |
| `cosmos` | 0 | 0 | nearly the same names |
| `cosmos25` | 0 | 0 | three modulations moved out of the norms into the block, another layout of tokens |
| `sd3` | 0 | 0 | same names; the last block has half a text stream |
| `stable_audio` | 0 | 8e-3 | wholly renamed; qkv fused in self-attention, kv in cross-attention |
| `zimage` | 0 | 9e-3 | same names; padding tokens, lists as inputs and outputs |
| `kandinsky5` | 3e-4 | 0 | the reference rounds rotated q and k to bf16 whatever it runs in: legal |
| `glm_image` | 0 | 0 | nearly the same names; another feed-forward |
| `llama` | 0 | 9e-3 | q, k, v and gate, up fused; residual added late; one rotary embedding shared by all layers |
| `clip_text` | 0 | 0 | a prefix; q, k, v fused |
| `clip_vision` | 0 | 0 | a prefix; q, k, v fused |
| `siglip` | 0 | 0 | a prefix; q, k, v fused; biases everywhere |
| `t5` | 6e-7 | 2e-2 | q, k, v fused; the position bias handed from the first block on |
| `umt5` | 5e-7 | 1e-2 | as t5, a position bias in each block |
| `lingbot_t5` | 6e-7 | 1e-2 | no name in common with transformers' umt5 |
| `qwen2_5_vl` | 0 | 0 | q, k, v and gate, up fused |
| `qwen3` | 0 | 1e-2 | as llama, with norms of q and k |
| `wan_vae` | 0 | 2e-2 | same names, called chunk by chunk, up to six calls of a module, with caches |
| `lingbot_wan_vae` | 0 | 1e-2 | no name in common with diffusers': flat sequences that are never called |
| `minimax_vae` | 0 | 9e-3 | same names; convolutional encoder, transformer decoder |
| `hunyuan_vae` | 1e-6 | 2e-2 | attention with a causal mask, nearly the same names |
| `hunyuan15_vae` | 0 | 2e-2 | same names; attention by convolutions |
| `flux2_vae` | 6e-7 | 2e-2 | images; another attention |
| `oobleck` | 0 | 0 | sound; weight norms, 1-D convolutions |

FastVideo's Llama, HunyuanVideo and per-token Wan take a batch of one only. The forward of its
Hunyuan autoencoders raises; autoencoders are called by `encode` and `decode`, as pipelines do, so
the model itself is never called. Modules that the reference keeps in fp32 stay fp32 in bf16 runs.
"""
