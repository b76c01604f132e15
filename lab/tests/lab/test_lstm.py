"""The recurrent language model follows its formulas, sees no later character, and starts with open forget gates."""

import pytest
import torch

import gyroscope
from gyroscope_lab import models
from gyroscope_lab.errors import LabError

SIZES = {"vocab": 7, "width": 5, "depth": 2}


def _text(*shape):
    return torch.randint(0, 7, shape, generator=torch.Generator().manual_seed(0))


def _logits(model, text):
    """Character by character, layer by layer, gate by gate."""
    cells, states = model.cells, [(torch.zeros(5).double(), torch.zeros(5).double()) for _ in range(2)]
    out = []
    for c in text.tolist():
        x = model.characters.weight[c]
        for l, (h, memory) in enumerate(states):  # noqa: E741
            w, u = getattr(cells, f"weight_ih_l{l}"), getattr(cells, f"weight_hh_l{l}")
            b = getattr(cells, f"bias_ih_l{l}") + getattr(cells, f"bias_hh_l{l}")
            i, f, g, o = (w @ x + u @ h + b).chunk(4)
            memory = torch.sigmoid(f) * memory + torch.sigmoid(i) * torch.tanh(g)
            x = torch.sigmoid(o) * torch.tanh(memory)
            states[l] = (x, memory)
        out.append(model.classifier.weight @ x + model.classifier.bias)
    return torch.stack(out)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_a_loop_over_gates(tied):
    model = models.make("lstm-small", seed=1, **SIZES, tied=tied).double()
    text = _text(2, 6)
    with torch.no_grad():
        expected = torch.stack([_logits(model, row) for row in text])
        torch.testing.assert_close(model(text), expected, rtol=1e-9, atol=1e-9)


def test_no_logit_depends_on_a_later_character():
    model = models.make("lstm-small", seed=1, **SIZES)
    text = _text(1, 6)
    other = text.clone()
    other[0, 4] = (other[0, 4] + 1) % 7
    with torch.no_grad():
        same = (model(text) == model(other)).all(-1)[0]
    assert same.tolist() == [True] * 4 + [False] * 2


def test_forget_gates_begin_open_and_all_else_is_uniform():
    cells = models.make("lstm-small", seed=3).cells
    for l in range(2):  # noqa: E741
        both = getattr(cells, f"bias_ih_l{l}") + getattr(cells, f"bias_hh_l{l}")
        assert (both[128:256] == 1).all()
        weight = getattr(cells, f"weight_hh_l{l}").detach()
        assert weight.abs().max() <= 128**-0.5
        assert weight.std().item() == pytest.approx(128**-0.5 / 3**0.5, rel=0.02)


def test_equal_seeds_give_equal_weights_and_the_random_state_stays():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, other = (models.make("lstm-small", seed=4, dropout=0.1) for _ in range(2))
    assert torch.equal(torch.rand(1), expected)
    assert all(map(torch.equal, one.parameters(), other.parameters()))


def test_its_matrices_are_steered_and_its_head_is_not():
    optimizer = gyroscope.steer(models.make("lstm-small", seed=0))
    assert optimizer.layers == tuple(f"cells.weight_{kind}_l{l}" for l in range(2) for kind in ("ih", "hh"))  # noqa: E741
    roles = {group["role"]: group["rule"] for group in optimizer.param_groups}
    assert roles == {"matrix": "turn", "embedding": "plain", "head": "plain", "other": "plain"}


def test_sizes_below_one_are_refused():
    with pytest.raises(LabError, match=r"All sizes of a recurrent network .* got vocab 7, width 0, depth 2\."):
        models.make("lstm-small", seed=0, **SIZES | {"width": 0})
