"""What is open is closed again if a weight stream cannot be opened."""

from pathlib import Path

import pytest
import torch
from support.fake_sources import FakeSource, numbered_bytes

from graphcore.errors import StreamingError
from graphcore.streaming.moving_weights import MovingWeights
from graphcore.streaming.weight_stream import open_stream
from graphcore.weights.groups import Group
from graphcore.weights.plan import GroupPlan, Plan


def test_files_are_closed_if_the_device_s_link_cannot_be_opened() -> None:
    files = {path: FakeSource(path, numbered_bytes(64)) for path in (Path("first"), Path("second"))}
    moving = MovingWeights(Plan(GroupPlan((0, 64)), 0, "cuda"), groups=[Group(1, "layer 0", [])])

    def fail() -> None:
        raise StreamingError("no stream of the device is left")

    with pytest.raises(StreamingError, match="no stream of the device is left"):
        open_stream(None, moving, None, files, torch.device("cpu"), fail)
    assert [source.is_closed for source in files.values()] == [True, True]
