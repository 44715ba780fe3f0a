"""Golden lists of kernels: their key, their file, and how a drift reads."""

from pathlib import Path

from kernel_lists import drift, key_of, plain, store_list, stored_lists


def test_a_key_names_the_gpu_and_the_release_of_torch() -> None:
    assert key_of("NVIDIA H200", "2.11.0+cu130") == "nvidia-h200-torch-2.11"


def test_names_lose_what_changes_from_build_to_build() -> None:
    assert plain("void at::native::fill<float, 4>(int, float*)") == "at::native::fill"
    assert plain("_residual_norm") == "_residual_norm"
    assert plain("Memcpy DtoD (Device -> Device)") == "Memcpy DtoD"


def test_lists_are_kept_by_what_ran(tmp_path: Path) -> None:
    assert stored_lists("gpu-torch-2.11", tmp_path) == {}
    store_list("gpu-torch-2.11", "llama3, batch 1", ["a", "b"], tmp_path)
    store_list("gpu-torch-2.11", "qwen3, batch 1", ["c"], tmp_path)
    assert stored_lists("gpu-torch-2.11", tmp_path) == {"llama3, batch 1": ["a", "b"], "qwen3, batch 1": ["c"]}


def test_a_drift_says_what_came_and_what_went() -> None:
    assert drift(["a", "b"], ["a", "b"]) == ""
    text = drift(["a", "copy", "c"], ["a", "b", "c"])
    assert text.splitlines()[0] == "3 kernels are now 3:"
    assert "-b" in text.splitlines()
    assert "+copy" in text.splitlines()
