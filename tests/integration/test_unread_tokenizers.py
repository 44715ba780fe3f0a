"""A model whose tokenizer is of a kind that is not read runs on token ids; a text is refused with the reason."""

from pathlib import Path

import gguf
import pytest
from support.tiny_models import save_tiny

from graphcore import Engine
from graphcore.errors import TokenizerError

TINY = Path(__file__).parents[1] / "golden" / "tiny" / "llama3.gguf"
VOCAB = 96


def with_vocab(path: Path, values: dict[str, str | list[str] | list[int]]) -> str:
    """Write a tiny model's file again with a vocabulary."""
    reader = gguf.GGUFReader(TINY)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture", "tokenizer.")):
            element = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], element)
    for name, value in values.items():
        (writer.add_string if isinstance(value, str) else writer.add_array)(f"tokenizer.ggml.{name}", value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def check_runs_on_ids(source: str, reason: str) -> None:
    with Engine.load(source, graph="eager") as engine:
        assert [note for note in engine.notes if reason in note]
        assert not engine.has_tokenizer
        assert len(engine.generate([1, 2, 3], max_new_tokens=2)[0].token_ids) == 2
        for prompt in ("text", [{"role": "user", "content": "text"}]):
            with pytest.raises(TokenizerError, match=reason) as caught:
                engine.generate(prompt, max_new_tokens=2)
            assert "prompt_ids" in str(caught.value)


def test_a_file_with_a_unigram_vocabulary_runs_on_ids(tmp_path: Path) -> None:
    tokens = [f"t{token_id}" for token_id in range(VOCAB)]
    source = with_vocab(tmp_path / "m.gguf", {"model": "t5", "tokens": tokens})
    check_runs_on_ids(source, "tokenizer.ggml.model 't5' is not supported")


def test_a_folder_whose_tokenizer_cannot_be_converted_runs_on_ids(tmp_path: Path) -> None:
    save_tiny("llama3", tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    check_runs_on_ids(str(tmp_path), "transformers cannot make one")


def test_notes_on_a_vocabulary_reach_the_user(tmp_path: Path) -> None:
    tokens = [chr(33 + token_id) for token_id in range(VOCAB - 2)] + ["!", "<|im_end|>"]
    source = with_vocab(tmp_path / "m.gguf", {"model": "gpt2", "tokens": tokens, "merges": ["a b"]})
    with Engine.load(source, graph="eager") as engine:
        notes = "\n".join(engine.notes)
        for part in ("stand there twice ('!')", "token_type is missing", "pre is missing", "pieces that are no tokens"):
            assert part in notes
        assert len(engine.generate("ab", max_new_tokens=2)[0].token_ids) == 2
