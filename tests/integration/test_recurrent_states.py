"""Recurrent states continue after the last token that they have seen, in any row, and after no earlier one."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from support.engine_fakes import SteppedQueue
from support.streaming import SIZES, runs_as
from support.tiny_models import TOLERANCE, TinyModel

from graphcore import Engine
from graphcore.engine.batching.admission import CacheAdmission
from graphcore.engine.batching.continuous import ContinuousBatching
from graphcore.engine.batching.host_decode_loop import HostDecodeLoop
from graphcore.engine.request import Request
from graphcore.progress import ignore_progress
from graphcore.tokenizer.text_stream import StopStrings

pytestmark = pytest.mark.thorough

Tiny = Callable[[str], TinyModel]
PROMPT = 21
NAMES = ("qwen3_5", "qwen3_5_moe", "lfm2")


def load(tiny: TinyModel, graph: str) -> Engine:
    overrides = SIZES if graph == "eager" else (*SIZES, "batch_size=1")
    return Engine.load(tiny.folder, dtype="fp32", device="cpu", graph=graph, overrides=list(overrides))


@pytest.mark.parametrize("graph", ["eager", "auto"])
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_a_snapshot_brings_a_sequence_back_in_any_row(name: str, graph: str, tiny_model: Tiny) -> None:
    tiny = tiny_model(name)
    row, expected = tiny.ids[0].tolist(), tiny.logits[0]
    with load(tiny, graph) as engine:
        assert runs_as(engine, graph)
        runner, pages = engine.runner, engine.runner.pages
        runner.extend([row[:PROMPT]], [0])
        kept = pages.copy_out(0, PROMPT)
        first = runner.extend([row[PROMPT : PROMPT + 3]], [PROMPT])[0]
        assert (first - expected[PROMPT + 2]).abs().max() < TOLERANCE
        runner.extend([row[::-1]], [0])
        pages.free(0)
        assert pages.copy_in(0, kept)
        assert torch.equal(runner.extend([row[PROMPT : PROMPT + 3]], [PROMPT])[0], first)
        if graph == "eager":
            assert pages.copy_in(1, kept)
            found = runner.extend([row[:4], row[PROMPT : PROMPT + 1]], [0, PROMPT])
            assert (found[1] - expected[PROMPT]).abs().max() < TOLERANCE


@pytest.mark.parametrize("graph", ["eager", "auto"])
@pytest.mark.parametrize("name", NAMES)
def test_a_longer_prompt_goes_on_after_the_last_token_and_another_starts_anew(
    name: str, graph: str, tiny_model: Tiny
) -> None:
    """A state is used again only where nothing of it has to be forgotten."""
    tiny = tiny_model(name)
    ids = tiny.ids[1].tolist()
    prompts = (ids[:20], ids[:9], ids[3:30])
    with load(tiny, graph) as engine:
        fresh, again = ([engine.generate([one], 6)[0].token_ids for one in prompts] for _ in range(2))
        assert again == fresh
        engine.submit(ids[:20], 1, reuse_cache=True).result()
        handles = [engine.submit(prompt, 1, reuse_cache=True) for prompt in (ids[:21], [*ids[:19], 95, 94], ids[:20])]
        assert all(handle.result().token_ids for handle in handles)
        assert handles[0].cached == 20  # after the last token
        assert all(handle.cached in (0, 16) for handle in handles[1:])  # or where a chunk of the first prompt ended


@pytest.mark.parametrize("name", NAMES)
def test_a_chat_goes_on_from_its_own_states_when_no_page_is_free(name: str, tiny_model: Tiny, tmp_path: Path) -> None:
    """Six pages of 16 positions. The last idle page lies above one in use, where two prompts begin alike.

    The chat's next turn copies the page in which its cached prefix ends, and has to evict that page for it. The copy
    must not cost the snapshot that the turn continues from: a stranger has run in its row since.
    """
    tiny = tiny_model(name)
    shared, one, other, talk = (tiny.ids[0, begin : begin + 16].tolist() for begin in (0, 4, 8, 12))
    sizes = ["batch_size=3", "prefill_chunk=32", "context_length=64", "batching.cache_tokens=96"]
    with Engine.load(tiny.folder, dtype="fp32", device="cpu", graph="eager", overrides=sizes) as engine:
        admission = CacheAdmission.of(engine.runner, tmp_path)
        batching = ContinuousBatching(engine.runner, HostDecodeLoop(engine.runner), admission)
        queue = SteppedQueue(batching, 100, lambda: None, ignore_progress, lambda: None)

        def submit(prompt: Sequence[int], tokens: int, *, reuses_cache: bool = False) -> Request:
            request = Request(prompt, tokens, frozenset(), None, StopStrings([]), reuses_cache=reuses_cache)
            queue.submit([request], "submit", waits=False)
            return request

        def finish(request: Request) -> Request:
            while not request.has_ended:
                assert queue.step()
            queue.step()  # it leaves
            return request

        first, beside = submit([*shared, *one], 1), submit([*shared, *other], 32)
        finish(first)
        turn = finish(submit(talk[:5], 3, reuses_cache=True))
        finish(submit(talk[5:10], 1))
        (table,) = admission.pages.tables
        while beside.num_computed < 50:
            assert queue.step()
        assert (table.num_free, beside.has_ended, beside.cache_row) == (0, False, 1)
        prompt = [*turn.ids, *talk[10:13]]
        found = finish(submit(prompt, 6, reuses_cache=True))
        assert not beside.has_ended
        assert found.cached == 7  # all that the chat had computed
        finish(beside)
    with Engine.load(tiny.folder, dtype="fp32", device="cpu", graph="eager", overrides=sizes) as engine:
        assert found.token_ids == list(engine.generate([prompt], 6)[0].token_ids)
        assert beside.token_ids == list(engine.generate([[*shared, *other]], 32)[0].token_ids)
