"""A GPT-2 GGUF file that is not what it must be is refused before any of its tensors is read."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from support.files.gpt_files import CONSUMERS, DIM, HIDDEN, LAYERS, POSITIONS, VOCAB, GPTFile, Stored, small_file

from graphcore import Engine
from graphcore.checkpoint.gguf_checkpoint import GGUFCheckpoint
from graphcore.errors import CheckpointError, UnsupportedError
from graphcore.weights import conversion

NAMES = tuple(small_file().tensors)
REQUIRED = tuple(name for name in NAMES if name != "output.weight")
OBLONG = tuple(
    name for name, stored in small_file().tensors.items() if len({*stored.content.shape}) == 2
)  # a square matrix has the same shape either way


@pytest.fixture(autouse=True)
def _no_tensor_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test in which a byte of a tensor is read."""
    monkeypatch.setattr(GGUFCheckpoint, "read", lambda self, name: pytest.fail(f"{name} was read"))
    monkeypatch.setattr(conversion, "read_span", lambda span, identity, name: pytest.fail(f"{name} was read"))


def refusal(file: GPTFile, folder: Path) -> str:
    """Return the message with which the file is refused: one line that begins with the file's name."""
    path = file.write(folder / "model.gguf")
    with pytest.raises(CheckpointError) as caught:
        Engine.load(path, dtype="fp32", device="cpu", graph="eager")
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    file = small_file()
    del file.tensors[name]
    message = refusal(file, tmp_path)
    assert message.startswith(f"Missing required tensor: {name}; ")
    assert "fetch it again or convert it anew" in message


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    file = small_file()
    file.tensors = {name: stored for name, stored in file.tensors.items() if not name.startswith("blk.1.")}
    message = refusal(file, tmp_path)
    assert message.startswith("Missing required tensor: blk.1.attn_norm.weight, blk.1.attn_norm.bias, ")
    assert "and 8 more;" in message


def test_a_layer_beyond_those_that_are_asked_for_must_be_whole_too(tmp_path: Path) -> None:
    file = small_file()
    del file.tensors["blk.1.ffn_up.bias"]
    path = file.write(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"Missing required tensor: blk\.1\.ffn_up\.bias;"):
        Engine.load(path, device="cpu", graph="eager", overrides=["model.num_hidden_layers=1"])


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_of_another_shape_is_told_as_the_file_has_it(tmp_path: Path, name: str) -> None:
    """Shapes are those of the file, inputs first, as gguf-py's reader shows them."""
    file = small_file()
    rows, *inputs = file.tensors[name].content.shape
    file.tensors[name] = Stored(np.zeros((rows + 1, *inputs), np.float32))
    if name == "token_embd.weight":
        file.keys["vocab_size"] = VOCAB
    message = refusal(file, tmp_path)
    assert message.startswith(
        f"Shape mismatch for {name}: expected {[*inputs, rows]}, got {[*inputs, rows + 1]} (inputs first); "
    )
    assert "convert the model anew" in message


@pytest.mark.parametrize("name", OBLONG)
def test_a_transposed_matrix_is_refused(tmp_path: Path, name: str) -> None:
    file = small_file()
    file.keys["vocab_size"] = VOCAB
    rows, inputs = file.tensors[name].content.shape
    file.tensors[name] = Stored(np.zeros((inputs, rows), np.float32))
    assert refusal(file, tmp_path).startswith(
        f"Shape mismatch for {name}: expected [{inputs}, {rows}], got [{rows}, {inputs}] "
    )


