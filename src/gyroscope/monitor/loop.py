"""What happens around each step of a training loop: what is copied before it, what is measured after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from gyroscope.monitor import given
from gyroscope.monitor.chronicle import Chronicle
from gyroscope.monitor.clock import Stopwatch
from gyroscope.monitor.detail import Detail
from gyroscope.monitor.hooks import plainly
from gyroscope.monitor.pace import Pace
from gyroscope.monitor.request import SIGNAL
from gyroscope.monitor.track import Track


class Loop:
    """Measures the steps that are due, and decides which are.

    Attributes:
        recording: whether what is measured is still told; a rank that others wait for goes on without.
        alive: whether anything is measured at all.
        stopwatch: is entered around all of this, and what is around that.
    """

    def __init__(
        self,
        tracks: Sequence[Track],
        details: Sequence[Detail],
        pace: Pace,
        chronicle: Chronicle,
        loss: Callable[[], Any] | None,
    ) -> None:
        self.tracks, self.details, self.pace, self.chronicle = tracks, details, pace, chronicle
        self.recording = True
        self.alive = True
        self._loss = loss
        self._loss_failed = False
        self.stopwatch = Stopwatch()

    def before(self, track: Track) -> None:
        """A step is about to be taken."""
        # Decided before anything can fail: other ranks may be waiting for this one's part.
        track.measuring = self._due(track)
        if track.measuring or track.fresh or not self.chronicle.begun:
            with plainly():
                self._prepare(track)

    def after(self, track: Track) -> None:
        """It was taken."""
        measured = track.measuring
        track.measuring = False
        # Most steps are neither measured nor perhaps skipped, and do nothing that gradients could be in the way of.
        with plainly() if measured or track.may_skip else nullcontext():
            try:
                self._take(track, measured, analysed=track.conditioning)
            finally:
                self.arm(track)

    def _prepare(self, track: Track) -> None:
        if not self.chronicle.begun:
            self.chronicle.begin()
            track.measuring = self._due(track)  # the step may be another one now
            track.sampling = track.sampling and track.measuring
        if track.measuring:
            self._analyse(track)
            track.before()
        else:
            track.pass_by()

    def _take(self, track: Track, measured: bool, *, analysed: bool, seen: bool = True) -> None:
        """Count a step, measure it if it is to be, and say which are next; `seen` if a hook has seen it begin."""
        sampled = track.sampling
        try:
            if seen and track.skipped():
                track.leave()
                return
            self._count(track)
            if measured:
                self._measure(track)
            self._look_ahead(track, measured, sampled, analysed)
        except Exception:
            if self.pace.shared:  # other ranks go on to count on this one
                self._look_ahead(track, measured, sampled, analysed)
            raise

    def _look_ahead(self, track: Track, measured: bool, sampled: bool, analysed: bool) -> None:
        if sampled:
            track.next_detail = track.taken + self.pace.detail_interval
        if track is self.tracks[0]:
            self._account(measured, sampled, analysed)
        if analysed:
            track.analysed_at = track.taken
        if track.analysed_at is not None:
            # Known better with every step, as long as the price of the first is being learnt.
            track.next_conditioning = self.pace.next_conditioning(track.analysed_at)

    def _analyse(self, track: Track) -> None:
        conditioned = self.details[self.tracks.index(track)].conditioned
        if not track.conditioning or conditioned is None:
            return
        # A fused optimizer divides by the scale of the loss itself, within the step.
        problem = conditioned.analyse(scale=getattr(track.optimizer, "grad_scale", None))
        if problem is not None:
            self.chronicle.event("error", problem)

    def by_hand(self, track: Track) -> None:
        """A step was taken that no hook has seen."""
        try:
            self.chronicle.begin()
            track.unseen()
            measured = self._due(track)
            track.sampling = track.sampling and measured
            self._take(track, measured, analysed=False, seen=False)
        finally:
            self.arm(track)

    @property
    def looks_inside(self) -> bool:
        """Whether forward hooks are on, to look at the coming step."""
        return any(detail.looks_inside for detail in self.details)

    def ask_for(self, steps: int) -> None:
        """Measure the next steps, all of them and in detail."""
        self.pace.requested = 0
        for track in self.tracks:
            track.asked_for = max(track.asked_for, steps)
            track.next_detail = track.taken + 1
        self.arm()

    def arm(self, only: Track | None = None) -> None:
        """Put forward hooks on where the coming step is looked at in detail, and take them off where it is not."""
        for track, detail in zip(self.tracks, self.details, strict=True):
            if only is None or track is only:
                wanted = track.taken + 1 >= track.next_detail or track.asked_for > 0
                track.sampling = self.alive and wanted and self._due(track)
                if track.sampling:
                    with plainly():
                        detail.attach()
                else:
                    detail.detach()
                self._arm_conditioning(track, detail)

    def _arm_conditioning(self, track: Track, detail: Detail) -> None:
        conditioned = detail.conditioned
        if conditioned is not None:
            wanted = track.taken + 1 >= track.next_conditioning or track.asked_for > 0
            track.conditioning = self.alive and wanted and conditioned.error is None and self._due(track)
            if track.conditioning:
                with plainly():
                    conditioned.attach()
            else:
                conditioned.detach()

    def rest(self) -> None:
        """Take every forward hook off."""
        for detail in self.details:
            detail.detach()
            if detail.conditioned is not None:
                detail.conditioned.detach()

    def end(self) -> None:
        """The last step was taken."""
        self.chronicle.end()
        for detail in self.details:
            if (said := detail.exchanged.said(ended=True)) is not None:
                self.chronicle.event("note", said)
        if self.pace.dropped:
            text = f"{self.pace.dropped} measurements were dropped: the disk could not keep up"
            self.chronicle.event("interval", text)

    def _due(self, track: Track) -> bool:
        return self.pace.due(track.taken + 1, track.tried_at, asked_for=track.asked_for > 0)

    def _count(self, track: Track) -> None:
        """A step was taken. Each optimizer counts its own: others may have taken more, or be about to take theirs."""
        track.taken += 1
        track.asked_for = max(0, track.asked_for - 1)

    def _measure(self, track: Track) -> None:
        part = self.tracks.index(track)
        failed: Exception | None = None
        try:
            measured = track.measure()
        except Exception as error:
            if not self.pace.shared:
                raise
            failed = error
        # Other ranks take part in this too.
        detail = self.details[part].collect(track) if track.sampling or track.conditioning else {}
        if failed is not None:
            track.settle()
            raise failed
        if track.sampling:
            self._tell_exchanged(part)
        kept = not self.recording or self.chronicle.measured(part, measured, detail)
        track.settle(recorded=kept or self.pace.shared)
        recorder = self.chronicle.recorder
        if not kept and recorder is not None:
            if recorder.writer.error is not None:
                raise recorder.writer.error
            if not self.pace.shared:
                self.chronicle.event("interval", self.pace.overrun())
        if part == 0 and self.recording:
            self._tell_loss()

    def _tell_loss(self) -> None:
        if self._loss is None:
            return
        try:
            numbers = given.numbers(None, {"loss": self._loss()})
        except Exception as error:  # of the user's function, which may have no value yet; all else is recorded
            if not self._loss_failed:
                self._loss_failed = True
                said = f"the loss function failed: {type(error).__name__}: {error} (reported once; recording goes on)"
                self.chronicle.warn(said)
        else:
            self.chronicle.log(numbers)

    def _tell_exchanged(self, part: int) -> None:
        said = self.details[part].exchanged.said()
        if said is not None and self.recording:
            self.chronicle.warn(said)

    def _account(self, measured: bool, sampled: bool, analysed: bool) -> None:
        """Learn what this step cost, and decide on the next."""
        outside, own = self.stopwatch.take()
        first, recorder = self.tracks[0], self.chronicle.recorder
        self.pace.account(
            outside=outside, own=own, measured=measured, sampled=sampled, exposed=first.caught_up,
            analysed=analysed,
        )  # fmt: skip
        if recorder is not None and recorder.asked:
            self.pace.requested, recorder.asked = recorder.asked, 0
            text = f"{self.pace.requested} steps in detail were asked for through the file {SIGNAL!r}"
            self.chronicle.event("note", text)
        said = None
        if not self.pace.shared:
            said = self.pace.stretch()
        elif measured:
            said = self.pace.agree(first.parameters()[0].device)
        if said is not None:
            self.chronicle.event("interval", said)
        if self.pace.requested and (not self.pace.shared or self.pace.agreed_on):
            self.ask_for(self.pace.requested)
