"""Trainers that inherit from transformers' Trainer: what is recorded of them is what the oracle says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from trainers import LENGTH, WORDS, Copying, language_model, reset
from transformers import (
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)  # fmt: skip
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from gyroscope.integrations.transformers import GyroscopeCallback
from monitor.watched import check

SHORT: dict[str, Any] = {
    "max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 0.01, "logging_steps": 1, "save_strategy": "no",
    "report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": False,
}  # fmt: skip
TEXTS = ["a b c d", "e f g h", "b c d e", "k l m a"] * 2


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<unk>", "<eos>", *"abcdefghijklm"]
    assert len(words) == WORDS
    known = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    known.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=known, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>")


def seq2seq(folder: str, callbacks: list[Any]) -> Any:
    torch.manual_seed(0)
    config = T5Config(vocab_size=WORDS, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    words = torch.randint(WORDS, (8, LENGTH))
    data = [{"input_ids": one, "labels": one} for one in words]
    given = Seq2SeqTrainingArguments(folder, **SHORT)
    return Seq2SeqTrainer(T5ForConditionalGeneration(config), given, train_dataset=data, callbacks=callbacks)


def supervised(folder: str, callbacks: list[Any]) -> Any:
    return SFTTrainer(
        language_model(), SFTConfig(folder, max_length=LENGTH, **SHORT), callbacks=callbacks,
        train_dataset=Dataset.from_dict({"text": TEXTS}), processing_class=tokenizer(),
    )  # fmt: skip


def preferring(folder: str, callbacks: list[Any]) -> Any:
    data = {"prompt": TEXTS, "chosen": [" e f"] * len(TEXTS), "rejected": [" a a"] * len(TEXTS)}
    return DPOTrainer(
        language_model(), language_model(1), DPOConfig(folder, max_length=LENGTH, **SHORT), callbacks=callbacks,
        train_dataset=Dataset.from_dict(data), processing_class=tokenizer(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("made", "logged"),
    [(seq2seq, "loss"), (supervised, "mean_token_accuracy"), (preferring, "rewards/margins")],
    ids=["Seq2SeqTrainer", "SFTTrainer", "DPOTrainer"],
)
def test_the_numbers_are_those_of_the_oracle(tmp_path: Path, made: Any, logged: str) -> None:
    reset()
    watching, copying = GyroscopeCallback(budget=None), Copying()
    training = made(str(tmp_path), [watching, copying])
    training.train()
    check(tmp_path / "gyroscope", copying.copies, range(3), rtol=1e-5)
    expected = [entry[logged] for entry in training.state.log_history if logged in entry]
    assert watching.run.scalars[logged].values.tolist() == expected
    assert len(expected) == 2
