"""The last layer, followed step by step, against autograd and eigenvalue solvers on the same batches."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from gyroscope_lab.data import Source
from gyroscope_lab.errors import LabError
from gyroscope_lab.training.last_layer import FILE, LastLayer, followed
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.tasks import task
from gyroscope_lab.training.training import Training, train
from gyroscope_lab.training.trial import Trial

DEEP = replace(task("digits-deep").lasting(2), model="resnet-lastbn-8")
TRIAL = Trial(DEEP, Recipe("SGD", 0.1, momentum=0.9, nesterov=True), follows=True)
SPLIT = DEEP.source.load()


@pytest.mark.parametrize("count", [6, 40])
def test_a_row_is_what_per_example_gradients_say(count):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 4)).double()
    last = LastLayer(model, 1, torch.device("cpu"))
    x, y = torch.randn(count, 3, dtype=torch.float64), torch.randint(0, 4, (count,))
    outputs = model(x)
    loss = F.cross_entropy(outputs, y)
    loss.backward()
    last.note(outputs, y, loss)
    [row] = last.state()

    seen, weight = model[:2](x).detach(), model[2].weight.detach()
    heads = [F.linear(one, weight, model[2].bias.detach()).requires_grad_() for one in seen]
    gradients = [torch.autograd.grad(F.cross_entropy(h, label), h)[0] for h, label in zip(heads, y, strict=True)]
    both = torch.stack([torch.outer(g, one).flatten() for g, one in zip(gradients, seen, strict=True)])

    def largest(rows):
        return torch.linalg.eigvalsh(rows.T @ rows / count)[-1]

    expected = [
        loss.detach(),
        (outputs.argmax(1) == y).double().mean(),
        largest(seen),
        largest(torch.stack(gradients)),
        largest(both),
        weight.norm(),
        model[2].weight.grad.norm(),
    ]
    assert row.numpy() == pytest.approx(torch.stack(expected).numpy(), rel=1e-5)


def test_texts_are_refused_which_have_a_label_for_each_character():
    text = replace(DEEP, source=Source("shakespeare"), model="gpt-small", options=())
    with pytest.raises(LabError, match="must be False for digits-deep: its texts have one label per character"):
        replace(TRIAL, task=text)


def test_every_step_of_a_training_is_there_and_training_is_the_same(tmp_path):
    result = train(TRIAL, SPLIT, folder=tmp_path)
    course = followed(tmp_path)
    assert len(course) == 2 * DEEP.schedule.steps(len(SPLIT.y_train))
    assert course.loss.reshape(2, -1).mean(axis=1) == pytest.approx(result.loss)
    assert (course.lambda_x > 0).all()
    assert np.isfinite(course.lambda_m).all()
    plain = train(replace(TRIAL, follows=False), SPLIT)
    assert plain.loss == result.loss
    assert plain.rotation == result.rotation


def test_it_goes_on_from_a_checkpoint(tmp_path):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    train(TRIAL, SPLIT, folder=whole)

    class StopError(Exception):
        pass

    def stop(training: Training) -> None:
        training.save()
        raise StopError

    with pytest.raises(StopError):
        train(TRIAL, SPLIT, folder=parted, on_epoch=stop)
    train(TRIAL, SPLIT, folder=parted)
    assert followed(parted).lambda_m == pytest.approx(followed(whole).lambda_m, rel=0, abs=0)


def test_momentum_is_forgotten_at_the_cuts():
    """With two epochs and a cut by a factor of 1 between them, only a restart changes the second epoch."""
    schedule = replace(DEEP.schedule, cuts=(0.5,), factor=1.0)
    results = [
        train(Trial(replace(DEEP, schedule=replace(schedule, restarts=restarts)), TRIAL.recipe), SPLIT)
        for restarts in (True, False)
    ]
    assert results[0].loss[0] == results[1].loss[0]
    assert results[0].loss[1] != results[1].loss[1]


def test_frozen_layers_stay_and_the_others_do_not():
    result = train(Trial(DEEP, replace(TRIAL.recipe, frozen=(1, -2))), SPLIT)
    turned = np.array(result.rotation[-1])
    assert turned[1] == turned[-2] == 0
    assert (np.delete(turned, [1, len(turned) - 2]) > 0).all()
    with pytest.raises(LabError, match="`frozen` must name some of the 8 layers of resnet-lastbn-8, got 30"):
        replace(TRIAL, recipe=replace(TRIAL.recipe, frozen=(30,))).network()


def test_what_is_not_there_or_damaged_is_said(tmp_path):
    with pytest.raises(LabError, match="follows=True"):
        followed(tmp_path)
    (tmp_path / FILE).write_bytes(b"PK\x03\x04 no archive")
    with pytest.raises(LabError, match="cannot be read"):
        followed(tmp_path)
    np.savez_compressed(tmp_path / FILE, loss=np.arange(1000.0))
    content = (tmp_path / FILE).read_bytes()
    for place in range(60, 160):  # some bytes fail as zlib's, some by their checksum
        (tmp_path / FILE).write_bytes(content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :])
        with pytest.raises(LabError, match="cannot be read"):
            followed(tmp_path)
    with pytest.raises(
        LabError, match=r"The last layer must be linear to be followed, got a Conv2d\. Leave follows=True out"
    ):
        LastLayer(torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1)), 1, torch.device("cpu"))
