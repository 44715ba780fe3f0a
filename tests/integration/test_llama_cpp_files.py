"""The table of what llama.cpp takes of the files that task=pack writes, by trial: what it loads, and its logits.

Each case is a family's small model with changed settings. `says` is what task=pack says of it before it writes; None
means that llama.cpp loads the file and gives transformers' logits.
"""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from support.tiny_models import LATENT_YARN, LLAMA3_ROPE, WINDOW, build_reference
from torch import nn

from graphcore.config.compose import compose_settings
from graphcore.engine.loading.open_model import open_model
from graphcore.errors import UnsupportedError
from graphcore.export.pack import Packer
from graphcore.progress import ignore_progress
from graphcore.tasks.reference.llama_cpp_model import run_llama_cpp

PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
BETAS = {**YARN, "beta_fast": 4.0}
SCALED = {"rope_parameters": LLAMA3_ROPE}
NO_FREQS = r"takes no rope_freqs\.weight"
BIASED = {"attention_bias": True}
WIDE_HEADS = {"head_dim": 24}
ONE_WIDTH = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
GEMMA3 = {  # settings that GGUF has keys for, or that llama.cpp assumes
    "num_hidden_layers": 6,
    "layer_types": 5 * ["sliding_attention"] + ["full_attention"],
    "query_pre_attn_scalar": 24,
}
GEMMA2 = {"num_hidden_layers": 4, "query_pre_attn_scalar": 24}
GPT_OSS = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "rope_parameters": PLAIN_ROPE}
EXAONE4 = {"head_dim": 16, "sliding_window": None, "layer_types": 5 * ["full_attention"]}
RANK = {"q_lora_rank": 40}
GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
FULL = {"sliding_window": None}
SMOLLM3 = {"no_rope_layer_interval": 4}


def of_full_layers(rope: dict[str, object]) -> dict[str, object]:
    return {"rope_parameters": {"full_attention": rope, "sliding_attention": PLAIN_ROPE}}


