"""How the workers of pytest-xdist share the test files with `--dist loadfile`.

worker 1   test_model_parity test_decode_equals_forward ...   one unit: they use the same compiled engines
worker 2   test_gpu_compile | test_streamed_experts | ...     the longest begin first, so none is left at the end
"""

import pytest
from file_order import TOGETHER, file_of
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling


class LongestFilesFirst(LoadFileScheduling):
    """Gives each worker whole files, in the order of collection; those of `TOGETHER` go to one worker."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # xdist's own order: files with many tests first

    def _split_scope(self, nodeid: str) -> str:
        return TOGETHER[0] if file_of(nodeid) in TOGETHER else super()._split_scope(nodeid)
