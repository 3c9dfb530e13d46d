"""Trains and uses a sentence encoder of sentence-transformers, as in its documentation."""

from pathlib import Path

from checks import check, digest, exact, random_number
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)
from trainer_logs import PrintLogs
from transformers import BertConfig, BertModel, BertTokenizerFast, set_seed

set_seed(0)
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "green", "blue", "cat", "dog"]
Path("vocab.txt").write_text("\n".join(words))
BertTokenizerFast("vocab.txt").save_pretrained("bert")
BertModel(
    BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
    )
).save_pretrained("bert")
encoder = models.Transformer("bert", max_seq_length=16)
model = SentenceTransformer(modules=[encoder, models.Pooling(16)], device="cpu")
pairs = Dataset.from_dict({"anchor": ["red cat", "blue dog"] * 4, "positive": ["cat", "dog"] * 4})
trainer = SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments(
        "out",
        max_steps=3,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    ),
    train_dataset=pairs,
    callbacks=[PrintLogs()],
    loss=losses.MultipleNegativesRankingLoss(model),
)
trainer.train()
check("final", digest(model), random_number())
check("encode", exact(model.encode(["red dog"], show_progress_bar=False).sum()))