CASES: list[tuple[str, dict[str, object], str | None]] = [
    ("llama3", {}, None),
    ("llama3", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, None),
    ("llama3", {"rope_parameters": YARN}, None),
    ("llama3", {"rope_parameters": BETAS}, r"ignores llama\.rope\.scaling\.yarn_beta_fast \(4"),
    ("mistral", FULL, None),
    ("mixtral", SCALED, None),
    ("ministral3", {}, None),  # with a beta_fast of 4
    ("granite", {**BIASED, "mlp_bias": True, **SCALED}, None),
    ("granite_moe", {**BIASED, **SCALED}, None),
    ("qwen2", {}, None),
    ("qwen2", SCALED, f"{NO_FREQS}.* of qwen2"),
    ("qwen2", WIDE_HEADS, "takes heads of embedding_length / attention.head_count features .* not of 24"),
    ("qwen3", {"tie_word_embeddings": False, "rope_parameters": YARN}, None),
    ("qwen3", SCALED, NO_FREQS),
    ("qwen3", BIASED, r"takes no blk\.\d\.attn_q\.bias in files of qwen3, takes no .*attn_output"),
    ("qwen3_moe", {"rope_parameters": LINEAR}, None),
    ("qwen3_moe", SCALED, NO_FREQS),
    ("qwen3_moe", BIASED, r"takes no blk\.\d\.attn_q\.bias"),
    ("phi3", {}, None),
    ("starcoder2", FULL, None),
    ("starcoder2", {**FULL, "use_bias": False}, r"needs biases such as blk\.0\.attn_output\.bias"),
    ("starcoder2", {**FULL, **SCALED}, NO_FREQS),
    ("starcoder2", {**FULL, **WIDE_HEADS}, "not of 24"),
    ("stablelm", {}, None),
    ("stablelm", {"tie_word_embeddings": True}, r"needs output\.weight"),
    ("stablelm", SCALED, NO_FREQS),
    ("gemma", {}, None),
    ("gemma", {"tie_word_embeddings": False}, r"takes no output\.weight"),
    ("gemma", BIASED, r"takes no blk\.\d\.attn_q\.bias"),
    ("gemma", SCALED, NO_FREQS),
    ("gemma2", GEMMA2, None),
    ("gemma2", {**GEMMA2, "tie_word_embeddings": False}, r"takes no output\.weight"),
    ("gemma2", {**GEMMA2, "attn_logit_softcapping": None}, "divides by attn_logit_softcapping, which is 0"),
    ("gemma2", {**GEMMA2, **SCALED}, NO_FREQS),
    ("gemma3", GEMMA3, None),
    ("gemma3", {**GEMMA3, "tie_word_embeddings": False}, None),
    ("gemma3", {**GEMMA3, **BIASED}, r"takes no blk\.\d\.attn_q\.bias"),
    ("gemma3", {**GEMMA3, **of_full_layers(LLAMA3_ROPE)}, NO_FREQS),
    ("gemma3", {**GEMMA3, **of_full_layers(BETAS)}, "ignores gemma3.*beta_fast"),
    ("gemma4", {}, None),
    ("gemma4", BIASED, r"takes no blk\.\d\.attn_q\.bias"),
    ("gemma4", {"vocab_size": 97}, r"per_layer_token_embd\.weight of 97 rows only, and it has 96"),
    ("gemma4_dense", {}, None),
    ("gemma4_unified", {}, "crashes unless a sliding layer and a full one"),
    ("gpt2", {}, None),
    ("gpt_oss", GPT_OSS, None),
    ("gpt_oss", {**GPT_OSS, "attention_bias": False}, "needs biases"),
    ("gpt_oss", {**GPT_OSS, "tie_word_embeddings": True}, r"needs output\.weight"),
    ("gpt_oss", {**GPT_OSS, **SCALED}, NO_FREQS),
    ("qwen3_next", ONE_WIDTH, None),
    ("qwen3_next", {}, r"takes ssm\.state_size \(24\) as the width of values, too, which is 16"),
    ("qwen3_next", {**ONE_WIDTH, **SCALED}, NO_FREQS),
    ("qwen3_next", {**ONE_WIDTH, "rms_norm_eps": 1e-3}, r"takes .*epsilon \(0\.001\) for the norms of queries"),
    ("qwen3_5", ONE_WIDTH, None),
    ("qwen3_5", {**ONE_WIDTH, **WIDE_HEADS}, r"crashes with a rope\.dimension_count below 8"),
    ("qwen3_5", {**ONE_WIDTH, "num_hidden_layers": 1}, "crashes without a layer that attends"),
    ("qwen3_5_moe", ONE_WIDTH, None),
    ("lfm2", {}, None),
    ("lfm2", WIDE_HEADS, "not of 24"),
    ("lfm2", SCALED, NO_FREQS),
    ("lfm2_moe", {"tie_word_embeddings": False}, None),
    ("lfm2_moe", WIDE_HEADS, "not of 24"),
    ("glm4_moe", {}, None),
    ("glm4_moe", SCALED, NO_FREQS),
    ("glm4", BIASED, None),
    ("glm4", SCALED, NO_FREQS),
    ("glm", BIASED, None),
    ("glm", WIDE_HEADS, "not of 24"),
    ("olmo2", {}, None),
    ("olmo2", {"tie_word_embeddings": True}, r"needs output\.weight"),
    ("olmo2", WIDE_HEADS, "not of 24"),
    ("olmo2", BIASED, r"takes no blk\.\d\.attn_q\.bias"),
    ("olmo2", SCALED, NO_FREQS),
    ("olmo3", of_full_layers(YARN), None),
    ("olmo3", of_full_layers(LLAMA3_ROPE), NO_FREQS),
    ("exaone4", EXAONE4, None),
    ("exaone4", {**EXAONE4, "head_dim": 24}, "not of 24"),
    ("exaone4", {"head_dim": 16}, "takes attention.sliding_window only with a block_count of 64"),
    ("deepseek_v2", RANK, None),
    ("deepseek_v2", {}, r"takes queries without attention\.q_lora_rank only"),
    ("deepseek_v2", {**RANK, **BIASED}, r"takes no blk\.\d\.attn_q_a\.bias"),
    ("deepseek_v3", {}, None),  # with YaRN
    ("deepseek_v2", {"num_hidden_layers": 27}, None),
    ("deepseek_v2", {**RANK, **GROUPS}, "ranks groups of experts"),
    ("deepseek_v3", {"rope_parameters": {**LATENT_YARN, "beta_fast": 8.0}}, "ignores deepseek2.*beta_fast"),
    ("deepseek_v3", {"rope_parameters": LINEAR}, "computes rope.scaling.type linear otherwise"),
    ("smollm3", SMOLLM3, None),
    ("smollm3", {**SMOLLM3, **SCALED}, NO_FREQS),
]
IGNORED_WINDOWS = ("mistral", "phi3", "starcoder2", "ministral3")  # llama.cpp loads such files, and attends to all
GELU = ("gemma", "gpt2", "starcoder2")  # llama.cpp looks it up in a table of half precision


