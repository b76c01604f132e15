"""The vision transformer follows its formulas, sees all patches, and has the initialization of the GPT."""

import pytest
import torch

import gyroscope
from gyroscope_lab import models
from gyroscope_lab.errors import LabError

SIZES = {"classes": 5, "channels": 2, "side": 6, "patch": 3, "width": 12, "depth": 2, "heads": 3}


def images(count=2, seed=0):
    return torch.randn(count, 2, 6, 6, generator=torch.Generator().manual_seed(seed))


def shaken(**options):
    """A model with changed gains and biases, so that leaving one out would be noticed."""
    model = models.make("vit-small", seed=1, **SIZES, **options)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return model


@pytest.mark.parametrize("post_norm", [False, True])
def test_logits_are_those_of_a_loop_over_patches_and_blocks(post_norm):
    model, batch = shaken(post_norm=post_norm), images()
    with torch.no_grad():
        rows = []
        for image in batch:
            cut = [image[:, i : i + 3, j : j + 3].flatten() for i in (0, 3) for j in (0, 3)]
            x = torch.stack([model.patches(one) + model.places.weight[t] for t, one in enumerate(cut)])[None]
            for block in model.blocks:
                if post_norm:
                    x = block.norm1(x + block.attention(x))
                    x = block.norm2(x + block.linear2(block.gelu(block.linear1(x))))
                else:
                    x = x + block.attention(block.norm1(x))
                    x = x + block.linear2(block.gelu(block.linear1(block.norm2(x))))
            rows.append(model.classifier(model.norm(x)[0].mean(0)))
        torch.testing.assert_close(model(batch), torch.stack(rows), rtol=1e-4, atol=1e-5)


def test_every_patch_attends_to_every_other():
    model = shaken()
    x = torch.randn(1, 4, 12, generator=torch.Generator().manual_seed(3), requires_grad=True)
    model.blocks[0].attention(x)[0, 0].sum().backward()
    assert bool((x.grad[0].abs().amax(1) > 0).all())


def test_a_post_norm_has_no_last_normalization():
    assert isinstance(models.make("vit-small", seed=0, **SIZES, post_norm=True).norm, torch.nn.Identity)


def test_layers_are_patches_positions_four_per_block_and_the_classifier():
    layers = gyroscope.layers(models.make("vit-small", seed=0, **SIZES))
    assert [layer.name for layer in layers[:2]] == ["patches.weight", "places.weight"]
    assert len(layers) == 2 + 4 * 2 + 1
    assert layers[-1].name == "classifier.weight"


def test_matrices_but_not_positions_and_head_turn_when_steered():
    turning = gyroscope.steer(models.make("vit-small", seed=0, **SIZES), "muon").layers
    assert len(turning) == 1 + 4 * 2
    assert "patches.weight" in turning


def test_weights_start_as_those_of_the_gpt():
    model = models.make("vit-small", seed=0, depth=8)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            ends = name.endswith(("attention.out.weight", "linear2.weight"))
            assert parameter.std().item() == pytest.approx(0.005 if ends else 0.02, rel=0.06), name


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"side": 7}, "`side` must be a multiple of the patch of 3, got 7"),
        ({"width": 10}, "`width` must be a multiple of the 3 heads, got 10"),
        ({"depth": 0}, "must be whole numbers ≥ 1, got side 6, patch 3, width 12, depth 0, heads 3"),
        ({"classes": 0}, "`channels` and `classes` must be whole numbers ≥ 1"),
        ({"dropout": 1.0}, "`dropout` must be a share"),
    ],
    ids=["side", "heads", "depth", "classes", "dropout"],
)
def test_sizes_that_do_not_fit_are_refused(options, says):
    with pytest.raises(LabError, match=says):
        models.make("vit-small", seed=0, **SIZES | options)
