"""Which files of a repository make up a model, told from names as published repositories have them."""

import pytest

from graphcore.checkpoint.sources.repository_files import choose_files
from graphcore.checkpoint.sources.source import parse_source
from graphcore.errors import CheckpointError, CheckpointNotFoundError

QUANTS = [f"Llama-3.2-1B-Instruct-{quant}.gguf" for quant in ("IQ4_XS", "Q4_K_M", "Q4_K_S", "Q4_0", "Q8_0", "f16")]
SPLIT = [f"BF16/Big-BF16-0000{index}-of-00002.gguf" for index in (1, 2)]
UNSLOTH = [
    "UD-Q4_K_XL/Big-UD-Q4_K_XL-00001-of-00001.gguf",
    *SPLIT,
    "mmproj-F16.gguf",
    "imatrix_unsloth.gguf",
    "config.json",
]


def weights(text: str, names: list[str]) -> list[str]:
    return list(choose_files(parse_source(text), names).weights)


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        ("Q4_K_M", "Llama-3.2-1B-Instruct-Q4_K_M.gguf"),
        ("q4_k_m", "Llama-3.2-1B-Instruct-Q4_K_M.gguf"),
        ("Q4_0", "Llama-3.2-1B-Instruct-Q4_0.gguf"),
        ("F16", "Llama-3.2-1B-Instruct-f16.gguf"),
        ("Llama-3.2-1B-Instruct-IQ4_XS.gguf", "Llama-3.2-1B-Instruct-IQ4_XS.gguf"),  # ollama takes a file's name, too
    ],
)
def test_a_tag_is_a_quant_or_a_file_s_name_whatever_its_case(tag: str, expected: str) -> None:
    assert weights(f"hf:org/name:{tag}", ["README.md", *QUANTS]) == [expected]


@pytest.mark.parametrize("tag", ["Q4", "Q4_K", "4_XS", "Q2_K"])
def test_a_part_of_a_quant_is_none(tag: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match=f"no GGUF model of '{tag}'; it has Llama-3.2-1B-Instruct-IQ4_XS"):
        weights(f"hf:org/name:{tag}", QUANTS)


def test_a_split_model_of_a_tag_has_all_its_parts() -> None:
    chosen = choose_files(parse_source("hf:org/name:BF16"), UNSLOTH)
    assert list(chosen.weights) == SPLIT
    assert chosen.opened == SPLIT[0]
    assert weights("hf:org/name/BF16", UNSLOTH) == SPLIT
    assert weights("hf:org/name:UD-Q4_K_XL", UNSLOTH) == UNSLOTH[:1]


def test_a_file_s_name_counts_before_its_folder_s() -> None:
    assert weights("hf:org/name:Q8_0", ["Q8_0/m-Q4_K_M.gguf", "m-Q8_0.gguf"]) == ["m-Q8_0.gguf"]
    assert weights("hf:org/name:Q8_0", ["Q8_0/m.gguf", "m-Q4_K_M.gguf"]) == ["Q8_0/m.gguf"]


def test_hidden_files_are_no_models() -> None:
    assert weights("hf:org/name", ["._model.Q4_0.gguf", "model.Q4_0.gguf", "a/._b.gguf"]) == ["model.Q4_0.gguf"]
    hidden = ["._model.safetensors", "._config.json", "config.json", "m.safetensors"]
    assert weights("hf:org/name", hidden) == ["m.safetensors"]


def test_the_only_gguf_model_needs_no_tag() -> None:
    names = ["model.Q4_0.gguf", "mmproj-model-f16.gguf", "model.mmproj.gguf", "model.imatrix.gguf", "config.json"]
    assert weights("hf:org/name", names) == ["model.Q4_0.gguf"]
    assert weights("hf:org/name:latest", names) == ["model.Q4_0.gguf"]


@pytest.mark.parametrize(
    ("text", "count"), [("hf:org/name", "6 GGUF models "), ("hf:org/name:latest", "6 GGUF models ")]
)
def test_several_gguf_models_are_listed(text: str, count: str) -> None:
    with pytest.raises(
        CheckpointError, match=f"holds {count}.*Q4_K_S.gguf, .*; name one, as in hf:org/name/"
    ) as caught:
        weights(text, QUANTS)
    assert "\n" not in str(caught.value)


def test_two_models_of_one_quant_are_listed() -> None:
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF models of Q8_0 \(a-Q8_0.gguf, b-Q8_0.gguf\)"):
        weights("hf:org/name:Q8_0", ["a-Q8_0.gguf", "b-Q8_0.gguf"])


def test_safetensors_are_preferred_and_a_tag_asks_for_gguf() -> None:
    names = ["config.json", "model.safetensors", "model-Q8_0.gguf"]
    assert weights("hf:org/name", names) == ["model.safetensors"]
    assert weights("hf:org/name:q8_0", names) == ["model-Q8_0.gguf"]


def test_variants_second_copies_and_adapters_are_not_fetched() -> None:
    names = ["config.json", "model.safetensors", "model.fp16.safetensors", "consolidated.safetensors"]
    assert weights("hf:org/name", [*names, "adapter_model.safetensors"]) == ["model.safetensors"]


def test_shards_are_those_that_their_names_count() -> None:
    names = ["config.json", "model.safetensors.index.json", "model-00002-of-00003.safetensors", "other.safetensors"]
    assert weights("hf:org/name", names) == [f"model-0000{index}-of-00003.safetensors" for index in (1, 2, 3)]
    odd = ["config.json", "model.safetensors.index.json", "a.safetensors", "b.safetensors"]
    assert weights("hf:org/name", odd) == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["adapter_config.json", "adapter_model.safetensors"], "is an adapter .*; download it, .* model.adapter="),
        (["config.json", "pytorch_model.bin"], r"holds only pickled weights \(pytorch_model.bin\)"),
        (["README.md"], "has no config.json and no GGUF file"),
        (["config.json"], "has no safetensors and no GGUF file"),
        (["mmproj-a.gguf"], "has no config.json and no GGUF file"),
        (["config.json", "a.safetensors", "b.safetensors"], "holds 2 safetensors files"),
    ],
)
def test_a_repository_without_a_model_is_told_by_what_it_holds(names: list[str], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        weights("hf:org/name", names)


def test_a_count_of_shards_from_a_name_is_bounded() -> None:
    with pytest.raises(CheckpointNotFoundError, match="has no file"):
        weights("hf:org/name/a-1-of-99999999999.gguf", ["a.gguf"])
