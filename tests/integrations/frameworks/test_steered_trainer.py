"""`gyroscope.steer` under Hugging Face's Trainer and on models of transformers and peft."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trainers import language_model, trainer, weights
from transformers import MixtralConfig, MixtralForCausalLM

import gyroscope
from gyroscope.control import Steered, rates


def rules(optimizer: Steered) -> dict[str, tuple[str, str]]:
    return {name: (g["role"], g["rule"]) for g in optimizer.param_groups for name in g["param_names"]}


def test_the_trainer_moves_the_rate_and_resumes_a_steered_training(tmp_path: Path) -> None:
    def make(folder: str, **options: object) -> tuple[object, Steered]:
        model = language_model()
        optimizer = gyroscope.steer(model, rate=0.05)
        both = (optimizer, rates.cosine(optimizer, 6))
        return trainer(tmp_path / folder, model=model, optimizers=both, **options), optimizer

    whole, optimizer = make("whole", save_strategy="steps", save_steps=3)
    whole.train()
    logged = [entry["learning_rate"] for entry in whole.state.log_history if "learning_rate" in entry]
    assert logged == pytest.approx([0.05 * (1 + math.cos(math.pi * t / 6)) / 2 for t in range(6)])
    resumed, again = make("whole", save_strategy="no")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    for one, other in zip(weights(whole.model), weights(resumed.model), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    assert again.rates() == optimizer.rates()


def test_a_tied_head_of_transformers_is_found() -> None:
    model = language_model()
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.transformer.wte.weight
    found = rules(gyroscope.steer(model))
    assert found["transformer.wte.weight"] == ("tied head", "plain")
    assert found["transformer.wpe.weight"] == ("embedding", "plain")
    assert found["transformer.h.1.mlp.c_proj.weight"] == ("matrix", "turn")
    untied = rules(gyroscope.steer(language_model(), heads="turn"))
    assert untied["lm_head.weight"] == ("head", "turn")
    assert untied["transformer.wte.weight"] == ("embedding", "plain")


def test_the_router_of_a_mixture_of_transformers_is_stepped_plainly() -> None:
    config = MixtralConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=3,
    )  # fmt: skip
    optimizer = gyroscope.steer(MixtralForCausalLM(config))
    routers = [name for name, (role, rule) in rules(optimizer).items() if (role, rule) == ("router", "plain")]
    assert len(routers) == 1
    assert "gate" in routers[0]
    assert any("experts" in name and rule == "turn" for name, (_, rule) in rules(optimizer).items())


def test_adapters_of_peft_learn_while_their_bases_stay() -> None:
    torch.manual_seed(0)
    model = get_peft_model(language_model(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    optimizer = gyroscope.steer(model, rate=0.05)
    assert {role for role, _ in rules(optimizer).values()} == {"matrix"}
    assert all("lora" in name for name in rules(optimizer))
    bases = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    words = torch.arange(8).repeat(4, 1)
    losses = []
    for _ in range(60):
        loss = model(input_ids=words, labels=words).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1  # the head and all else of the random model stay
    assert all(torch.equal(bases[name], p) for name, p in model.named_parameters() if name in bases)
