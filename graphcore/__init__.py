"""graphcore runs large language models as compiled graphs, whether or not they fit in memory.

    from graphcore import Engine
    engine = Engine.load("smollm2")
    print(engine.generate("The capital of France is", max_new_tokens=8)[0].text)

`Engine`, `ForwardState` and `LayerLoader` are imported at their first use: importing graphcore alone does not import
torch.
"""

from typing import TYPE_CHECKING

import graphcore.processors  # noqa: F401 - which takes the time of the first import

if TYPE_CHECKING:
    from graphcore.engine.engine import Engine
    from graphcore.engine.forward_state import ForwardState
    from graphcore.engine.layer_loader import LayerLoader

__version__ = "0.1.0"
__all__ = ["Engine", "ForwardState", "LayerLoader", "__version__"]


def __getattr__(name: str) -> object:
    if name == "Engine":
        from graphcore.engine.engine import Engine

        return Engine
    if name == "ForwardState":
        from graphcore.engine.forward_state import ForwardState

        return ForwardState
    if name == "LayerLoader":
        from graphcore.engine.layer_loader import LayerLoader

        return LayerLoader
    raise AttributeError(f"module 'graphcore' has no attribute {name!r}")
