"""Peers on a tiny shape: their static caches and compiled steps give what their plain forwards give."""

from pathlib import Path

import pytest
import torch
from suite import peers, transformers_peer
from suite.gpt_fast_peer import FastPeer
from suite.peer_answers import prompt_of, run
from suite.shapes import LLAMA, model_overrides

from graphcore.config.compose import compose_settings

pytestmark = pytest.mark.thorough

CPU = torch.device("cpu")
# Dynamo and its graphs are what a GPU would capture; Inductor's C++ for them takes a minute.
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
CONFIG = {"model_type": "llama", "rope_theta": 10000.0, "rms_norm_eps": 1e-5, **LLAMA}
NEW = 12


def full_forward_tokens(step, prompt: list[int], new: int) -> list[int]:
    """Return greedy tokens, each chosen by a forward over all that came before."""
    ids = list(prompt)
    for _ in range(new + 1):
        ids.append(int(step(ids)))
    return ids[len(prompt) :]


@pytest.mark.parametrize("backend", BACKENDS)
def test_gpt_fasts_compiled_step_over_its_cache_gives_the_tokens_of_whole_forwards(backend: str) -> None:
    peer = FastPeer(CONFIG, CPU, 64, torch.float32)
    peer.compile(backend=backend)  # as one graph: a break in it raises
    prompt = prompt_of(9)
    with torch.no_grad():
        expected = full_forward_tokens(lambda ids: peer.prefill(ids), prompt, NEW)
        first = peer.prefill(prompt)
        assert [first.item(), *peer.decode(first, len(prompt), NEW)] == expected
    assert len(set(expected)) > 2, "tokens that differ, or the cache would not be seen"


def test_gpt_fasts_model_is_transformers_llama() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    peer = FastPeer(CONFIG, CPU, 64, torch.float32)
    config = AutoConfig.for_model(**CONFIG)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    own = reference.state_dict()
    with torch.no_grad():
        for at, layer in enumerate(peer.model.layers):
            theirs = {name: own[f"model.layers.{at}.{name}.weight"] for name in NAMES}
            layer.attention.wqkv.weight.copy_(torch.cat([theirs[f"self_attn.{part}_proj"] for part in "qkv"]))
            layer.attention.wo.weight.copy_(theirs["self_attn.o_proj"])
            for mine, name in ((layer.w1, "gate"), (layer.w3, "up"), (layer.w2, "down")):
                mine.weight.copy_(theirs[f"mlp.{name}_proj"])
        peer.model.tok_embeddings.weight.copy_(own["model.embed_tokens.weight"])
        peer.model.output.weight.copy_(own["lm_head.weight"])
        ids = torch.tensor([prompt_of(20)])
        found = peer.model(ids, torch.arange(20))
        assert (found - reference(ids).logits[:, -1]).abs().max() < 1e-5
    assert peer.weight_nbytes() == sum(one.nbytes for one in reference.parameters()) - own["lm_head.weight"].nbytes


NAMES = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]


@pytest.mark.parametrize("backend", BACKENDS)
def test_transformers_compiled_step_over_its_static_cache_gives_the_tokens_of_whole_forwards(backend: str) -> None:
    peer = transformers_peer.make(CONFIG, CPU, 64)
    peer.model.float()
    peer.compile(backend=backend)
    assert peer.is_whole, "what is timed on a GPU is captured whole"
    prompt = prompt_of(9)
    with torch.no_grad():
        step = lambda ids: peer.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()  # noqa: E731
        expected = full_forward_tokens(step, prompt, NEW)
        first = peer.prefill(prompt)
        assert [first.item(), *peer.decode(first, len(prompt), NEW)] == expected
    assert len(set(expected)) > 2


def test_gpt_oss_decodes_over_transformers_static_cache() -> None:
    settings = compose_settings(model_overrides("gpt_oss", "random:", True)).model
    config = {key: value for key, value in settings.random_config.items() if value is not None}
    found = run(transformers_peer.make(config, CPU, 32), 8, 4)
    assert len(found["tokens"]) == 4
    assert found["decode"] > 0


def test_a_peer_that_dies_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from suite.bench import Bench
    from suite.log import Log

    (tmp_path / "gpt_fast_peer.py").write_text("raise SystemExit('out of memory')\n", encoding="utf-8")
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    bench = Bench(tmp_path, Log(tmp_path, "run", True, "peers_8b"), True)
    with pytest.raises(RuntimeError, match="gpt_fast died"), peers.process(bench, "gpt_fast", "llama3_8b", 64) as peer:
        peer.answer()
