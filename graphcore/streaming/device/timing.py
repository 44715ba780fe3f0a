"""Timing of work on a device, between two marks. The host reads the times afterwards, without waiting."""

from dataclasses import dataclass

from graphcore.streaming.device.queues import Mark, Queues, device_faults
from graphcore.streaming.timeline import Event, Lane, Timeline


@dataclass(frozen=True, eq=False)
class LateEvent:
    """A timeline event whose times are those of two marks; the other fields are those of `Event`."""

    lane: Lane
    group: int
    began: Mark
    ended: Mark
    nbytes: int = 0
    worker: int = 0

    @property
    def is_over(self) -> bool:
        """Whether the times can be read without waiting."""
        return self.ended.is_over

    def settled(self) -> Event:
        """Return the event with its times. It must be over."""
        return Event(self.lane, self.group, self.began.seconds, self.ended.seconds, self.nbytes, self.worker)


@dataclass(frozen=True)
class DeviceStopwatch:
    """A running measurement of a device's compute queue."""

    watch: "DeviceWatch"
    lane: Lane
    group: int
    began: Mark

    def stop(self) -> None:
        """End the measurement after all compute work that is enqueued so far."""
        self._stop()

    def then(self, lane: Lane, group: int) -> "DeviceStopwatch":
        """End this measurement and begin another at the same mark."""
        return DeviceStopwatch(self.watch, lane, group, self._stop())

    def _stop(self) -> Mark:
        with device_faults(self.group):
            ended = self.watch.queues.mark("compute")
        self.watch.timeline.add_late(LateEvent(self.lane, self.group, self.began, ended))
        return ended


@dataclass(frozen=True)
class DeviceWatch:
    """A watch that times the compute queue on the device itself: its work and its waits."""

    queues: Queues
    timeline: Timeline

    def start(self, lane: Lane, group: int) -> DeviceStopwatch:
        """Begin a measurement after all compute work that is enqueued so far."""
        with device_faults(group):
            return DeviceStopwatch(self, lane, group, self.queues.mark("compute"))
