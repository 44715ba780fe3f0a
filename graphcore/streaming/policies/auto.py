"""streaming=auto: as many layer groups as the budget allows stay on the device; the others stream through slots."""

from graphcore.streaming.policy import StreamingPolicy
from graphcore.streaming.streamed import Streamed

AUTO = StreamingPolicy("auto", Streamed, keeps="most")
