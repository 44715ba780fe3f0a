"""Values in range pass at their edges; the first beyond is refused with key, value and range."""

import pytest
from support.cases import in_case

from graphcore.config.compose import compose_settings
from graphcore.errors import ConfigError

REFUSED = [
    ("max_new_tokens=0", "max_new_tokens=0 must be at least 1"),
    ("batch_size=0", "batch_size=0 must be at least 1"),
    ("context_length=0", "context_length=0 must be at least 1"),
    ("prefill_chunk=1", "prefill_chunk=1 must be at least 2"),
    ("threads=0", "threads=0 must be at least 1"),
    ("speculation=self speculation.num_speculative_tokens=0", "num_speculative_tokens=0 must be at least 1"),
    ("speculation=self speculation.num_speculative_tokens=128", "num_speculative_tokens=128 must be at most 127"),
    ("speculation.num_speculative_tokens=5", "has no effect with speculation=off"),
    ("speculation=lookup speculation.draft_format=q3_k", "draft_format=q3_k has no effect with speculation=lookup"),
    ("max_new_tokens=-2", "max_new_tokens=-2 must be at least 1"),
    ("seed=-9223372036854775809", "must be a number of 64 bits"),
    ("seed=18446744073709551616", "must be a number of 64 bits"),
    ("model.num_hidden_layers=0", "model.num_hidden_layers=0 must be at least 1"),
    ("sampling.temperature=-0.1", "sampling.temperature=-0.1 must be 0"),
    ("sampling.temperature=inf", "sampling.temperature=inf must be"),
    ("sampling.temperature=nan", "sampling.temperature=nan must be"),
    ("sampling=nucleus sampling.top_k=-2", "sampling.top_k=-2 must be 0 or -1 (off), or more"),
    ("sampling=nucleus sampling.top_p=-0.1", "sampling.top_p=-0.1 must be 0 (greedy) to 1 (off)"),
    ("sampling=nucleus sampling.top_p=1.01", "sampling.top_p=1.01 must be 0 (greedy) to 1 (off)"),
    ("sampling=nucleus sampling.top_p=nan", "sampling.top_p=nan must be"),
    ("sampling=nucleus sampling.min_p=1.01", "sampling.min_p=1.01 must be 0 (off) to 1 (greedy)"),
    ("sampling=nucleus sampling.min_p=-0.1", "sampling.min_p=-0.1 must be"),
    ("sampling.repetition_penalty=0", "sampling.repetition_penalty=0.0 must be 0.01 to 100"),
    ("sampling.temperature=0 sampling.top_k=5", "has no effect with sampling.temperature=0"),
    ("prompt=''", "prompt is empty"),
    ("prompt_ids=[]", "prompt_ids is empty"),
    ("prompt_ids=[1,-2]", "holds a negative token id"),
    ("prompt=a prompt_ids=[1]", "prompt and prompt_ids are both given"),
    ("prompt=a prompt_file=b", "prompt and prompt_file are both given"),
    ("stop=['']", "stop holds an empty string"),
    ("quant.format=q5", "quant.format=q5 is not one of stored, q4_0"),
    ("graph.blocks=inductor", "graph.blocks=inductor is not one of auto, kernels, compiled"),
    (
        "graph=compiled graph.blocks=kernels",
        "graph.blocks=kernels contradicts graph=compiled, whose blocks",
    ),
    ("graph=eager graph.blocks=compiled", "graph.blocks=compiled contradicts graph=eager, whose blocks are eager"),
    ("graph.prefill=graphs", "graph.prefill=graphs is not one of auto, captured, compiled, eager"),
    ("graph=compiled graph.prefill=captured", "graph.prefill=captured contradicts graph=compiled"),
    ("parallel=ring task=generate graph.prefill=captured", "graph.prefill=captured does not work with parallel=ring"),
    ("dependent_launches=yes", "dependent_launches=yes is not one of auto, on, off"),
    ("model.fallback=vllm", "model.fallback=vllm is not one of null, transformers"),
    ("model.fallback=transformers model.attention=flash", "model.attention=flash is not one of auto, eager, sdpa"),
    ("model.attention=eager", "model.attention=eager has no effect on graphcore's own architectures"),
    ("graph.artefacts=blocks", "graph.artefacts=blocks has compiled blocks, which graph=auto does not run; add graph="),
    ("graph=captured graph.artefacts=blocks", "which graph=captured does not run; add graph=compiled"),
    ("graph=compiled graph.artefacts=''", "graph.artefacts= is empty; name a path"),
    ("parallel=ring graph=compiled graph.artefacts=blocks", "graph.artefacts=blocks does not work with parallel=ring"),
    ("quant.activations=int4", "quant.activations=int4 is not one of auto, float, int8"),
]
ALLOWED = [
    "graph=compiled graph.blocks=compiled",
    "graph.blocks=kernels",
    "max_new_tokens=1 batch_size=1 context_length=1 prefill_chunk=2 threads=1 seed=0",
    "seed=9223372036854775807",
    "speculation=lookup speculation.num_speculative_tokens=127",
    "speculation=auto speculation.draft_format=q3_k",
    "speculation=self speculation.draft_format=null",
    "seed=18446744073709551615 max_new_tokens=-1",
    "seed=-9223372036854775808",
    "sampling=nucleus sampling.top_k=0 sampling.top_p=1 sampling.min_p=0",
    "sampling=nucleus sampling.top_k=-1 sampling.top_p=0 sampling.min_p=1",
    "sampling.temperature=0 sampling.top_k=-1 sampling.top_p=0 sampling.min_p=1",
    "sampling.temperature=0 sampling.top_k=1",
    "sampling.temperature=1e-40 sampling.top_k=40",
    "sampling.temperature=1e30 sampling.top_k=1000000",
    "sampling.temperature=0 sampling.repetition_penalty=0.5",
    "model.fallback=transformers model.attention=eager",
    "graph=compiled graph.artefacts=blocks",
    "context_length=null threads=null model.num_hidden_layers=null",
]


def test_a_value_out_of_range_is_refused() -> None:
    for overrides, said in REFUSED:
        with in_case(overrides, said):
            with pytest.raises(ConfigError) as caught:
                compose_settings(overrides.split(" "))
            assert said in str(caught.value)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("overrides", ALLOWED)
def test_a_value_at_the_edge_is_taken(overrides: str) -> None:
    compose_settings(overrides.split(" "))


def test_the_published_hash_is_that_of_the_published_file_alone() -> None:
    published = compose_settings([]).model
    assert published.expected_sha256 == published.published.sha256 is not None
    assert compose_settings(["model.checkpoint=/other.gguf"]).model.expected_sha256 is None
    assert compose_settings(["model.checkpoint=/other.gguf", "model.sha256=ab"]).model.expected_sha256 == "ab"
