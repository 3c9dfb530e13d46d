"""Faults of three models, of which it is scored what they are said to be, and not where.

Each is recorded twice: with whole tensors, and with statistics and sketches alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tests.corpora import corpus_of
from tests.corpora.case import Case, Right, sides_of
from tests.corpora.causes.faults import FAULTS
from tests.corpora.scores import Corpus

FAMILIES = ("llama", "unet", "wan")


class Causes(Corpus):
    name, variants, together = "causes", ("tensors", "statistics"), True

    def load(self) -> Sequence[Case]:
        clean = [
            Case(name=family, family=family, **sides_of("causes", family, family))
            for family in FAMILIES
        ]
        return [*FAULTS.values(), *clean]


# what the comparison says of faults in the models of transformers and diffusers; "" if nothing
OF_LIBRARIES = {
    "llama_rope_interleaved": "rope",
    "llama_q_proj_transposed": "transposed",
    "llama_swiglu_swapped": "other_tensor",
    "llama_causal_mask_dropped": "mask",
    "llama_layers_exchanged": "exchanged",
    "qwen3_k_norm_epsilon": "norm",
    "qwen3_attention_scale": "attention_scale",
    "qwen3_heads_tiled": "heads",
    "mistral_window_dropped": "mask",
    "gpt2_gelu_exact": "activation",
    "gpt2_dropout_left_on": "dropout",
    "gpt2_query_and_key_exchanged": "parts_exchanged",
    "wan_gate_missing": "sum",
    "flux_norm_out_swapped": "rows_permuted",
    "flux_guidance_unscaled": "scaled",
    "flux_parts_exchanged": "permuted",
    "unet_norm_epsilon": "norm",
    "vae_scaling_factor": "scaled",
    "vae_upsample_bilinear": "",
}


class CausesInLibraries(Corpus):
    """Faults of the small cases, and what they are said to be."""

    name, variants, together = "libraries", ("tensors",), True

    def load(self) -> Sequence[Case]:
        cases = corpus_of("small").cases
        return [
            replace(
                cases[name],
                right=Right(causes=(kind,) if kind else (), lines=cases[name].right.lines),
                invisible=(),
            )
            for name, kind in OF_LIBRARIES.items()
        ]


CORPORA = {"causes": Causes(), "libraries": CausesInLibraries()}
