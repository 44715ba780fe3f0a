"""llama.cpp and graphcore read the same vocabulary from a GGUF file, and give the same ids.

The files hold cut-down vocabularies (tests/golden/tokenizer) and no tensors. Strings that llama.cpp encodes otherwise
than the model's own tokenizer are left out, by a rule that is stated here.
"""

import ctypes
import unicodedata
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from support.golden_vocab import golden_vocab

from graphcore.tokenizer.gguf_vocab import TokenType
from graphcore.tokenizer.tokenizer import Tokenizer

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (pip install -e '.[peers]')")

STRINGS = (
    "  two  spaces,   three and a tail  ",
    "tabs\t\tand\nlines\n\n\nand \n mixed\r\nends",
    "emoji \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f9ff",
    "bytes \x07 \ue000 \U00012000",
    "\u00e9clair \u4f60\u597d\u3002 \u0939\u093f\u0928\u094d\u0926\u0940 \u0645\u0631\u062d\u0628\u0627",
    "1234567890 3.14 I'm WE'LL they'd",
    "<|im_start|>user\nHi<|im_end|>",
    "<|turn>user\nHi  there<turn|>\n<|turn>model\n<|channel>thought\n<channel|>",
    "a<eos>b<bos> <|tool_call>call:f{x:<|\"|>y<|\"|>}<tool_call|>",
    "< |turn> <turn |> <|turn <turn>",
)  # fmt: skip


def always(text: str) -> bool:
    """Return True: every string is compared."""
    return True


def is_unaltered(text: str) -> bool:
    """Return whether llama.cpp may agree on Qwen: it does not compose to NFC, and takes `</s>` for a control token."""
    return unicodedata.normalize("NFC", text) == text and "</s>" not in text


def write_vocab(path: Path, metadata: dict[str, object], architecture: str) -> None:
    """Write a GGUF file that holds only a vocabulary."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case tuple():
                writer.add_array(key, list(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("name", "pre", "architecture", "is_compared"),
    [
        ("gemma4", None, "gemma4", always),
        ("qwen2", "qwen2", "qwen3moe", is_unaltered),
        ("qwen2", "qwen35", "qwen35", is_unaltered),
    ],
)
def test_ids_of_a_vocabulary_are_llama_cpps(
    name: str, pre: str | None, architecture: str, is_compared: Callable[[str], bool], tmp_path: Path
) -> None:
    golden, path = golden_vocab(name), tmp_path / "vocab.gguf"
    metadata = golden.metadata | ({} if pre is None else {"tokenizer.ggml.pre": pre})
    write_vocab(path, metadata, architecture)
    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    theirs = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    ours = Tokenizer.from_gguf(metadata, name)
    compared = [text for text in (*STRINGS, *(text for text, _ in golden.cases)) if is_compared(text)]
    assert len(compared) > 250
    differing = {
        text: (found, wanted)
        for text in compared
        if (found := ours.encode(text)) != (wanted := theirs.tokenize(text.encode(), add_bos=True, special=True))
    }
    assert differing == {}
    ends = {
        token_id for token_id in range(ours.vocab_size) if llama_cpp.llama_token_is_eog(theirs._model.vocab, token_id)
    }
    marked = {at for at, kind in enumerate(metadata["tokenizer.ggml.token_type"]) if kind != TokenType.NORMAL}
    assert ends & marked == set(ours.eos_token_ids)
    theirs.close()
