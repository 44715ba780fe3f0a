"""Golden lists of kernels: their key, their file, and how a drift reads."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.kernel_lists import (
    DECODE,
    GOLDEN,
    MOST_LINES,
    compare_or_store,
    defined_kernels,
    drift,
    key_of,
    plain,
    stale,
    store_decode_kernels,
    store_list,
    stored_lists,
)
from support.tiny_models import ARCHITECTURES

LLAMA = json.loads(DECODE.read_text(encoding="utf-8"))["llama3"]


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


def test_lists_that_several_workers_write_at_once_are_all_kept(tmp_path: Path) -> None:
    names = [f"llama3, batch {batch}" for batch in range(40)]
    with ThreadPoolExecutor(8) as pool:  # each opens the folder anew, as a process of its own would
        list(pool.map(lambda name: store_list("gpu", name, [name] * 200, tmp_path), names))
    assert stored_lists("gpu", tmp_path) == {name: [name] * 200 for name in names}


def test_a_list_that_nobody_has_recorded_fails_and_is_skipped_only_where_it_is_written(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"no golden list of llama3 for gpu \(2 kernels\): `pytest -m cuda"):
        compare_or_store(["a", "b"], "gpu", "llama3", None, tmp_path / "golden")
    with pytest.raises(pytest.skip.Exception, match="written to"):
        compare_or_store(["a", "b"], "gpu", "llama3", tmp_path / "new", tmp_path / "golden")
    assert stored_lists("gpu", tmp_path / "new") == {"llama3": ["a", "b"]}


def test_a_list_is_compared_with_the_golden_one_even_where_new_ones_are_written(tmp_path: Path) -> None:
    store_list("gpu", "llama3", ["a", "b"], tmp_path)
    compare_or_store(["a", "b"], "gpu", "llama3", None, tmp_path)
    with pytest.raises(AssertionError, match="0 -> 1 times  copy"):
        compare_or_store(["a", "copy", "b"], "gpu", "llama3", tmp_path / "new", tmp_path)


def test_every_golden_list_is_of_todays_kernels() -> None:
    """CI has no GPU: what can be checked without one is that each kernel exists and that a layer launches its own."""
    defined, decode = defined_kernels(), json.loads(DECODE.read_text(encoding="utf-8"))
    lists = [(path.stem, *one) for path in GOLDEN.glob("*.json") for one in stored_lists(path.stem).items()]
    faults = {
        f"{key}, {name}": stale(found, defined, decode.get("" if "compiled" in name else name.partition(",")[0]))
        for key, name, found in lists
    }
    assert not {name: fault for name, fault in faults.items() if fault}
    assert not {name.partition(",")[0] for _, name, _ in lists} - set(ARCHITECTURES)


def test_decode_kernels_are_of_todays_kernels_and_architectures() -> None:
    bare = {one.lstrip("_") for one in defined_kernels()}
    decode = json.loads(DECODE.read_text(encoding="utf-8"))
    named = {one for lists in decode.values() for names in lists.values() for one in names}
    assert {one for one in named if " " not in one} <= bare
    assert set(decode) <= set(ARCHITECTURES)


def step(layers: int, *more: str) -> list[str]:
    """Return what a step of a Llama launches, by decode_kernels.json."""
    own = [*LLAMA["first"], *LLAMA["layer"] * layers, *LLAMA["head"]]
    return [*(name if name.startswith(("aten", "attend")) else f"_{name}" for name in own), *more]


def test_a_list_of_todays_kernels_is_not_stale() -> None:
    for layers in (0, 1, 5):
        assert stale(step(layers, "_scan", "_finish"), defined_kernels(), LLAMA) == ""


def test_a_list_that_names_a_kernel_that_is_gone_is_stale() -> None:
    """The lists that an H100 wrote in its time had a kernel that attention has taken in since."""
    assert stale(step(1, "_rotate_and_write"), defined_kernels(), LLAMA).startswith("names _rotate_and_write, which no")


def test_a_list_with_a_launch_more_or_less_in_a_layer_is_stale() -> None:
    assert "lacks dense_gated" in stale([one for one in step(2) if "gated" not in one], defined_kernels(), LLAMA)
    assert "times after the first layer" in stale([*step(2), "_dense_product"], defined_kernels(), LLAMA)


def test_decode_kernels_are_written_as_the_file_has_them(tmp_path: Path) -> None:
    again = tmp_path / "decode_kernels.json"
    for name, found in json.loads(DECODE.read_text(encoding="utf-8")).items():
        store_decode_kernels(again, name, {"first": []})
        store_decode_kernels(again, name, found)
    assert again.read_text(encoding="utf-8") == DECODE.read_text(encoding="utf-8")


def test_a_drift_says_what_came_and_what_went() -> None:
    assert drift(["a", "b"], ["a", "b"]) == ""
    assert drift(["a", "copy", "c"], ["a", "b", "c"]).splitlines() == [
        "3 kernels are now 3:",
        "    1 -> 0 times  b",
        "    0 -> 1 times  copy",
        "- 1: b",
        "+ 1: copy",
    ]


def test_a_drift_of_a_long_list_that_repeats_itself_names_the_change_alone() -> None:
    """Thirty layers of eight kernels, a copy in the seventh and a norm less in the twentieth."""
    layer = ["norm", "qkv", "rotate", "attend", "o", "norm", "gated", "down"]
    golden = layer * 30
    now = [*layer * 6, *layer[:3], "copy", *layer[3:], *layer * 12, *layer[:5], *layer[6:], *layer * 10]
    assert drift(now, golden).splitlines() == [
        "240 kernels are now 240:",
        "    60 -> 59 times  norm",
        "    0 -> 1 times  copy",
        "+ 51: copy",
        "- 157: norm",
    ]


def test_a_drift_that_goes_through_every_layer_is_cut_short() -> None:
    lines = drift(["a", "b", "copy"] * 100, ["a", "b"] * 100).splitlines()
    assert len(lines) == MOST_LINES + 2
    assert lines[-1] == "... 41 more lines"
