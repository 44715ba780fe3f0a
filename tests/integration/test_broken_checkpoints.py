"""Any damage to any checkpoint file either goes unnoticed or is one GraphcoreError: no other exception, no memory.

Small valid files are mutated at random (bytes, lengths, cuts, insertions, splices), then opened and read whole.
"""

import json
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from graphcore.checkpoint.open_checkpoint import open_checkpoint
from graphcore.errors import GraphcoreError

GOLDEN = Path(__file__).parents[1] / "golden"
MOST_MEMORY = 8 << 20  # bytes, for files of about 1 kB
DAMAGED = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
EDGES = [0, 1, 2**16, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1]


def small_safetensors() -> bytes:
    tensors = {
        "model.embed_tokens.weight": torch.arange(24.0).reshape(6, 4).bfloat16(),
        "model.norm.weight": torch.ones(4),
        "blocks": torch.arange(32, dtype=torch.uint8).reshape(2, 16),
        "mask": torch.tensor([True, False]),
        "f8": torch.ones(3).to(torch.float8_e4m3fn),
    }
    return save(tensors, metadata={"format": "pt"})


def place(draw: st.DrawFn, content: bytes) -> int:
    # Half of all damage hits the first 64 bytes, where the lengths are.
    near = st.integers(0, min(64, len(content)))
    return draw(st.one_of(near, st.integers(0, len(content))))


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """`content` after one to four random mutations."""
    for _ in range(draw(st.integers(1, 4))):
        at = place(draw, content)
        match draw(st.sampled_from(["flip", "edge", "insert", "delete", "cut", "splice"])):
            case "flip":
                flipped = bytes(byte ^ draw(st.integers(1, 255)) for byte in content[at : at + 1])
                content = content[:at] + flipped + content[at + 1 :]
            case "edge":
                content = content[:at] + draw(st.sampled_from(EDGES)).to_bytes(8, "little") + content[at + 8 :]
            case "insert":
                content = content[:at] + draw(st.binary(min_size=1, max_size=16)) + content[at:]
            case "delete":
                content = content[:at] + content[at + draw(st.integers(1, 32)) :]
            case "cut":
                content = content[:at]
            case "splice":
                start = place(draw, content)
                content = content[:at] + content[start : start + draw(st.integers(1, 64))] + content[at:]
    return content


def read_all(path: Path) -> str:
    """Read every tensor of `path`; return the message with which it is refused, or an empty one."""
    try:
        checkpoint = open_checkpoint(path)
        for name, info in checkpoint.tensors.items():
            # torch's memory is not traced; it is what the header says, which must not be more than the file.
            assert info.file is not None
            assert info.offset + info.nbytes <= info.file.stat().st_size
            tensor = checkpoint.read(name)
            assert tensor.numel() * tensor.element_size() == info.nbytes
    except GraphcoreError as error:
        return str(error)
    return ""


def open_and_read(path: Path) -> bool:
    """Whether `path` opens and reads; anything but a GraphcoreError on one line, or memory, fails the test."""
    tracemalloc.start()
    try:
        message = read_all(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST_MEMORY, f"{peak} bytes for {path}"
    assert "\n" not in message
    assert message.isprintable()
    return not message


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("broken")


MINI_GGUF = (GOLDEN / "mini_v3.gguf").read_bytes()
SAFETENSORS = small_safetensors()


@DAMAGED
@given(content=damaged(MINI_GGUF))
@example(content=MINI_GGUF[:8] + (2**60).to_bytes(8, "little") + MINI_GGUF[16:])
@example(content=MINI_GGUF[:16] + (2**60).to_bytes(8, "little") + MINI_GGUF[24:])
def test_damaged_gguf_files_are_read_or_refused(folder, content):
    (folder / "m.gguf").write_bytes(content)
    open_and_read(folder / "m.gguf")


@DAMAGED
@given(content=damaged(SAFETENSORS))
@example(content=(2**60).to_bytes(8, "little") + SAFETENSORS[8:])
@example(content=SAFETENSORS.replace(b"[6,4]", b"[-6,"))
def test_damaged_safetensors_files_are_read_or_refused(folder, content):
    (folder / "m.safetensors").write_bytes(content)
    open_and_read(folder / "m.safetensors")


def shard_map() -> dict[str, str]:
    return {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}


INDEX = json.dumps({"metadata": {"total_size": 32}, "weight_map": shard_map()}).encode()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    for name, shard in shard_map().items():
        save_file({name: torch.arange(4.0)}, folder / shard)
    return folder


@DAMAGED
@given(content=damaged(INDEX))
@example(content=INDEX.replace(b"model-00001", b"../../etc/x"))
@example(content=INDEX.replace(b"model-00001", b"model\\u0000"))
def test_damaged_indices_are_read_or_refused(sharded, content):
    (sharded / "model.safetensors.index.json").write_bytes(content)
    open_and_read(sharded)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@DAMAGED
@given(entry=st.fixed_dictionaries({}, optional={"dtype": JSON, "shape": JSON, "data_offsets": JSON}) | JSON)
def test_safetensors_headers_of_any_json_are_read_or_refused(folder, entry):
    whole = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    raw = json.dumps({"w": whole | entry if isinstance(entry, dict) else entry}).encode()
    (folder / "j.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(16))
    open_and_read(folder / "j.safetensors")


@DAMAGED
@given(weight_map=JSON, extra=st.dictionaries(st.text(max_size=8), JSON, max_size=2))
def test_indices_of_any_json_are_read_or_refused(sharded, weight_map, extra):
    index = {"weight_map": weight_map | shard_map() if isinstance(weight_map, dict) else weight_map}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(extra | index))
    open_and_read(sharded)


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    folder = tmp_path_factory.mktemp("split")
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=1)
    for name in "ab":
        writer.add_tensor(name, np.arange(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    second = folder / "m-00002-of-00002.gguf"
    return folder, second, second.read_bytes()


@settings(DAMAGED, max_examples=75)
@given(choices=st.data())
def test_damaged_parts_of_split_models_are_read_or_refused(split, choices):
    folder, second, content = split
    second.write_bytes(choices.draw(damaged(content)))
    open_and_read(folder)


@pytest.mark.parametrize("suffix", ["gguf", "safetensors"])
def test_whole_files_are_read_and_cut_ones_refused_wherever_the_cut(tmp_path, suffix):
    content = MINI_GGUF.rstrip(b"\0") if suffix == "gguf" else SAFETENSORS
    whole = MINI_GGUF if suffix == "gguf" else SAFETENSORS
    path = tmp_path / f"model.{suffix}"
    path.write_bytes(whole)
    assert open_and_read(path)
    assert open_and_read(tmp_path)
    for index in range(20):
        path.write_bytes(content[: len(content) * index // 20])
        assert not open_and_read(path)
        assert not open_and_read(tmp_path)


@pytest.mark.parametrize("number", [1, 2])
def test_a_cut_part_or_shard_is_refused_wherever_the_cut(split, tmp_path, number):
    parts, _, second = split
    (parts / "m-00002-of-00002.gguf").write_bytes(second)
    for name, shard in shard_map().items():
        save_file({name: torch.arange(4.0)}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_bytes(INDEX)
    for path in (parts / f"m-0000{number}-of-00002.gguf", tmp_path / f"model-0000{number}-of-00002.safetensors"):
        assert open_and_read(path.parent)
        content = path.read_bytes()
        end = len(content) - (16 if path.suffix == ".gguf" else 0)  # the last 16 bytes are padding
        for index in range(20):
            path.write_bytes(content[: end * index // 20])
            assert not open_and_read(path.parent)
        path.write_bytes(content)
