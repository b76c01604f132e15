"""The transformer follows its formulas, sees no later character, and has the right initialization."""

from math import exp, log, sqrt

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import gyroscope
from gyroscope_lab import models
from gyroscope_lab.errors import LabError

SIZES = {"vocab": 11, "context": 9, "width": 12, "depth": 2, "heads": 3}


def _text(*shape, vocab=11, seed=0):
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))


def _shaken(**options):
    """A model with changed gains and biases, so that leaving one out would be noticed."""
    model = models.make("gpt-small", seed=1, **SIZES, **options).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator), alpha=0.5)
    return model


def _normalized(x, norm):
    scaled = (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt() * norm.weight
    return scaled if norm.bias is None else scaled + norm.bias


def _linear(x, module):
    return module.weight @ x if module.bias is None else module.weight @ x + module.bias


def _attended(xs, attention, heads):
    """Position by position, head by head: softmax over the positions so far."""
    width = len(xs[0])
    size = width // heads
    projected = [_linear(x, attention.qkv) for x in xs]
    out = []
    for t in range(len(xs)):
        parts = []
        for head in range(heads):
            mine = slice(head * size, (head + 1) * size)
            q = projected[t][:width][mine]
            keys = [projected[u][width : 2 * width][mine] for u in range(t + 1)]
            values = [projected[u][2 * width :][mine] for u in range(t + 1)]
            scores = [exp((q @ k).item() / sqrt(size)) for k in keys]
            parts.append(sum(s / sum(scores) * v for s, v in zip(scores, values, strict=True)))
        out.append(_linear(torch.cat(parts), attention.out))
    return out


def _gelu(x):
    return x * (1 + torch.erf(x / sqrt(2))) / 2


def _logits(model, text, heads):
    xs = [model.characters.weight[c] + model.places.weight[t] for t, c in enumerate(text.tolist())]
    for block in model.blocks:
        seen = _attended([_normalized(x, block.norm1) for x in xs], block.attention, heads)
        xs = [x + a for x, a in zip(xs, seen, strict=True)]
        inner = [_gelu(_linear(_normalized(x, block.norm2), block.linear1)) for x in xs]
        xs = [x + _linear(h, block.linear2) for x, h in zip(xs, inner, strict=True)]
    return torch.stack([_linear(_normalized(x, model.norm), model.classifier) for x in xs])


@pytest.mark.parametrize("options", [{}, {"biases": True, "tied": True}], ids=["plain", "biases-tied"])
@pytest.mark.parametrize("length", [1, 6, 9])
def test_logits_are_those_of_a_loop_over_places_and_heads(options, length):
    model = _shaken(**options)
    text = _text(2, length)
    with torch.no_grad():
        expected = torch.stack([_logits(model, row, heads=3) for row in text])
        torch.testing.assert_close(model(text), expected, rtol=1e-9, atol=1e-9)


def test_a_post_norm_transformer_normalizes_sums_and_nothing_after_them():
    model, text = _shaken(post_norm=True), _text(2, 9)
    with torch.no_grad():
        x = model.characters(text) + model.places.weight
        for block in model.blocks:
            x = block.norm1(x + block.attention(x))
            x = block.norm2(x + block.linear2(block.gelu(block.linear1(x))))
        torch.testing.assert_close(model(text), model.classifier(x), rtol=1e-12, atol=1e-12)
    assert isinstance(model.norm, nn.Identity)


@pytest.mark.parametrize("changed", range(1, 9))
def test_a_later_character_leaves_earlier_logits_as_they_are(changed):
    model = _shaken()
    text = _text(2, 9)
    other = text.clone()
    other[:, changed] = (other[:, changed] + 1) % 11
    before, after = model(text), model(other)
    torch.testing.assert_close(after[:, :changed], before[:, :changed], rtol=1e-12, atol=1e-12)
    assert bool(((after - before)[:, changed:].abs().amax(-1) > 1e-6).all())


def test_gradients_reach_every_parameter_and_no_later_place():
    model = _shaken(biases=True)
    text = _text(3, 9)
    F.cross_entropy(model(text).flatten(0, 1), _text(3, 9, seed=1).flatten()).backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())
    model.zero_grad()
    model(text)[:, 3].sum().backward()
    reached = model.places.weight.grad.abs().amax(1)
    assert bool((reached[:4] > 0).all())
    assert bool((reached[4:] == 0).all())


