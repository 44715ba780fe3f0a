"""Records what llama.cpp's samplers keep of random logits, and what they make of histories: samplers.json.

    PYTHONPATH=tests python tests/golden/llamacpp/record_samplers.py

Needs graphcore with its extras "test" and "peers".
"""

import json
import tempfile
from pathlib import Path

from support.llama_cpp_samplers import judged

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(judged(Path(folder)))
    (Path(__file__).parent / "samplers.json").write_text(text.replace("}, {", "},\n{") + "\n", encoding="utf-8")
