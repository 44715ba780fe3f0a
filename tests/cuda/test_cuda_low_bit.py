"""Files of one to three bits a weight on a GPU: the logits of transformers, and streamed the resident file's bits."""

from pathlib import Path

import pytest
import torch
from support.files.low_bit_files import FILES, IDS, LEVELS, SHAPES, low_bit_file

OPTIONS = {
    "disk": ("streaming.source=disk", "streaming.prefetch=1"),
    "host": ("streaming.source=host", "streaming.layer_group_size=1"),
}
MORE_OPTIONS = {
    **OPTIONS,
    "one slot": ("streaming.source=host", "streaming.prefetch=0"),
    "unlocked": ("streaming.source=host", "streaming.pinned_memory=false"),
    "sync": ("streaming.source=disk", "streaming.mode=sync"),
}


@pytest.mark.parametrize("graph", ["eager", "captured"])
@pytest.mark.parametrize("name", FILES)
def test_a_mixed_file_answers_as_transformers_does(name: str, graph: str, tmp_path: Path, load_on) -> None:
    model, path = low_bit_file(tmp_path / "model.gguf", FILES[name], SHAPES[1], seed=len(name))
    expected = model(input_ids=IDS, use_cache=False).logits
    engine = load_on(path, graph=graph)
    found = engine.logits(IDS.tolist())
    assert (found - expected).abs().max() < 2e-4 * expected.abs().max()
    prompt = IDS[0].tolist()
    tokens = engine.generate(prompt, max_new_tokens=12, ignore_eos=True)[0].token_ids
    whole = model(input_ids=torch.tensor([prompt + list(tokens)]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    chosen = whole.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (whole.max(1).values - chosen).max() < 1e-3 * whole.abs().max(), "a token that is not the likeliest"


@pytest.mark.parametrize("source", OPTIONS)
@pytest.mark.parametrize("name", FILES)
def test_a_streamed_file_answers_to_the_bit(name: str, source: str, tmp_path: Path, load_on) -> None:
    _, path = low_bit_file(tmp_path / "model.gguf", FILES[name], SHAPES[0], seed=7)
    found = []
    for way, options in (("off", ()), ("on", OPTIONS[source])):
        engine = load_on(path, *options, dtype="bf16", streaming=way)
        assert engine.plan.is_streaming == (way == "on")
        answer = engine.generate(IDS[0].tolist(), max_new_tokens=16, ignore_eos=True)[0].token_ids
        found.append((engine.logits(IDS.tolist()), answer))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("way", MORE_OPTIONS)
@pytest.mark.parametrize("name", LEVELS)
def test_the_file_s_bytes_cross_the_link_and_the_device_makes_the_planes(
    name: str, way: str, tmp_path: Path, load_on
) -> None:
    """Two layers share one or two slots and one buffer, pass after pass; a step's weights are the resident ones."""
    family = "llama" if way == "sync" else "qwen2"
    _, path = low_bit_file(tmp_path / "model.gguf", [name], SHAPES[1], 5, family)
    resident = load_on(path, dtype="bf16")
    expected = resident.logits(IDS.tolist())
    answer = resident.generate(IDS[0].tolist(), max_new_tokens=16, ignore_eos=True)[0].token_ids
    engine = load_on(path, *MORE_OPTIONS[way], dtype="bf16", streaming="on")
    groups = engine.plan.groups
    assert groups.arrival_nbytes == max(groups.on_link)
    assert all(on_link < slot for on_link, slot in zip(groups.on_link, groups.group_nbytes[1:], strict=False))
    copied = sum(source.nbytes for source, _ in engine.loaded.weight_stream.copies)
    assert copied == pytest.approx(groups.streamed_nbytes, rel=0.01)  # slices of the head are padded
    for _ in range(2):
        assert torch.equal(engine.logits(IDS.tolist()), expected)
        assert engine.generate(IDS[0].tolist(), max_new_tokens=16, ignore_eos=True)[0].token_ids == answer
    torch.cuda.synchronize()
    work = engine.loaded.weight_stream.policy.ring.work.values()  # type: ignore[attr-defined]  # streams
    expansions = [one.expansion for one in work if one.expansion is not None]
    assert len(expansions) == 2
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for expansion in expansions:
        expansion.run()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before, "memory is allocated on the copy stream"