def test_layers_are_the_embeddings_four_a_block_and_the_classifier():
    names = ["attention.qkv", "attention.out", "linear1", "linear2"]
    blocks = [f"blocks.{block}.{name}.weight" for block in range(2) for name in names]
    model = models.make("gpt-small", seed=0, **SIZES)
    layers = gyroscope.layers(model)
    assert [layer.name for layer in layers] == ["characters.weight", "places.weight", *blocks, "classifier.weight"]
    assert [layer.kind for layer in layers] == ["embedding"] * 2 + ["linear"] * 9
    others = {name for name, _ in model.named_parameters()} - {layer.name for layer in layers}
    assert others == {"norm.weight", *(f"blocks.{block}.norm{n}.weight" for block in range(2) for n in (1, 2))}


def test_a_tied_classifier_is_the_embedding_and_one_layer():
    model = models.make("gpt-small", seed=0, tied=True, **SIZES)
    assert model.classifier.weight is model.characters.weight
    untied = gyroscope.layers(models.make("gpt-small", seed=0, **SIZES))
    assert [layer.name for layer in gyroscope.layers(model)] == [layer.name for layer in untied[:-1]]
    assert torch.equal(model.characters.weight, untied[0].parameter)


def test_weights_start_at_a_fiftieth_and_those_that_end_on_the_sum_lower():
    model = models.make("gpt-small", seed=0, biases=True, depth=8)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            ends = name.endswith(("attention.out.weight", "linear2.weight"))
            assert parameter.std().item() == pytest.approx(0.005 if ends else 0.02, rel=0.04), name
        else:
            assert parameter.unique().tolist() == [0.0 if name.endswith("bias") else 1.0], name


def test_the_first_loss_is_near_that_of_guessing():
    text = _text(4, 100, vocab=65)
    logits = models.make("gpt-small", seed=0)(text)
    assert logits.shape == (4, 100, 65)
    # Logits are nearly N(0, s²) with s = 0.02 √width, which costs s²/2 over log vocab.
    expected = log(65) + 0.02**2 * 128 / 2
    assert F.cross_entropy(logits.flatten(0, 1), _text(4, 100, vocab=65, seed=1).flatten()).item() == pytest.approx(
        expected, abs=0.03
    )


def test_it_learns_a_text_that_repeats_itself():
    text = torch.arange(40).remainder(5).repeat(2, 1)
    model = models.make("gpt-small", seed=0, vocab=5, context=40, width=16, depth=1, heads=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


def test_dropout_is_in_training_alone_and_of_the_share_asked_for():
    plain, dropping = (models.make("gpt-small", seed=0, dropout=dropout) for dropout in (0.0, 0.3))
    text = _text(2, 50, vocab=65)
    assert torch.equal(plain.train()(text), plain.eval()(text))
    assert torch.equal(dropping.eval()(text), plain(text))
    assert not torch.equal(dropping.train()(text), plain(text))
    shares = [module.p for module in dropping.modules() if isinstance(module, nn.Dropout)]
    assert shares == [0.3] * 5
    assert {block.attention.dropout for block in dropping.blocks} == {0.3}
    assert not any(isinstance(module, nn.Dropout) for module in plain.modules())


def test_a_forward_pass_compiles_to_one_graph():
    model = models.make("gpt-small", seed=0, **SIZES)
    text = _text(2, 9)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(text), model(text))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"width": 10, "heads": 4}, "`width` must be a multiple of the 4 heads, got 10"),
        (
            {"depth": 0},
            "must be whole numbers ≥ 1, got vocab 65, context 128, width 128, depth 0, heads 4",
        ),
        ({"dropout": 1.5}, r"`dropout` must be a share ≥ 0 and < 1, got 1\.5"),
    ],
    ids=["heads", "depth", "dropout"],
)
def test_sizes_that_do_not_fit_are_refused(options, says):
    with pytest.raises(LabError, match=says):
        models.make("gpt-small", seed=0, **options)


def test_a_text_longer_than_the_context_is_refused():
    model = models.make("gpt-small", seed=0, **SIZES)
    with pytest.raises(LabError, match="Sequences must be no longer than the context of 9, got 10"):
        model(_text(1, 10))


@pytest.mark.gpu
def test_a_cuda_graph_of_it_takes_new_characters():
    model = models.make("gpt-small", seed=0, **SIZES).cuda().eval()
    text = _text(2, 9).cuda()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        model(text)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        logits = model(text)
    text.copy_(_text(2, 9, seed=1))
    graph.replay()
    with torch.no_grad():
        torch.testing.assert_close(logits, model(text), rtol=1e-3, atol=1e-4)
