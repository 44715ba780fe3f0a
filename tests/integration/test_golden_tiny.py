"""The tiny checkpoints under golden/ give the logits that transformers and llama.cpp gave, from both of their forms.

Tolerances, over what the two references differ by themselves: 1.2e-6 for Llama 3 and Qwen 3; llama.cpp looks GELU up in
a table of half precision, so its GPT-2 differs by 3.8e-4 and its Gemma 3 by 1.2e-3.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from graphcore import Engine

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny"
LLAMACPP_TOLERANCES = {"llama3": 1e-5, "qwen3": 1e-5, "gpt2": 4e-4, "gemma3": 1.5e-3}
FORMS = [(name, form) for name in LLAMACPP_TOLERANCES for form in ("safetensors", "gguf")]


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_logits_match_both_references(name: str, form: str) -> None:
    golden = np.load(GOLDEN / "logits.npz")
    path = GOLDEN / (name if form == "safetensors" else f"{name}.gguf")
    ids = torch.from_numpy(golden["tokens"].astype(np.int64))[None]
    with Engine.load(path, dtype="fp32", device="cpu", graph="eager", overrides=["prefill_chunk=16"]) as engine:
        logits = engine.logits(ids)[0].numpy()
    assert np.abs(logits - golden[f"{name}.hf_logits"]).max() < 1e-5
    assert np.abs(logits - golden[f"{name}.llamacpp_logits"]).max() < LLAMACPP_TOLERANCES[name]


@pytest.mark.parametrize("name", LLAMACPP_TOLERANCES)
def test_both_forms_hold_the_same_weights(name: str) -> None:
    engines = [
        Engine.load(path, dtype="fp32", device="cpu", graph="eager")
        for path in (GOLDEN / name, GOLDEN / f"{name}.gguf")
    ]
    folder, file = (dict(engine.runner.builder.decoder.named_buffers()) for engine in engines)
    assert folder.keys() == file.keys()
    # llama.cpp's converter adds Gemma's one in float32, as we do.
    assert [key for key in folder if not torch.equal(folder[key], file[key])] == []
