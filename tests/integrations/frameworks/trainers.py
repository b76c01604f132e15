"""Small language models under Hugging Face's Trainer, and a callback that keeps copies for the oracle."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import gyroscope
from gyroscope import Layca
from gyroscope.control.torch_contract import bare
from monitor.watched import copies_of
from oracles.monitor import Copies

WORDS, LENGTH = 16, 8


def language_model(seed: int = 0, blocks: int = 2) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=8, n_layer=blocks, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=False, loss_type="ForCausalLM",
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def sentences(count: int = 64) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(WORDS, (count, LENGTH), generator=generator)
    return [{"input_ids": one, "labels": one} for one in words]


def reset() -> None:
    """Make Accelerate forget the precision, the ranks and the compiler of an earlier Trainer."""
    for name in [name for name in os.environ if name.startswith("ACCELERATE_DYNAMO")]:
        del os.environ[name]
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    """Six steps on a CPU, whose loss is logged at each."""
    reset()
    given: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 0.01,
        "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 3,
    }  # fmt: skip
    return TrainingArguments(**given | options)


class Steered(Layca):
    """An optimizer that a Trainer makes of its groups of parameters."""

    def __init__(self, groups: Any, rate: float) -> None:
        super().__init__(torch.optim.SGD(groups, lr=rate, momentum=0.9))


def trainer(folder: Path, *callbacks: TrainerCallback, model: Any = None, **options: Any) -> Trainer:
    """A Trainer of a small model; options of the Trainer itself are told from those of its arguments."""
    names = ("optimizers", "optimizer_cls_and_kwargs", "model_init", "eval_dataset")
    own = {name: options.pop(name) for name in names if name in options}
    if model is None and "model_init" not in own:
        model = language_model()
    return Trainer(model, arguments(folder, **options), train_dataset=sentences(), callbacks=list(callbacks), **own)


class Copying(TrainerCallback):
    """Keeps copies of the weights and gradients of every step."""

    copies: Copies

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.copies = copies_of(given["model"])

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.copies.keep_gradients()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.copies.keep_step(bare(given["optimizer"]))


class Failing(TrainerCallback):
    """Raises at the end of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == self.step:
            raise RuntimeError("the machine is on fire")


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(run: gyroscope.Run, other: gyroscope.Run, quantities: tuple[str, ...] = ("rotation", "weight_norm")) -> bool:
    """Whether two runs recorded the same numbers at the same steps."""
    return run.steps.tolist() == other.steps.tolist() and all(
        np.array_equal(run.series(name), other.series(name), equal_nan=True) for name in quantities
    )
