"""Makes the files that FastVideo would download: the folder of a Wan 2.1 model with random weights,
and a parquet data set of latents for its trainers.
"""

from __future__ import annotations

import json
from pathlib import Path

TEXT_WIDTH = 32


def make_model(folder: Path) -> None:
    """Write a text-to-video model of about 0.9 million parameters in diffusers' layout."""
    import torch
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    torch.manual_seed(7)
    _tokenizer().save_pretrained(folder / "tokenizer")
    encoder = UMT5Config(
        vocab_size=128,
        d_model=TEXT_WIDTH,
        d_kv=16,
        d_ff=48,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
    )
    UMT5EncoderModel(encoder).eval().save_pretrained(folder / "text_encoder")
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=64,
        in_channels=16,
        out_channels=16,
        text_dim=TEXT_WIDTH,
        freq_dim=32,
        ffn_dim=128,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=1024,
    )
    with torch.no_grad():
        for parameter in transformer.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.05)
    transformer.save_pretrained(folder / "transformer")
    AutoencoderKLWan(base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1).save_pretrained(
        folder / "vae"
    )
    UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        num_train_timesteps=1000,
        flow_shift=3.0,
    ).save_pretrained(folder / "scheduler")
    _drop(
        folder / "scheduler" / "scheduler_config.json", "shift_terminal", "sigma_min", "sigma_max"
    )
    (folder / "model_index.json").write_text(
        json.dumps(
            {
                "_class_name": "WanPipeline",
                "_diffusers_version": "0.33.0",
                "scheduler": ["diffusers", "UniPCMultistepScheduler"],
                "text_encoder": ["transformers", "UMT5EncoderModel"],
                "tokenizer": ["transformers", "T5TokenizerFast"],
                "transformer": ["diffusers", "WanTransformer3DModel"],
                "vae": ["diffusers", "AutoencoderKLWan"],
            }
        )
    )


def _drop(config: Path, *keys: str) -> None:
    # newer than the published checkpoints, and unknown to FastVideo's own scheduler class
    values = json.loads(config.read_text())
    config.write_text(json.dumps({key: value for key, value in values.items() if key not in keys}))


def _tokenizer():  # type: ignore[no-untyped-def]
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    lines = [
        "the quick brown fox jumps over the lazy dog",
        "pack my box with five dozen liquor jugs",
        "blurred static low quality",
    ]
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=100, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(lines * 8, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=512,
    )


def make_dataset(folder: Path, rows: int = 4) -> None:
    """Write `rows` videos as random latents [16, 2, 8, 8] and text embeddings [7.., 32], both
    float32, in FastVideo's columns.
    """
    import numpy
    import pyarrow
    import pyarrow.parquet

    numbers = numpy.random.default_rng(11)

    def row(index: int) -> dict[str, object]:
        latent = numbers.standard_normal((16, 2, 8, 8), dtype=numpy.float32)
        text = numbers.standard_normal((7 + index, TEXT_WIDTH), dtype=numpy.float32)
        return {
            "id": f"video{index}",
            "file_name": f"video{index}.mp4",
            "caption": "a fox",
            "media_type": "video",
            "vae_latent_bytes": latent.tobytes(),
            "vae_latent_shape": list(latent.shape),
            "vae_latent_dtype": "float32",
            "text_embedding_bytes": text.tobytes(),
            "text_embedding_shape": list(text.shape),
            "text_embedding_dtype": "float32",
            "width": 64,
            "height": 64,
            "num_frames": 5,
            "duration_sec": 0.3,
            "fps": 16.0,
        }

    folder.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([row(index) for index in range(rows)]), folder / "data.parquet"
    )
