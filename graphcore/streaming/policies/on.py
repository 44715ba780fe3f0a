"""streaming=on: no matrix stays on the device; every layer group and the head stream through slots."""

from graphcore.streaming.policy import StreamingPolicy
from graphcore.streaming.streamed import Streamed

ON = StreamingPolicy("on", Streamed)
