"""config.json files of the Hub, as far as they bear on a model, and how to parse one with changes.

golden/hub/NAME.json   {"source": repository, "config": its config.json}
"""

import json
from pathlib import Path

from graphcore.arch.config_from_json import ModelConfig, parse_model_config

FAMILIES: dict[str, dict] = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))["config"]
    for path in sorted((Path(__file__).parents[1] / "golden" / "hub").glob("*.json"))
}
BITNET = FAMILIES["bitnet"]
DEEPSEEK_V2_LITE = FAMILIES["deepseek_v2_lite"]
DEEPSEEK_V3 = FAMILIES["deepseek_v3"]
EXAONE4 = FAMILIES["exaone4"]
GEMMA2_2B = FAMILIES["gemma2"]
GEMMA3_1B = FAMILIES["gemma3_text"]
GEMMA3_4B = FAMILIES["gemma3"]
GEMMA4_MOE = FAMILIES["gemma4_text"]
GEMMA_2B = FAMILIES["gemma"]
GLM4 = FAMILIES["glm4"]
GLM4_MOE = FAMILIES["glm4_moe"]
GLM4_MOE_LITE = FAMILIES["glm4_moe_lite"]
GPT2 = FAMILIES["gpt2"]
GPT_OSS = FAMILIES["gpt_oss"]
GRANITE = FAMILIES["granite"]
GRANITE_MOE = FAMILIES["granitemoe"]
KIMI_K2 = FAMILIES["kimi_k2"]
LFM2 = FAMILIES["lfm2"]
LFM2_MOE = FAMILIES["lfm2_moe"]
LLAMA = FAMILIES["llama"]
MINISTRAL3 = FAMILIES["ministral3"]
MISTRAL = FAMILIES["mistral"]
MISTRAL3 = FAMILIES["mistral3"]
MIXTRAL = FAMILIES["mixtral"]
OLMO2 = FAMILIES["olmo2"]
OLMO3 = FAMILIES["olmo3"]
PHI3_MINI = FAMILIES["phi3"]
PHI4 = FAMILIES["phi4"]
PHI4_MINI = FAMILIES["phi4_mini"]
QWEN2 = FAMILIES["qwen2"]
QWEN3 = FAMILIES["qwen3"]
QWEN3_6_MOE = FAMILIES["qwen3_6_moe"]
QWEN3_MOE = FAMILIES["qwen3_moe"]
SMOLLM3 = FAMILIES["smollm3"]
STABLELM2 = FAMILIES["stablelm"]
STARCODER2_3B = FAMILIES["starcoder2"]


def parse(raw: dict, generation: dict | None = None, **changes: object) -> ModelConfig:
    return parse_model_config({**raw, **changes}, "config.json", generation)


def without(raw: dict, *names: str) -> dict:
    return {name: value for name, value in raw.items() if name not in names}
