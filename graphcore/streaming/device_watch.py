"""What takes a device's time, between two marks: known to the host only after the fact, and read without waiting."""

from dataclasses import dataclass

from graphcore.streaming.lanes import Lanes, Mark, device_faults
from graphcore.streaming.timeline import Event, Lane, Timeline


@dataclass(frozen=True, eq=False)
class LateEvent:
    """An event between two marks; see `Event`."""

    lane: Lane
    group: int
    began: Mark
    ended: Mark
    nbytes: int = 0
    worker: int = 0

    @property
    def is_over(self) -> bool:
        """Whether its times can be read."""
        return self.ended.is_over

    def settled(self) -> Event:
        """Return the event; it is over."""
        return Event(self.lane, self.group, self.began.seconds, self.ended.seconds, self.nbytes, self.worker)


@dataclass(frozen=True)
class DeviceStopwatch:
    """Something that takes the compute lane's time."""

    watch: "DeviceWatch"
    lane: Lane
    group: int
    began: Mark

    def stop(self) -> None:
        """It ends behind what has been enqueued to compute so far."""
        self._stop()

    def then(self, lane: Lane, group: int) -> "DeviceStopwatch":
        """It ends there, and something else begins: one mark for both."""
        return DeviceStopwatch(self.watch, lane, group, self._stop())

    def _stop(self) -> Mark:
        with device_faults(self.group):
            ended = self.watch.lanes.mark("compute")
        self.watch.timeline.add_late(LateEvent(self.lane, self.group, self.began, ended))
        return ended


@dataclass(frozen=True)
class DeviceWatch:
    """Times what the compute lane does, and how long it waits there, on the device itself."""

    lanes: Lanes
    timeline: Timeline

    def start(self, lane: Lane, group: int) -> DeviceStopwatch:
        """Begin to time something, behind what has been enqueued to compute so far."""
        with device_faults(group):
            return DeviceStopwatch(self, lane, group, self.lanes.mark("compute"))
