"""One training, from initialization to test accuracy, measured and recorded throughout."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the name torch's own documentation uses)

from gyroscope.control import Layca
from gyroscope.control.rates import Rates
from gyroscope.monitor import Monitor, watch
from gyroscope_lab.data.split import Split
from gyroscope_lab.errors import LabError
from gyroscope_lab.training import checkpoint
from gyroscope_lab.training.checkpoint import Pace
from gyroscope_lab.training.feed import Feed
from gyroscope_lab.training.gauge import Gauge, Reading, correct, mean_loss
from gyroscope_lab.training.last_layer import LastLayer
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.tangents import Tangents
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.trial import Trial, require_nothing_kept

#: The files of the rates that a training recorded, and of the weights that it kept.
RATES, WEIGHTS = "rates.pt", "weights.pt"

Parallel = Literal["ddp", "fsdp"]


def train(
    trial: Trial,
    split: Split,
    *,
    folder: Path | str | None = None,
    device: str = "cpu",
    rates: Rates | None = None,
    save_every: float = 30.0,
    on_epoch: Callable[[Training], None] = lambda training: None,
    parallel: Parallel = "ddp",
) -> Result:
    """Train, and return the result; on a CPU it is bitwise reproducible for the same trial and thread count.

    The ranks of a process group call it together and divide every batch; see `gyroscope_lab.training.spread`.

    Args:
        trial: the task, the recipe and the seed.
        split: the data of the task.
        folder: where the run is recorded, saved and resumed; None to keep nothing.
        device: the device to train on.
        rates: the rates to replay, for a recipe that copies.
        save_every: least seconds between checkpoints, longer if saving is slow; 0 to save after every epoch.
        on_epoch: called at the end of every epoch.
        parallel: how ranks share the work: each with all weights ("ddp"), or with a part of them ("fsdp").

    >>> from gyroscope_lab.training.recipe import Recipe
    >>> from gyroscope_lab.training.tasks import task
    >>> digits = task("digits").lasting(1)
    >>> result = train(Trial(digits, Recipe("Layca", 3**-3, control="layca")), digits.source.load())
    >>> len(result.rotation), len(result.layers)
    (2, 7)
    """
    from gyroscope_lab.training.spread import Spread, in_a_group  # a subclass of Training

    if folder is None:
        require_nothing_kept(trial)
    kind: Callable[..., Training] = partial(Spread, parallel=parallel) if in_a_group() else Training
    training = kind(trial, split, folder=folder, device=device, rates=rates, save_every=save_every)
    try:
        for _ in training.proceed(on_epoch):
            pass
        return training.finish()
    finally:
        training.close()


class Training:
    """A trial under way.

    `proceed` is the loop. It yields after every step, so that many trainings can take turns. The readings at the end of
    an epoch are requested first, and other trainings take their turns until they arrive.

    Attributes:
        epoch: the number of completed epochs.
        loss, accuracy, validation, test_losses, test_accuracies, rotation: as in `Result`.
        ended: the reason to stop early, or None.
        waiting: True while it waits for the readings of an epoch.
        rank, ranks: the rank of this process, and the number of processes; see `gyroscope_lab.training.spread`.
        own, tangents, last, best: its random numbers, rates, measurements of the last layer and best weights so far.
        began, before, pace: when this process began, the seconds spent by earlier ones, and when it saves next.

    >>> from gyroscope_lab.training.recipe import Recipe
    >>> from gyroscope_lab.training.tasks import task
    >>> digits = task("digits").lasting(1)
    >>> training = Training(Trial(digits, Recipe("SGD", 0.1)), digits.source.load())
    >>> for _ in training.proceed():
    ...     pass
    >>> training.epoch, len(training.loss)
    (1, 1)
    >>> training.close()
    """

    rank, ranks = 0, 1

    def __init__(
        self,
        trial: Trial,
        split: Split,
        *,
        folder: Path | str | None = None,
        device: str | torch.device = "cpu",
        rates: Rates | None = None,
        save_every: float = 30.0,
        captured: bool = False,
        network: nn.Module | None = None,
    ) -> None:
        if network is not None and folder is not None:
            raise LabError(
                "`folder` must be None with a `network`: the trial in the folder would not describe that network."
            )
        trial.task.check(split)
        self.trial, self.device = trial, torch.device(device)
        self.folder = None if folder is None else Path(folder)
        self.split = split.to(self.device)
        self.model = self._placed(trial.network() if network is None else network)
        self.forward: Callable[[Tensor], Tensor] = self.model
        self.optimizer = trial.recipe.make(self.model, decayed=trial.task.decayed, captured=captured)
        schedule = trial.schedule
        self.feed = Feed(
            self.split, batch=schedule.batch, augmentation=trial.task.augmentation, seed=trial.seed, device=self.device,
            passes=schedule.passes, drawn=schedule.drawn, share=(self.rank, self.ranks),
        )  # fmt: skip
        self.take = self.feed.take
        self.steps = schedule.steps(len(split.y_train))
        self.epoch = 0
        self.ended: str | None = None
        self.waiting = False
        self.own = Own(self.device, seed=trial.seed, rank=self.rank, tf32=trial.precision != "float32")
        self.gauge = Gauge(self.model)
        self.loss: list[float] = []
        self.accuracy: list[float] = []
        self.validation: list[float] = []
        self.test_losses: list[float] = []
        self.test_accuracies: list[float] = []
        self._sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.rotation, self.norms = [[0.0] * len(self.gauge.names)], [self.gauge.read()[:, 1].tolist()]
        self.best: tuple[float, int, dict[str, Tensor]] | None = None
        self.began, self.before, self.pace = time.perf_counter(), 0.0, Pace(save_every)
        self._copied: int | None = None
        self.tangents = self._table(rates, schedule.epochs * self.steps)
        self.last = LastLayer(self.model, schedule.epochs * self.steps, self.device) if trial.follows else None
        state = None if self.folder is None else self._found(self.folder)
        if state is not None and self.folder is not None:
            with checkpoint.resumed(self.folder):
                self._load(state)
        self.monitor = self._watched(state)

    def _placed(self, model: nn.Module) -> nn.Module:
        model = model.to(self.device)
        if self.device.type == "cuda" and self.split.x_train.dim() == 4:
            return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
        return model

    def _found(self, folder: Path) -> dict[str, Any] | None:
        return checkpoint.load(folder, key=self.trial.key)

    def _table(self, rates: Rates | None, steps: int) -> Tangents | None:
        recipe = self.trial.recipe
        if recipe.copies is not None:
            if rates is None or not isinstance(self.optimizer, Layca):
                raise LabError(f"`rates` must be those of {recipe.copies.name}, which {recipe.name} copies, got None.")
            self._copied = len(rates.tangents) // self.steps
            return Tangents.replay(self.optimizer, rates, self.device, steps=self.steps)
        return Tangents.blank(self.model, steps, self.device) if recipe.records else None

    def _watched(self, state: dict[str, Any] | None) -> Monitor | None:
        if self.folder is None:
            return None
        if self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
        every, on_gpu = self.trial.every or self.steps, self.device.type == "cuda"
        conditions = self.trial.conditions
        monitor = watch(
            self.model, self.optimizer, self.folder, every=every, budget=None, conditioning=conditions,
            activations=not on_gpu or conditions is not None,
            detail_every=conditions or every * (1 if on_gpu else 10), meta={"trial": self.trial.description},
        )  # fmt: skip
        try:
            if state is not None:
                with checkpoint.resumed(self.folder):
                    monitor.load_state_dict(state["monitor"])
        except BaseException:
            monitor.close()
            raise
        return monitor

    def proceed(self, on_epoch: Callable[[Training], None] = lambda training: None) -> Iterator[None]:
        """Train to the end, yielding after every step and while waiting."""
        schedule = self.trial.schedule
        while self.epoch < schedule.epochs and self.ended is None:
            self._turn_to("train")
            self.feed.shuffle()
            self._sums.zero_()
            for step, count in enumerate(schedule.batches(len(self.split.y_train))):
                if step == 0 and schedule.restarts and self.epoch in schedule.milestones:
                    self.trial.recipe.forget_momentum(self.optimizer)
                if step == 0 or schedule.cosine or self.epoch < schedule.warmup:
                    self.trial.recipe.set_rate(self.optimizer, schedule.multiplier(self.epoch, step / self.steps))
                before = self._sums.clone() if self.trial.every == 1 else None
                with self.own.turn():
                    self.step(count)
                if before is not None:
                    self._log_batch(count, before)
                yield
            with self.own.turn():
                reading = self._read()
            self.waiting = True
            while not reading.ready:
                yield
            self.waiting = False
            self._close_epoch(reading.numbers())
            on_epoch(self)

    def step(self, count: int) -> None:
        """One step, on the next `count` examples."""
        self.advance(count)

    def _log_batch(self, count: int, before: Tensor) -> None:
        """Record the loss and accuracy of a batch, or of this rank's share, if every step is measured."""
        share = (self.rank + 1) * count // self.ranks - self.rank * count // self.ranks
        if self.monitor is not None and share:
            loss, accuracy = (self._sums - before) / share
            self.monitor.log(batch_loss=loss, batch_accuracy=accuracy)

    def advance(self, count: int) -> None:
        """The device's work of a step; with most optimizers nothing here waits for the device."""
        self.differentiate(count)
        self.update()

    def differentiate(self, count: int) -> None:
        """Compute the gradients of the next examples; nothing here waits for the device."""
        x, y = self.take(count)
        with self._autocast():
            outputs = self.forward(x)
        scores = outputs if outputs.dtype == torch.float64 else outputs.float()
        loss = F.cross_entropy(scores.flatten(0, -2), y.flatten())
        self.optimizer.zero_grad()
        # The gradients of the ranks are averaged, which is exact for shares of equal size.
        torch.autograd.backward(loss if self.ranks == 1 else loss * (self.ranks * len(y) / count))
        if self.last is not None:
            self.last.note(outputs, y, loss)
        right = (outputs.detach().argmax(dim=-1) == y).float().mean()
        self._sums += len(y) * torch.stack([loss.detach(), right]).double()

    def update(self) -> None:
        """Step the optimizer."""
        if self.tangents is None:
            self.optimizer.step()
        else:
            self.tangents.step(self.optimizer)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.trial.precision != "bf16":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def _turn_to(self, mode: Literal["train", "eval"]) -> None:
        """Set the mode of the model and, if it has modes, of the optimizer: averaging ones swap weights to evaluate."""
        getattr(self.model, mode)()
        getattr(self.optimizer, mode, lambda: None)()

    def _evaluated(self, x: Tensor, y: Tensor) -> Tensor:
        self._turn_to("eval")
        with self._autocast():
            return correct(self.model, self.split, x, y) / y.numel()

    def _test_loss(self) -> Tensor:
        with self._autocast():
            return mean_loss(self.model, self.split, self.split.x_test, self.split.y_test)

    def _read(self) -> Reading:
        """Request the readings of an epoch: loss, accuracy, those on held-out examples, rotation and norm by layer."""
        self._turn_to("eval")
        seen = sum(self.trial.schedule.batches(len(self.split.y_train)))
        values = [self._sums / seen, self.gauge.read().T.flatten()]
        if self.split.x_val is not None and self.split.y_val is not None:
            values.append(self._evaluated(self.split.x_val, self.split.y_val)[None])
        if self.trial.task.test_loss:
            values.append(self._test_loss()[None])
        if self.trial.task.test_curve:
            values.append(self._evaluated(self.split.x_test, self.split.y_test)[None])
        return Reading(torch.cat(values))

    def _close_epoch(self, numbers: list[float]) -> None:
        n = len(self.gauge.names)
        self.epoch += 1
        self.loss.append(numbers[0])
        self.accuracy.append(numbers[1])
        self.rotation.append(numbers[2 : 2 + n])
        self.norms[1:] = [numbers[2 + n : 2 + 2 * n]]
        told = {"loss": numbers[0], "accuracy": numbers[1]}
        others = iter(numbers[2 + 2 * n :])
        if self.split.x_val is not None:
            self.validation.append(next(others))
            told["validation_accuracy"] = self.validation[-1]
        if self.trial.task.test_loss:
            self.test_losses.append(next(others))
            told["test_loss"] = self.test_losses[-1]
        if self.trial.task.test_curve:
            self.test_accuracies.append(next(others))
        if self.monitor is not None:
            self.monitor.log(told)
        if self.trial.task.tests == "best" and (self.best is None or self.validation[-1] > self.best[0]):
            self.best = (self.validation[-1], self.epoch, self._copy())
        self.ended = why_end(self.trial.task, loss=self.loss, accuracy=self.accuracy, copied=self._copied)
        if self.ended is not None and self.monitor is not None:
            self.monitor.note(self.ended)
        self._save_in_time()

    def _copy(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    @contextmanager
    def _tested(self) -> Iterator[int]:
        """Put the weights to test in place of the last ones; yield their epoch."""
        if self.best is None:
            yield self.epoch
            return
        last = self._copy()
        self.model.load_state_dict(self.best[2])
        try:
            yield self.best[1]
        finally:
            self.model.load_state_dict(last)

    def finish(self) -> Result:
        """Test, and return the result; it is also written to the folder."""
        split = self.split
        with self._tested() as tested, self.own.turn():
            trained = float(self._evaluated(split.x_train, split.y_train))
            test = float(self._evaluated(split.x_test, split.y_test))
        result = Result(
            trained, test, loss=self.loss, layers=self.gauge.names, rotation=self.rotation, accuracy=self.accuracy,
            validation=self.validation, test_losses=self.test_losses, test_accuracies=self.test_accuracies,
            norms=self.norms, tested=tested, ended=self.ended,
            seconds=self.before + time.perf_counter() - self.began,
        )  # fmt: skip
        if self.monitor is not None and self.folder is not None:
            self.monitor.log(train_accuracy=trained, test_accuracy=test)
            self.monitor.close()
            checkpoint.recorded(self.monitor)
            with self._tested():
                self._keep(self.folder, result)
        return result

    def _keep(self, folder: Path, result: Result) -> None:
        if self.tangents is not None and self.trial.recipe.records:
            for left in folder.glob("rates-*.new"):  # of a process that was killed while it wrote them
                left.unlink()
            self.tangents.rates.save(folder / RATES)
        if self.last is not None:
            self.last.write(folder)
        if self.trial.keeps:
            torch.save(self._weights(), folder / WEIGHTS)
        result.write(folder / "result.json", self.trial.description)
        (folder / checkpoint.FILE).unlink(missing_ok=True)

    def _weights(self) -> dict[str, dict[str, Any]]:
        initial = dict(zip(self.gauge.names, self.gauge.initial, strict=True))
        return {"initial": initial, "tested": self.model.state_dict()}

    def close(self) -> None:
        """Finish the run; it is marked as interrupted if training has not ended."""
        if self.monitor is not None:
            self.monitor.close(interrupted=True)

    def _save_in_time(self) -> None:
        if self.folder is not None and self.pace.due:
            self.save()

    def save(self) -> None:
        """Save everything that the rest of the training depends on."""
        assert self.folder is not None
        with self.pace.taken():
            if self.monitor is not None:
                checkpoint.recorded(self.monitor)
            checkpoint.save(self.folder, self._state())

    def _state(self) -> dict[str, Any]:
        return checkpoint.state_of(self)

    def _load(self, state: dict[str, Any]) -> None:
        checkpoint.restore(self, state)


def why_end(task: Task, *, loss: Sequence[float], accuracy: Sequence[float], copied: int | None = None) -> str | None:
    """Return the reason why a training ends after its epochs so far, or None if it continues.

    These are the rules of the papers' authors. A training ends if the loss is not finite. With `stop_at`, it ends if
    the loss is at most that, or has not changed for three epochs, so that four losses are equal. With `fails`, it ends
    if the accuracy is at most that in that epoch. A training that copies rates ends when they end.

    Args:
        task: the task, with its `stop_at` and `fails`.
        loss: the training loss of each epoch so far.
        accuracy: the training accuracy of each.
        copied: the number of epochs of the training whose rates are copied.

    >>> from gyroscope_lab.training.tasks import task
    >>> why_end(task("c10-cnn1"), loss=[1.0, 5e-5], accuracy=[0.5, 1.0])
    'the loss has reached 0.0001 in epoch 2'
    """
    epoch = len(loss)
    if not isfinite(loss[-1]):
        return f"diverged: the loss is {loss[-1]} in epoch {epoch}; lower the rate"
    if task.stop_at is not None and loss[-1] <= task.stop_at:
        return f"the loss has reached {task.stop_at:g} in epoch {epoch}"
    if task.stop_at is not None and epoch >= 4 and len(set(loss[-4:])) == 1:
        return f"the loss has not changed for three epochs, in epoch {epoch}"
    if task.fails is not None and epoch == task.fails[0] + 1 and accuracy[-1] <= task.fails[1]:
        return f"does not learn: the training accuracy is {accuracy[-1]:.3f} in epoch {epoch}"
    if copied is not None and copied <= epoch < task.schedule.epochs:
        return f"the training that is copied ended in epoch {epoch}"
    return None


class Own:
    """The random numbers of one training, such as dropout's, and its precision; both are set only during its turns.

    torch has one random generator per device, and one global precision. Between turns both are restored, for the
    caller, for other trainings, and for their captured steps, which keep the generator of their capture.

    Args:
        device: the device of the training.
        seed: the seed of the training.
        rank: the rank of the process, if several divide the batches; each rank has its own random numbers.
        tf32: True to let a GPU round the factors of products to TF32.

    >>> first, other = (Own(torch.device("cpu"), seed=1) for _ in range(2))
    >>> _ = torch.manual_seed(0)
    >>> with first.turn():
    ...     one = torch.rand(1)
    >>> between = torch.rand(1)
    >>> with other.turn():
    ...     torch.rand(1) == one
    tensor([True])
    >>> between == torch.rand(1, generator=torch.Generator().manual_seed(0))
    tensor([True])
    """

    def __init__(self, device: torch.device, *, seed: int, rank: int = 0, tf32: bool = False) -> None:
        self._seed, self._rank, self._tf32 = seed, rank, tf32
        self._gpu: torch.Generator | None = None
        if device.type == "cuda":
            self._index = torch.cuda.current_device() if device.index is None else device.index
            self._gpu = torch.Generator(torch.device("cuda", self._index))
        self._begin(epoch=0)

    def _begin(self, *, epoch: int) -> None:
        # Not the seed itself: the weights and the order of the examples are drawn from it. torch uses 32 bits of it.
        seed = ((self._seed * 1_000_003 + epoch) * 1_000_003 + self._rank + 1) % 2**32
        self._cpu = torch.Generator().manual_seed(seed).get_state()
        if self._gpu is not None:
            self._gpu.manual_seed(seed)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Set the random state and the precision for a turn."""
        before = torch.get_rng_state()
        torch.set_rng_state(self._cpu)
        try:
            with self._on_gpu():
                yield
        finally:
            self._cpu = torch.get_rng_state()
            torch.set_rng_state(before)

    @contextmanager
    def _on_gpu(self) -> Iterator[None]:
        if self._gpu is None:
            yield
            return
        products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
        tf32 = products.allow_tf32, convolutions.allow_tf32
        shared = torch.cuda.default_generators[self._index]
        before = shared.graphsafe_get_state()
        # The state itself, not a copy: captured steps advance it.
        shared.graphsafe_set_state(self._gpu)
        products.allow_tf32 = convolutions.allow_tf32 = self._tf32
        try:
            yield
        finally:
            products.allow_tf32, convolutions.allow_tf32 = tf32
            shared.graphsafe_set_state(before)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"random": self._cpu, "random_cuda": None if self._gpu is None else self._gpu.get_state()}

    def load(self, state: dict[str, Any]) -> None:
        """Resume from a checkpoint of a training, which its first process wrote."""
        if self._rank > 0:
            self._begin(epoch=state["epoch"])
            return
        torch.Generator().set_state(state["random"])  # rejects invalid states
        self._cpu = state["random"]
        if self._gpu is not None and state["random_cuda"] is not None:
            self._gpu.set_state(state["random_cuda"])
