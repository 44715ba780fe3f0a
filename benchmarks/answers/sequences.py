"""Requests beside one another, too few pages, saved caches, states, layers by hand, transformers' generate."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from answers.cases import Case, Record
from answers.checkpoints import VOCAB, checkpoint
from answers.records import asked, digest, generation, steady
from graphcore import Engine, ForwardState, LayerLoader

CONTEXT, CHUNK = 96, 16
NAMES = ("llama3", "gemma3", "mistral", "gpt_oss", "qwen3_moe", "qwen3_5", "gemma4")
KINDS: dict[str, tuple[str, ...]] = {
    "eager": ("graph=eager",),
    "auto": ("graph=auto",),
    "streamed": ("graph=auto", "streaming=on"),
}
FALLBACKS = ("phi3", "olmo2", "bloom", "gpt_neox", "olmoe", "lfm2", "gemma2")


def cases() -> Iterator[Case]:
    """Yield all cases."""
    for name in NAMES:
        for kind, settings in KINDS.items():
            for what, ask in ASKED.items():
                whole = partial(answer, name, ("dtype=fp32", *settings), ask)
                yield Case(f"sequences/{name}/{kind}/{what}", f"sequences/{name}/{kind}", whole)
    for name in ("qwen3_moe", "qwen3_5"):
        whole = partial(answer, name, ("graph=auto", "dtype=bf16", "kv_dtype=q8_0"), crowded)
        yield Case(f"sequences/{name}/coded/crowded", f"sequences/{name}/coded", whole)
    for name in FALLBACKS:
        for what, ask in {"batch": joining, "logits": passes, "states": states}.items():
            whole = partial(answer, f"fallback_{name}", ("dtype=fp32", "model.fallback=transformers"), ask)
            yield Case(f"fallback/{name}/{what}", f"fallback/{name}", whole)
    for name in NAMES:
        yield Case(f"sequences/{name}/layers", f"sequences/{name}/eager", partial(layers, name))


Ask = Callable[[Callable[..., Engine], Path], Record]


def answer(name: str, settings: tuple[str, ...], ask: Ask, folder: Path) -> Record:
    """Return what `ask` makes of a function that loads the model, with more settings."""
    path = checkpoint(name, folder)
    sizes = ["threads=1", f"context_length={CONTEXT}", f"prefill_chunk={CHUNK}", f"cache_dir={folder / 'cache'}"]
    dtype = next(word.partition("=")[2] for word in settings if word.startswith("dtype="))
    more = [word for word in settings if not word.startswith("dtype=")]

    def load(*overrides: str) -> Engine:
        return Engine.load(path, dtype, device="cpu", overrides=[*sizes, *more, *overrides])

    return asked(partial(ask, load, folder), folder)


def requests() -> list[tuple[list[int], dict[str, Any]]]:
    """Return prompts of several lengths that share beginnings, with settings of `Engine.submit`."""
    words = Random(4)
    shared = [words.randrange(2, VOCAB) for _ in range(40)]
    found = []
    for number, (common, own, new) in enumerate(
        ((0, 3, 20), (40, 1, 12), (33, 17, 25), (40, 16, 30), (7, 2, 38), (20, 5, 9))
    ):
        prompt = [*shared[:common], *(words.randrange(2, VOCAB) for _ in range(own))]
        settings: dict[str, Any] = {"max_new_tokens": new, "ignore_eos": True, "logprobs": True}
        found.append((prompt, settings | ({"temperature": 1.3, "seed": number} if number % 2 else {})))
    return found


def joining(load: Callable[..., Engine], _folder: Path) -> Record:
    """Return answers of requests of which some begin while others run; tokens in the cache vary and are left out."""
    with load("batching.max_sequences=3") as engine:
        handles = []
        for prompt, settings in requests():
            handles.append(engine.submit(prompt, **settings))
            handles[-1].event(1)  # it runs, and so do others
        several = engine.submit(requests()[1][0], 6, n=3, temperature=0.9, seed=8, ignore_eos=True)
        return {
            "answers": [_without_cached(handle.result()) for handle in handles],
            "several": [list(each.token_ids) for each in several.results()],
            "stats": steady(engine.stats),
        }


def crowded(load: Callable[..., Engine], _folder: Path) -> Record:
    """Return answers of requests that share too few pages."""
    with load("batching.max_sequences=6", f"batching.cache_tokens={CONTEXT}") as engine:
        with engine.holding_back():
            handles = [engine.submit(prompt, **settings, reuse_cache=True) for prompt, settings in requests()]
        return {"answers": [generation(handle.result()) for handle in handles], "stats": steady(engine.stats)}


def shared(load: Callable[..., Engine], _folder: Path) -> Record:
    """Return answers of requests one after another that share beginnings."""
    with load("batching.max_sequences=2") as engine:
        found = [engine.submit(prompt, **settings, reuse_cache=True).result() for prompt, settings in requests()]
        return {"answers": [generation(each) for each in found]}


def saved(load: Callable[..., Engine], folder: Path) -> Record:
    """Return answers of an engine that has read what another one has saved."""
    prompt, settings = requests()[3]
    with load() as engine:
        file = folder / f"cache-{id(engine)}"
        tokens = engine.save_cache(prompt, file)
    with load() as engine:
        read = engine.load_cache(file)
        found = engine.submit([*prompt, 3, 1, 4], **settings, reuse_cache=True).result()
        return {"saved": tokens, "loaded": read, "answer": generation(found), "nbytes": file.stat().st_size}


def passes(load: Callable[..., Engine], _folder: Path) -> Record:
    """Return logits and hidden states, by chunks and by token."""
    with load("batch_size=2") as engine:
        ids = [requests()[at][0][:21] for at in (2, 3, 1)]
        both: Any = engine.logits(ids, output_hidden_states=True)
        by_token: Any = engine.logits([ids[0][:7]], by_token=True)
        return {
            "logits": digest(both[0]),
            "states": [digest(each) for each in both[1]],
            "by_token": digest(by_token),
        }


def states(load: Callable[..., Engine], _folder: Path) -> Record:
    """Return hidden states that run in several calls, while something else runs between them."""
    with load("batch_size=2") as engine:
        rows = 1 if "lfm2" in repr(engine) else 2
        hidden = torch.randn(rows, 35, engine.config.hidden_size, generator=torch.Generator().manual_seed(3))
        state, parts = ForwardState(), []
        for part in torch.split(hidden, [5, 1, 20, 9], dim=1):
            parts.append(digest(engine.forward(part, state)))
            engine.generate([[7, 8, 9]], max_new_tokens=3)
        return {"whole": digest(engine.forward(hidden)), "parts": parts}


def transformers(load: Callable[..., Engine], _folder: Path) -> Record:
    """Return what transformers' own generate makes with the engine."""
    with load("batch_size=3") as engine:
        model: Any = engine.as_transformers()
        words = Random(2)
        ids = torch.tensor([[words.randrange(2, VOCAB) for _ in range(12)] for _ in range(2)])
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        searches: dict[str, dict[str, Any]] = {
            "greedy": {"do_sample": False},
            "beams": {"do_sample": False, "num_beams": 3},
            "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20},
        }
        found = {}
        for name, search in searches.items():
            torch.manual_seed(5)
            given = {"input_ids": ids, "attention_mask": mask, "pad_token_id": 0}
            found[name] = model.generate(**given, max_new_tokens=7, **search).tolist()
        return found


def layers(name: str, folder: Path) -> Record:
    """Return digests of each layer's matrices as LayerLoader brings them."""
    path = checkpoint(name, folder)

    def ask() -> Record:
        with LayerLoader.load(path, "bf16", "stored", 2, 2, "cpu", [f"cache_dir={folder / 'cache'}"]) as loader:
            found: Record = {"groups": loader.num_groups, "slots": loader.num_slots}
            for group in range(loader.num_groups):
                for index, layer in zip(loader.layers_of(group), loader.load_group(group), strict=True):
                    found[str(index)] = {
                        key: digest(each)
                        for key, each in layer.named_buffers()
                        if each.ndim > 1
                        and ".experts." not in key  # experts are in no group: their slots hold anything
                    }
                loader.evict_group(group)
            return found

    return asked(ask, folder)


def _without_cached(found: Any) -> Record:
    return {key: value for key, value in generation(found).items() if key != "cached_tokens"}


ASKED: dict[str, Ask] = {
    "joining": joining,
    "crowded": crowded,
    "shared": shared,
    "saved": saved,
    "passes": passes,
    "states": states,
    "transformers": transformers,
}
