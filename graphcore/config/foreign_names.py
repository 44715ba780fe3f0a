"""Words and options of ollama, llama.cpp and vLLM, and what stands for each in graphcore.

Error messages are made from these tables, so that whoever types what another program takes reads what to type here.
docs/coming_from.md has the same for reading. Only what graphcore does not understand itself is listed: words such as
run and pull are in cli/bare_words.py.

    stop smollm2        WORDS    a sentence
    --verbose           OPTIONS  a sentence
    --ctx-size 4096     KEYS     context_length
    --port 8139         a key of graphcore's own, one level down: task.port
"""

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import get_type_hints

from omegaconf import OmegaConf

from graphcore.config.conf_folder import conf_dir
from graphcore.config.settings import Settings

_NO_MODELFILE = (
    "there is no Modelfile and no registry to push to; settings stand in ~/.config/graphcore/config.yaml, "
    "and a model is used from its file, folder or repository"
)
_NO_ACCOUNT = "graphcore has no account; for models of the Hub that need one set HF_TOKEN, or run hf auth login"
_PLACED = "layers are placed by streaming=auto, within streaming.memory_budget=20GB"
_RING = "one process uses one GPU; parallel=ring with torchrun shares the layers among processes (docs/scaling.md)"
_NO_OPTION = "a model is a word without an option: graphcore smollm2, FILE.gguf or hf:org/name:Q4_K_M"
_DRAFTS = "drafts need no second model; write speculation=self or speculation=lookup"
_IN_REQUESTS = "a request to the server has grammar and response_format for it"
_FROM_TEMPLATE = "the server finds it from the model's chat template; leave it out"

WORDS: Mapping[str, str] = {
    "stop": "a model runs only inside the process that was started; end that with Ctrl-C, graphcore ps lists servers",
    "launch": "graphcore starts no other program; graphcore serve NAME is a server for it, with an address to give it",
    **dict.fromkeys(("create", "cp", "push"), _NO_MODELFILE),
    **dict.fromkeys(("login", "signin", "signout", "logout"), _NO_ACCOUNT),
}
OPTIONS: Mapping[str, str] = {
    "verbose": "a line with the speed follows an answer, and /stats shows it in a chat",
    "f": "a prompt from a file is prompt_file=FILE; there is no Modelfile, settings stand in "
    "~/.config/graphcore/config.yaml",
    **dict.fromkeys(("ngl", "gpu_layers", "n_gpu_layers", "num_gpu", "n_cpu_moe", "fit"), _PLACED),
    "gpu_memory_utilization": "write streaming.memory_budget=20GB, with streaming=auto for what does not fit in it",
    **dict.fromkeys(("tensor_parallel_size", "tp", "pipeline_parallel_size", "pp", "rpc"), _RING),
    **dict.fromkeys(("model", "hf", "hf_repo"), _NO_OPTION),
    **dict.fromkeys(("md", "model_draft", "speculative_config"), _DRAFTS),
    **dict.fromkeys(("grammar", "json_schema"), _IN_REQUESTS),
    **dict.fromkeys(("tool_call_parser", "reasoning_parser"), _FROM_TEMPLATE),
    **dict.fromkeys(("cnv", "conversation"), "a chat is graphcore chat NAME"),
    "no_cnv": "a prompt without the chat template is chat=off",
}
KEYS: Mapping[str, str] = {
    **dict.fromkeys(("c", "ctx_size", "num_ctx", "n_ctx", "max_model_len"), "context_length"),
    **dict.fromkeys(("n", "n_predict", "predict", "num_predict", "max_tokens"), "max_new_tokens"),
    **dict.fromkeys(("t", "num_thread"), "threads"),
    "b": "prefill_chunk",
    "s": "seed",
    **dict.fromkeys(("sys", "system_prompt"), "system"),
    "temp": "sampling.temperature",
    "repeat_penalty": "sampling.repetition_penalty",
    "top_nsigma": "sampling.top_n_sigma",
    **dict.fromkeys(("np", "max_num_seqs", "num_parallel"), "task.max_sequences"),
    "max_num_batched_tokens": "batching.max_tokens_per_step",
    **dict.fromkeys(("a", "alias", "served_model_name"), "task.model_name"),
    **dict.fromkeys(("lora", "enable_lora"), "model.adapter"),
    **dict.fromkeys(("ctk", "cache_type_k", "kv_cache_dtype"), "kv_dtype"),
    "quantization": "quant",
    "draft_max": "speculation.num_speculative_tokens",
}


def plain_name(name: str) -> str:
    """Return an option or key as the tables have it: "--ctx-size" is ctx_size."""
    return name.lstrip("-").replace("-", "_").lower()


def keys_named(name: str) -> list[str]:
    """Return the keys that a name without its group stands for, such as sampling.temperature; empty if there is none.

    Args:
        name: a plain name, of another program or of graphcore.
    """
    if name in KEYS:
        return [KEYS[name]]
    groups = get_type_hints(Settings).items()
    nested = [f"{group}.{name}" for group, kind in groups if is_dataclass(kind) and name in get_type_hints(kind)]
    return nested or ([f"task.{name}"] if name in tasks_by_key() else [])


def tasks_by_key() -> Mapping[str, str]:
    """Return the keys of all tasks, each with the names of the tasks that have it, joined by "or"."""
    tasks: dict[str, list[str]] = {}
    for file in sorted((conf_dir() / "task").glob("*.yaml")):
        for key in OmegaConf.to_container(OmegaConf.load(file)) or ():
            if key != "name":
                tasks.setdefault(str(key), []).append(file.stem)
    return {key: " or ".join(names) for key, names in tasks.items()}
