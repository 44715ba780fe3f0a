"""GGUF files of the GPT-2 family run, whichever of the seven consumers of weights reads a packed tensor.

Reference: transformers' GPT-2 in float64, over the weights that gguf-py unpacks.
"""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from support.files.gpt_files import CONSUMERS, VOCAB, GPTFile, small_file

from graphcore import Engine
from graphcore.engine.scoring import token_losses

pytestmark = pytest.mark.thorough

IDS = torch.randint(0, VOCAB, (1, 25), generator=torch.Generator().manual_seed(2))
TOLERANCE = 2e-5  # float32 against float64, logits of order one
PACKED = (Type.Q4_K, Type.MXFP4)


def load(path: Path) -> Engine:
    """Return an engine whose prefill runs chunks of 8, so that 25 tokens end with one that decode's kernels run."""
    return Engine.load(path, dtype="fp32", device="cpu", graph="eager", overrides=["prefill_chunk=8"])


@torch.no_grad()
def check_runs(file: GPTFile, path: Path) -> None:
    """Compare prefill and decode with transformers."""
    expected = file.reference()(input_ids=IDS, use_cache=False).logits
    assert expected.std() > 0.3
    with load(file.write(path)) as engine:
        assert (engine.logits(IDS) - expected).abs().max() < TOLERANCE
        losses = torch.nn.functional.cross_entropy(expected[0, :-1], IDS[0, 1:], reduction="none")
        assert (token_losses(engine.runner, IDS[0].tolist(), 1, "decode") - losses).abs().max() < TOLERANCE


@pytest.mark.parametrize("kind", PACKED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("consumer", CONSUMERS)
def test_each_consumer_reads_a_packed_tensor(tmp_path: Path, consumer: str, kind: Type) -> None:
    check_runs(small_file({consumer: kind}), tmp_path / "model.gguf")


@pytest.mark.parametrize("is_tied", [False, True], ids=["own_head", "tied"])
@pytest.mark.parametrize("kind", PACKED, ids=lambda kind: kind.name)
def test_all_consumers_read_packed_tensors_at_once(tmp_path: Path, kind: Type, is_tied: bool) -> None:
    check_runs(small_file(dict.fromkeys(CONSUMERS, kind), is_tied), tmp_path / "model.gguf")


def test_types_may_differ_within_a_block(tmp_path: Path) -> None:
    """What people call Q4_K_M is such a mixture; there is no tensor type of that name."""
    mixed = {name: PACKED[index % 2] for index, name in enumerate(CONSUMERS)}
    check_runs(small_file(mixed), tmp_path / "model.gguf")
    assert not any("Q4_K_M" in kind.name for kind in Type)


@pytest.mark.parametrize("is_tied", [False, True], ids=["own_head", "tied"])
@pytest.mark.parametrize("architecture", ["gpt2", "gpt"])
def test_the_alias_gpt_reads_its_own_keys(tmp_path: Path, architecture: str, is_tied: bool) -> None:
    file = small_file(is_tied=is_tied)
    file.architecture = architecture
    check_runs(file, tmp_path / "model.gguf")


def test_half_precision_norms_and_biases_are_read_too(tmp_path: Path) -> None:
    file = small_file()
    for stored in file.tensors.values():
        if stored.content.ndim == 1:
            stored.content = stored.content.astype(np.float16)
    check_runs(file, tmp_path / "model.gguf")


@pytest.mark.parametrize("alignment", [32, 64, 256])
def test_alignment_is_the_files_own_and_256_only_ours(tmp_path: Path, alignment: int) -> None:
    """GGUF's default is 32; in memory every weight begins at a multiple of 256, whatever the file does."""
    file, path = small_file(dict.fromkeys(CONSUMERS, Type.MXFP4)), tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_custom_alignment(alignment)
    writer.add_layer_norm_eps(1e-5)
    for key, value in file.keys.items():
        writer.add_uint32(f"gpt2.{key}", value)
    for name, stored in file.tensors.items():
        writer.add_tensor(name, stored.content, raw_dtype=stored.packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    offsets = [tensor.data_offset for tensor in gguf.GGUFReader(path).tensors]
    assert all(offset % alignment == 0 for offset in offsets)
    assert any(offset % 256 for offset in offsets) == (alignment < 256)
    expected = file.reference()(input_ids=IDS, use_cache=False).logits
    with load(path) as engine:
        assert (engine.logits(IDS) - expected).abs().max() < TOLERANCE
        buffers = dict(engine.runner.builder.decoder.named_buffers())
        assert [name for name, buffer in buffers.items() if buffer.data_ptr() % 256] == []