@pytest.mark.parametrize("name", ["position_embd.weight", "blk.1.ffn_down.weight", "output_norm.weight"])
def test_a_tensor_with_more_dimensions_is_refused(tmp_path: Path, name: str) -> None:
    file = small_file()
    file.tensors[name].content = file.tensors[name].content[None].repeat(2, axis=0)
    assert refusal(file, tmp_path).startswith(f"Shape mismatch for {name}: expected ")


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.MXFP4], ids=lambda kind: kind.name)
def test_shapes_of_packed_tensors_are_counted_in_elements(tmp_path: Path, kind: Type) -> None:
    file = small_file(dict.fromkeys(CONSUMERS, kind))
    stored = file.tensors["blk.0.ffn_up.weight"]
    stored.content = stored.content[: HIDDEN // 2]
    assert refusal(file, tmp_path).startswith(
        f"Shape mismatch for blk.0.ffn_up.weight: expected [{DIM}, {HIDDEN}], got [{DIM}, {HIDDEN // 2}] "
    )


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("context_length", POSITIONS + 1, "position_embd.weight"),
        ("embedding_length", 2 * DIM, "token_embd.weight"),
        ("feed_forward_length", 2 * HIDDEN, "blk.0.ffn_up.weight"),
        ("vocab_size", VOCAB + 1, "token_embd.weight"),
    ],
)
def test_metadata_of_another_size_is_a_shape_mismatch(tmp_path: Path, key: str, value: int, name: str) -> None:
    file = small_file()
    file.keys[key] = value
    assert refusal(file, tmp_path).startswith(f"Shape mismatch for {name}: expected ")


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.attn_q.weight",  # other families split the fused projection
        "blk.0.ffn_gate.weight",
        "blk.0.attn_qkv",
        "blk.0.attn_qkv.scale",
        "blk.2.attn_norm.weight",  # the file says two layers
        "blk.-1.attn_norm.weight",
        "blk.00.attn_norm.weight",
        "blk.attn_norm.weight",
        "blk.0.attn_sinks.weight",
        "blk.0.attn_qkv.weight.lora_a",
        "token_embd.bias",
        "position_embd.bias",
        "output.bias",
        "rope_freqs.weight",
        "wte.weight",
        "something",
    ],
)
def test_a_name_that_is_not_gpt2s_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    file = small_file()
    file.tensors[name] = Stored(np.zeros(DIM, np.float32))
    if name == "rope_freqs.weight":  # the config reader looks into it, in any file
        monkeypatch.undo()
    message = refusal(file, tmp_path)
    assert message.startswith(f"Invalid GPT tensor name: {name}; a GPT-2 file of {LAYERS} layers has token_embd, ")
    assert "blk.N.(attn_norm, attn_qkv, attn_output, ffn_norm, ffn_up, ffn_down)" in message


@pytest.mark.parametrize("rows", [DIM, 3 * DIM])
def test_a_matrix_of_queries_alone_is_refused_by_its_name_and_not_by_its_rows(tmp_path: Path, rows: int) -> None:
    file = small_file()
    file.tensors["blk.0.attn_q.weight"] = Stored(np.zeros((rows, DIM), np.float32))
    assert refusal(file, tmp_path).startswith("Invalid GPT tensor name: blk.0.attn_q.weight; a GPT-2 file of ")


def test_a_misspelt_name_is_told_rather_than_the_tensor_it_should_be(tmp_path: Path) -> None:
    file = small_file()
    file.tensors["blk.0.attn_qvk.weight"] = file.tensors.pop("blk.0.attn_qkv.weight")
    assert refusal(file, tmp_path).startswith("Invalid GPT tensor name: blk.0.attn_qvk.weight; ")


def test_a_name_that_cannot_be_printed_is_told_on_one_line(tmp_path: Path) -> None:
    file = small_file()
    file.tensors["a\nb\x1b[31m"] = Stored(np.zeros(DIM, np.float32))
    assert refusal(file, tmp_path).startswith("Invalid GPT tensor name: a\\nb\\x1b[31m; ")


def test_a_file_without_an_output_tensor_is_tied_and_not_refused(tmp_path: Path) -> None:
    """Converters leave it out, because GPT-2 ties it to the embedding."""
    path = small_file(is_tied=True).write(tmp_path / "model.gguf")
    with pytest.raises(pytest.fail.Exception, match=r"embed_tokens\.weight was read"):
        Engine.load(path, dtype="fp32", device="cpu", graph="eager")


@pytest.mark.parametrize("architecture", ["gpt2", "gpt"])
@pytest.mark.parametrize(
    "key", ["context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"]
)
def test_a_missing_or_zero_size_is_named_with_its_prefix(tmp_path: Path, key: str, architecture: str) -> None:
    file = small_file()
    file.architecture = architecture
    file.keys[key] = 0
    assert f"{architecture}.{key}" in refusal(file, tmp_path)
    del file.keys[key]
    assert refusal(file, tmp_path).startswith(f"lacks {architecture}.{key};")


def test_heads_that_do_not_divide_the_width_are_refused(tmp_path: Path) -> None:
    file = small_file()
    file.keys["attention.head_count"] = 7
    assert refusal(file, tmp_path).startswith(f"hidden_size {DIM} is not a multiple of num_attention_heads 7")


@pytest.mark.parametrize("architecture", ["gpt3", "gptneox", "GPT2", "gpt2 ", "xgpt"])
def test_another_architecture_is_refused_by_name(tmp_path: Path, architecture: str) -> None:
    file = small_file()
    file.architecture = architecture
    path = file.write(tmp_path / "model.gguf")
    with pytest.raises(UnsupportedError, match=f"architecture '{architecture}' is not supported"):
        Engine.load(path, device="cpu", graph="eager")


def test_the_gpt_keys_of_a_gpt2_file_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    file = small_file()
    writer = gguf.GGUFWriter(path, "gpt2")
    for key, value in file.keys.items():
        writer.add_uint32(f"gpt.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"lacks gpt2\.block_count"):
        Engine.load(path, device="cpu", graph="eager")
