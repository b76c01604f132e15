"""Fine-tuning with the installed peft and transformers: names, merged weights, and a diagnosis without alarms."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import gyroscope
from oracles.monitor import cosine_distance, flat

WORDS = 64


def llama(layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2,
        )
    )  # fmt: skip


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def text(seed: int) -> torch.Tensor:
    """Words that count up from a random one."""
    start = torch.randint(WORDS, (16, 1), generator=torch.Generator().manual_seed(seed))
    return (start + torch.arange(17)) % WORDS


def tune(model: nn.Module, monitor: gyroscope.Monitor, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        words = text(step)
        loss = model(input_ids=words, labels=words).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.log(loss=loss)


def adamw(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


CONFIGURATIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "linear": (llama, {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "rank-stabilized": (llama, {"target_modules": ["q_proj"], "use_rslora": True, "r": 8}),
    "turned": (gpt2, {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
    "embedding": (gpt2, {"target_modules": ["wte", "c_attn"], "fan_in_fan_out": True}),
}


def adapted(name: str) -> Any:
    make, options = CONFIGURATIONS[name]
    return get_peft_model(make(), LoraConfig(**{"r": 4, "lora_alpha": 8, **options}))


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings")
def test_the_merged_rotation_is_that_of_the_weights_that_peft_merges(tmp_path: Path, name: str) -> None:
    model = adapted(name)
    base = {n: p.detach().clone() for n, p in model.named_parameters() if "base_layer.weight" in n}
    optimizer = adamw(model, lr=1e-2)
    with gyroscope.watch(model, optimizer, tmp_path / "run", budget=None, detail_every=1) as monitor:
        tune(model, monitor, optimizer, range(5))
    assert monitor.error is None
    merged = dict(copy.deepcopy(model).merge_and_unload().named_parameters())
    with gyroscope.load(tmp_path / "run") as run:
        found = dict(zip(run.layers, run.series("merged_rotation")[-1].tolist(), strict=True))
        assert {n for n, value in found.items() if np.isfinite(value)} == set(base)
        for n, w in base.items():
            now = merged[n.removeprefix("base_model.model.").replace("base_layer.", "")]
            expected = cosine_distance(flat(now), flat(w))
            assert expected > 1e-5
            assert found[n] == pytest.approx(expected, rel=1e-4), n
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        assert trained <= set(run.layers), "every adapter is a layer under its own name"
        assert set(run.meta["facts"]["frozen"]) == set(run.layers) - trained
        turned = np.isfinite(run.series("rotation")).any(0)
        assert {n for n, known in zip(run.layers, turned, strict=True) if known} == trained


def test_only_adapters_are_held_and_b_is_said_to_have_no_direction(tmp_path: Path) -> None:
    model = adapted("linear")
    optimizer = adamw(model)
    with gyroscope.watch(model, optimizer, tmp_path / "run", budget=None, reference="pretrained") as monitor:
        tune(model, monitor, optimizer, range(3))
        sizes = [p.numel() for p in model.parameters() if p.requires_grad]
        assert monitor.cost().reference_bytes == sum(-(-n // 512) * 512 * 4 for n in sizes)
    with gyroscope.load(tmp_path / "run") as run:
        second = [i for i, n in enumerate(run.layers) if "lora_B" in n]
        rotation = run.series("rotation")[:, second]
        assert np.isnan(rotation[:2]).all()
        assert np.isfinite(rotation[2:]).all()
        notes = [event.text for event in run.events if event.kind == "note"]
        assert sum("zero: without a direction" in note and "lora_B" in note for note in notes) == 1
        assert sum("have a direction now" in note for note in notes) == 1


@pytest.mark.parametrize("what", ["linear", "embedding", "head", "all"])
def test_fine_tuning_is_healthy(tmp_path: Path, what: str) -> None:
    """Adapters, a new head on a frozen backbone, and all weights at a small learning rate."""
    if what in CONFIGURATIONS:
        model, lr = adapted(what), 3e-3
    else:
        model, lr = llama(), 1e-3
        if what == "head":
            model.model.requires_grad_(False)
    optimizer = adamw(model, lr)
    with gyroscope.watch(model, optimizer, tmp_path / "run", budget=None, detail_every=50) as monitor:
        tune(model, monitor, optimizer, range(300))
    found = gyroscope.diagnose(tmp_path / "run")
    assert [one.kind for one in found.alarms] == [], str(found)
    with gyroscope.load(tmp_path / "run") as run:
        assert [event.text for event in run.events if event.kind in ("finding", "error")] == []


def test_a_tuning_is_resumed_from_its_checkpoint(tmp_path: Path) -> None:
    whole = adapted("linear")
    optimizer = adamw(whole)
    with gyroscope.watch(whole, optimizer, tmp_path / "whole", budget=None) as monitor:
        tune(whole, monitor, optimizer, range(8))
    model = adapted("linear")
    optimizer = adamw(model)
    with gyroscope.watch(model, optimizer, tmp_path / "run", budget=None) as monitor:
        tune(model, monitor, optimizer, range(5))
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "monitor": monitor.state_dict()}
    again = adapted("linear")
    again.load_state_dict(state["model"])
    optimizer = adamw(again)
    optimizer.load_state_dict(state["optimizer"])
    with gyroscope.watch(again, optimizer, tmp_path / "run", budget=None) as monitor:
        monitor.load_state_dict(state["monitor"])
        tune(again, monitor, optimizer, range(5, 8))
    with gyroscope.load(tmp_path / "run") as run, gyroscope.load(tmp_path / "whole") as expected:
        assert run.steps.tolist() == expected.steps.tolist()
        for name in ("rotation", "weight_norm", "update_norm"):
            np.testing.assert_allclose(run.series(name), expected.series(name), rtol=1e-4, err_msg=name)
