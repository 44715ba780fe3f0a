"""LoRA factors beside packed matrices on a GPU: the logits of merged weights, and the same bits when streamed."""

from pathlib import Path

import pytest
import torch
from support.files.adapter_files import drawn, packed_file, write_peft

IDS = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(3))
SHAPES = {
    f"model.layers.{layer}.{leaf}": shape
    for layer in range(3)
    for leaf, shape in (("self_attn.q_proj", (64, 64)), ("self_attn.o_proj", (64, 64)), ("mlp.gate_proj", (96, 64)))
}


@pytest.mark.parametrize("graph", ["eager", "compiled", "captured"])
def test_a_packed_file_with_factors_answers_as_merged_weights_do(graph: str, tmp_path: Path, load_on) -> None:
    model, factors = packed_file(tmp_path / "model.gguf", "llama"), drawn(SHAPES, rank=5)
    adapter = write_peft(tmp_path, factors, lora_alpha=1)
    for name, (a, b) in factors.items():
        model.get_submodule(name).weight.data += b @ a / 5
    expected = model(input_ids=IDS, use_cache=False).logits
    engine = load_on(tmp_path / "model.gguf", f"model.adapter={adapter}", graph=graph)
    assert (engine.logits(IDS.tolist()) - expected).abs().max() < 2e-4 * expected.abs().max()
    assert (engine.logits(IDS[:1].tolist(), by_token=True) - expected[:1]).abs().max() < 2e-4 * expected.abs().max()


@pytest.mark.parametrize("source", ["disk", "host"])
def test_factors_stream_with_their_layers(source: str, tmp_path: Path, load_on) -> None:
    packed_file(tmp_path / "model.gguf", "llama")
    adapter, found = write_peft(tmp_path, drawn(SHAPES, rank=5)), []
    for way, options in (("off", ()), ("on", (f"streaming.source={source}",))):
        engine = load_on(tmp_path / "model.gguf", f"model.adapter={adapter}", *options, dtype="bf16", streaming=way)
        assert engine.plan.is_streaming == (way == "on")
        answer = engine.generate(IDS[0].tolist(), max_new_tokens=16, ignore_eos=True)[0].token_ids
        found.append((engine.logits(IDS.tolist()), answer))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