# `changes` are copied for each model, because transformers writes into the rope settings that it gets.
def case_id(case: tuple[str, dict[str, object], str | None]) -> str:
    return f"{case[0]} {','.join(case[1]) or 'plain'}{' refused' if case[2] else ''}"


def packer_of(folder: Path, model: nn.Module) -> Packer:
    model.save_pretrained(folder)
    settings = compose_settings([f"model.checkpoint={folder}"])
    return Packer(open_model(settings.model, 0, folder / "cache", ignore_progress), "f32")


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_what_llama_cpp_does_not_take_is_refused_by_name(
    case: tuple[str, dict[str, object], str | None], tmp_path: Path
) -> None:
    name, changes, says = case
    packer = packer_of(tmp_path, build_reference(name, **deepcopy(changes)))
    if says is None:
        packer.check_llama_cpp()
    else:
        with pytest.raises(UnsupportedError, match=rf"llama\.cpp .*{says}.*task\.for_llama_cpp=false"):
            packer.check_llama_cpp()


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if "crashes" not in (case[2] or "")], ids=case_id)
def test_llama_cpp_loads_and_computes_what_the_table_says(
    case: tuple[str, dict[str, object], str | None], tmp_path: Path
) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (pip install -e '.[peers]')")
    name, changes, says = case
    model, path = build_reference(name, **deepcopy(changes)), tmp_path / "model.gguf"
    list(packer_of(tmp_path / "folder", model).pack(path, ignore_progress))
    error = error_of(path, model)
    tolerance = 6e-3 if name.startswith(GELU) else 1e-4
    assert (error < tolerance) == (says is None), error


@torch.no_grad()
def error_of(path: Path, model: nn.Module) -> float:
    """Return llama.cpp's largest error over transformers' largest logit; infinity if it does not load the file."""
    ids = torch.randint(0, 96, (1, 5 * WINDOW), generator=torch.Generator().manual_seed(5))
    expected = model(input_ids=ids, use_cache=False).logits[0].float()
    try:
        found = run_llama_cpp(path, ids[0].tolist(), threads=1).logits
    except UnsupportedError:
        return float("inf")
    error = float((found - expected).abs().max() / expected.abs().max())
    return error if error == error else float("inf")  # NaN


@pytest.mark.parametrize("name", IGNORED_WINDOWS)
def test_a_window_that_llama_cpp_ignores_is_noted(name: str, tmp_path: Path) -> None:
    said = f"llama.cpp ignores the window of {WINDOW} tokens: it attends to all, so that longer texts differ"
    packer = packer_of(tmp_path, build_reference(name, sliding_window=WINDOW))
    packer.check_llama_cpp()
    assert said in packer.notes()
