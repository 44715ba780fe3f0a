"""Every property of sequences, over every kind of block, in every way to run it.

    pytest tests/integration/test_engine_matrix.py -k "recurrent and prefix"     one property over one kind of block

The engines (support/engines.py) have two layers of random weights. What they compute is compared with logits that
transformers has computed (support/golden_models.py), and all else with what the same engine answers to one request at a
time, with nothing cached, to the bit. Each test runs its property captured, and streamed or eager; the third way is
slow. A failure's notes say which of them it was.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparisons import dry_penalties
from support.engine_fakes import KnownAnswers, submit_staggered
from support.engines import (
    CHUNK,
    CONTEXT,
    DRAWN,
    GRAPHS,
    POOL,
    REQUESTS,
    SECONDS,
    Asked,
    EngineMatrix,
    MatrixEngine,
    replaced,
    what,
    words,
)
from support.golden_models import (
    KINDS,
    describe,
    golden_ids,
    golden_logits,
    logits_of_transformers,
    recorded,
    write_checkpoint,
)
from support.packed_matrices import native_kernels

from graphcore import ForwardState
from graphcore.engine.sequence_state import SequenceState
from graphcore.engine.speculation.prompt_lookup import LookupSpeculation
from graphcore.engine.speculation.self_speculation import SelfSpeculation
from graphcore.errors import PlanError
from graphcore.host_pages import is_of_file
from graphcore.kvcache.buffers import KVCache
from graphcore.kvcache.swap_file import SwapFile

Property = Callable[[MatrixEngine, EngineMatrix], None]
PROPERTIES: dict[str, Property] = {}


def sequences(check: Property) -> Property:
    """Add a property to the matrix, by the name of its function."""
    PROPERTIES[check.__name__] = check
    return check


def assert_near(found: torch.Tensor, expected: torch.Tensor, tested: MatrixEngine, message: str = "") -> None:
    """Check logits or log probabilities: each of them, and the mean error of many."""
    errors, (most, mean) = (found - expected).abs(), tested.tolerance
    assert errors.max() < most, f"{message}: error {errors.max():.1e}"
    assert errors.mean() < mean or errors.numel() < 1000, f"{message}: mean error {errors.mean():.1e}"


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineMatrix]:
    native_kernels()
    matrix = EngineMatrix(tmp_path_factory.mktemp("engines"))
    yield matrix
    matrix.close()


@sequences
def golden(tested: MatrixEngine, engines: EngineMatrix) -> None:
    """Logits are transformers', of a whole prompt in chunks and of a token after another, two sequences together."""
    ids, expected = golden_ids(), golden_logits(tested.kind)
    assert_near(tested.engine.logits(ids), expected, tested, "in chunks")
    assert_near(tested.engine.logits(ids, by_token=True), expected, tested, "by token")


@sequences
def chunks(tested: MatrixEngine, engines: EngineMatrix) -> None:
    """A prompt may be cut anywhere, also in pieces longer than a window or than a chunk, beside other sequences."""
    ids, expected = golden_ids().tolist(), golden_logits(tested.kind)
    for cuts in ((7, 8, 9, 25, 40), (1, 2, 18, 50), (16, 32, 48), (33, 34)):
        states = [SequenceState(), SequenceState()]
        for begin, end in pairwise((0, *cuts)):
            found = tested.engine.extend([row[begin:end] for row in ids], states, num_logits=end - begin)
            for row, logits in enumerate(found.logits):
                assert_near(logits, expected[row, begin:end], tested, f"row {row}, {begin} to {end} of {cuts}")
            states = list(found.states)
        late, early = tested.engine.extend([[5], [5]], [states[0], SequenceState()]).logits
        assert torch.equal(tested.engine.extend([[5]], [states[0]]).logits[0], late)
        assert torch.equal(tested.engine.extend([[5]], [SequenceState()]).logits[0], early)
    widths = [tested.engine.logits([ids[0][:length]])[0] for length in (15, 16, 31, 50)]
    for logits in widths:
        assert_near(logits, expected[0, : len(logits)], tested, f"{len(logits)} tokens")
        whole = len(logits) // CHUNK * CHUNK
        assert torch.equal(logits[:whole], widths[-1][:whole]), "whole chunks have the same bits in every prompt"


@sequences
def states(tested: MatrixEngine, engines: EngineMatrix) -> None:
    """Hidden states run in several calls as in one, and a state may be gone on from several times."""
    ids = golden_ids()[:, :40]
    logits, hidden = tested.engine.logits(ids, output_hidden_states=True)
    assert torch.equal(logits, tested.engine.logits(ids))
    whole = tested.engine.forward(hidden[0])
    assert torch.equal(whole, torch.cat([tested.engine.forward(row[None]) for row in hidden[0]]))
    state, parts = ForwardState(), []
    for begin, end in pairwise((0, 16, 32, 40)):
        parts.append(tested.engine.forward(hidden[0][:, begin:end], state))
        tested.engine.generate([words(70, 20)], 2, ignore_eos=True)  # somebody else's pages and rows
    assert torch.equal(torch.cat(parts, 1), whole)
    first = tested.engine.extend([ids[0, :21].tolist()], [SequenceState()])
    branch = partial(tested.engine.extend, [ids[0, 21:24].tolist()], first.states, num_logits=3)
    before = branch().logits[0]
    tested.engine.extend([words(71, 30)] * 3, [SequenceState(), first.states[0], SequenceState()])
    assert torch.equal(branch().logits[0], before)
    assert_near(before, golden_logits(tested.kind)[0, 21:24], tested)
    del state, first, branch


@sequences
def choices(tested: MatrixEngine, engines: EngineMatrix) -> None:
    """Tokens are those that the settings allow, over the logits of the whole text; log probabilities are theirs."""
    for asked, (tokens, reason, logprobs) in zip(REQUESTS, tested.alone, strict=True):
        assert (len(tokens), reason) == (asked.new, "length")
        text = [*asked.prompt, *tokens]
        logits = tested.engine.logits([text])[0, len(asked.prompt) - 1 : -1]
        expected = logits.log_softmax(-1)[range(len(tokens)), list(tokens)]
        assert_near(torch.tensor(logprobs), expected, tested, f"log probabilities of {asked.settings}")
        for at, token in enumerate(tokens):
            allowed = allowed_tokens(logits[at], asked, text[: len(asked.prompt) + at])
            slack = 2 * tested.tolerance[0]
            assert token in allowed(slack), f"token {at} of {asked.settings}"


@sequences
def ends(tested: MatrixEngine, engines: EngineMatrix) -> None:
    """A stop token ends the answer that it comes in, and is not chosen before min_tokens."""
    asked, tokens = REQUESTS[7], tested.alone[7][0]
    place = next(at for at in range(2, len(tokens)) if tokens[at] not in tokens[:at])
    settings = {**asked.settings, "stop_token_ids": [tokens[place]]}
    assert tested.answer(Asked(asked.prompt, 12, settings))[:2] == (tokens[: place + 1], "stop")
    found = tested.answer(Asked(asked.prompt, place + 1, {**settings, "min_tokens": place + 1}))
    assert found[:2] == ((*tokens[:place], found[0][place]), "length")
    text = [*asked.prompt, *tokens[:place]]
    logits = tested.engine.logits([text])[0, -1]
    logits[tokens[place]] = float("-inf")
    assert found[0][place] in allowed_tokens(logits, asked, text)(2 * tested.tolerance[0])


def allowed_tokens(logits: torch.Tensor, asked: Asked, ids: Sequence[int]) -> Callable[[float], set[int]]:
    """Return a function from a slack in logits to the tokens that the settings allow before XTC: penalties, cuts."""
    get = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "logit_bias": {}, **asked.settings}.get
    own, logits = logits, logits.clone()
    for token, bias in get("logit_bias").items():
        logits[token] += bias
    for token in set(ids):
        factor = get("repetition_penalty", 1.0)
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    answer = list(ids[len(asked.prompt) :])
    for token in set(answer):
        logits[token] -= get("frequency_penalty", 0.0) * answer.count(token) + get("presence_penalty", 0.0)
    for token, loss in dry_penalties(ids, frozenset(), get("dry_multiplier", 0.0), 1.75, 1, -1).items():
        logits[token] -= loss
    margin = get("top_n_sigma", 1e9) * own.double().std(correction=0)

    def within(slack: float) -> set[int]:
        if not get("temperature"):
            return set(torch.nonzero(logits >= logits.max() - slack).flatten().tolist())
        order = logits.sort(descending=True)
        kept = order.values >= order.values[0] - margin - slack
        if get("top_k"):
            kept &= order.values >= order.values[get("top_k") - 1] - slack
        scaled = (order.values / get("temperature")).masked_fill(~kept, float("-inf")).softmax(-1)
        kept &= scaled.cumsum(-1) - scaled < get("top_p") + 5 * slack
        kept &= scaled >= scaled[0] * get("min_p") * (1 - 5 * slack)
        return set(order.indices[kept].tolist())

    return within


@sequences
def together(tested: MatrixEngine, engines: EngineMatrix) -> None:
    """Requests that join and leave beside others, some of which are cancelled, are answered as alone."""
    engine, generator = tested.engine, random.Random(len(tested.kind))
    asked = [*zip(REQUESTS, tested.alone, strict=True)]
    generator.shuffle(asked)
    tested.forget()
    noise = [Asked(words(80 + at, length), 30).submit for at, length in enumerate((60, 3, 40))]
    submits = [partial(one.submit, engine) for one, _ in asked]
    for at, place in enumerate((0, 3, 6)):
        submits.insert(place, partial(noise[at], engine))
    handles = submit_staggered(engine, submits, generator)
    handles[0].cancel()  # in its prompt, or soon after
    handles[3].event(1)
    handles[3].cancel()
    handles[6].cancel()
    answers = [handle.result(SECONDS) for at, handle in enumerate(handles) if at not in (0, 3, 6)]
    for (one, expected), answer in zip(asked, answers, strict=True):
        assert what(answer) == expected, f"{len(one.prompt)} tokens, {one.settings}"
    assert max(answer.timings.batch for answer in answers) > 2
    tested.check_idle()


@sequences
def cancelled(tested: MatrixEngine, engines: EngineMatrix) -> None:
    """Requests that end early leave the rows, pages and states that others then get as nobody had been there."""
    for asked, expected in [*zip(REQUESTS, tested.alone, strict=True)][3:5]:
        tested.forget()
        with tested.engine.holding_back():
            long = [Asked(words(90 + at, 40), 9).submit(tested.engine) for at in range(2)]
            decoding = asked.submit(tested.engine)
        found = decoding.event(1)
        assert found is not None
        decoding.cancel()
        for handle in long:
            handle.cancel()
        ended = decoding.result(SECONDS)
        assert ended.token_ids == expected[0][: len(ended.token_ids)]
        assert ended.logprobs == expected[2][: len(ended.token_ids)]
        assert what(asked.submit(tested.engine).result(SECONDS)) == expected, f"{len(asked.prompt)} tokens"
    tested.check_idle()


@sequences
def prefix(tested: MatrixEngine, engines: EngineMatrix) -> None:
    """A prompt of which something is cached is answered as if nothing were, whatever else came before."""
    common, hits = words(10, 69), 0
    prompts = (
        common,
        [*common, 3, 1, 4, 1, 5],
        common[:50],
        [*common[:50], *words(11, 20)],  # turns off within a page
        [*common[:7], *words(12, 30)],  # within the first page
        [*common[:64], *words(13, 8)],
        common,
    )
    asked = [Asked(prompt, 2, DRAWN if at % 2 else {}) for at, prompt in enumerate(prompts)]
    expected = [tested.answer(one) for one in asked]
    tested.forget()
    for at, (one, answer) in enumerate(zip(asked, expected, strict=True)):
        handle = one.submit(tested.engine)
        assert what(handle.result(SECONDS)) == answer, f"prompt {at}, of which {handle.cached} tokens were cached"
        assert handle.cached < len(one.prompt)
        hits += handle.cached >= CHUNK
    assert hits >= 4, f"{hits} prompts went on from the cache"
    tested.forget()
    with tested.engine.holding_back():  # each finds what the one before it is about to compute
        handles = [one.submit(tested.engine) for one in asked]
    for at, (handle, answer) in enumerate(zip(handles, expected, strict=True)):
        assert what(handle.result(SECONDS)) == answer, f"prompt {at} beside the others"
    tested.check_idle()


@sequences
def evicted(tested: MatrixEngine, engines: EngineMatrix) -> None:
    """Prompts that share beginnings, in a cache that cannot hold them all, are answered as with nothing cached."""
    generator, stems = random.Random(4), [words(20 + at, 48) for at in range(3)]
    prompts = [
        [*generator.choice(stems)[: generator.choice((5, 16, 20, 40, 48))], *words(30 + at, generator.randint(1, 40))]
        for at in range(8)
    ]
    prompts += [[*prompts[at], 7] for at in (0, 3)]
    expected = [tested.answer(Asked(prompt, 1)) for prompt in prompts]
    tested.forget()
    for at in (*range(len(prompts)), 2, 0, 6, 1):
        handle = Asked(prompts[at], 1).submit(tested.engine)
        assert what(handle.result(SECONDS)) == expected[at], f"prompt {at}, {handle.cached} tokens cached"
    whole = Asked(words(50, CONTEXT), 1)  # its pages are all that one sequence may have
    alone = tested.answer(whole)
    assert [what(whole.submit(tested.engine).result(SECONDS)) for _ in range(2)] == [alone] * 2
    tested.check_idle()


@sequences
def turns(tested: MatrixEngine, engines: EngineMatrix) -> None:
    """A chat that goes on from its own answers has the logits of a chat that runs everything again."""
    tested.forget()
    history: list[int] = []
    for turn, length in enumerate((3, 20, 1)):
        history += words(60 + turn, length)
        handle = Asked(history, 6).submit(tested.engine, reuse_cache=True)
        tokens, _, logprobs = what(handle.result(SECONDS))
        assert handle.cached == max(0, len(history) - length - 1)
        logits = tested.engine.logits([[*history, *tokens]])[0, len(history) - 1 : -1].log_softmax(-1)
        chosen = logits[range(len(tokens)), list(tokens)]
        assert_near(torch.tensor(logprobs), chosen, tested, f"turn {turn}")
        slack = 2 * tested.tolerance[0]
        assert bool((logits.max(-1).values - chosen <= slack).all()), f"turn {turn}"
        history += tokens
    tested.check_idle()


@sequences
def swapped(tested: MatrixEngine, engines: EngineMatrix) -> None:
    """Requests that the caches cannot hold together wait or are swapped out, and are answered as alone."""
    asked = [Asked(words(40 + at, 12 + at), 22, {**DRAWN, "seed": at} if at % 2 else {}) for at in range(5)]
    asked.insert(2, REQUESTS[5])
    assert sum(len(one.prompt) + one.new for one in asked) > 1.5 * POOL
    expected = [tested.answer(one) for one in asked]
    written: list[int] = []
    write = vars(SwapFile)["write"].__func__

    def note(cls: type[SwapFile], kept: Any, folder: Path) -> SwapFile:
        written.append(kept.tokens)
        if tested.graph == "eager" and len(written) % 2:
            raise OSError(28, "no space left on device")  # its tokens run again
        return write(cls, kept, folder)  # type: ignore[no-any-return]

    tested.forget()
    with replaced(SwapFile, "write", classmethod(note)):  # type: ignore[arg-type]
        with tested.engine.holding_back():
            handles = [one.submit(tested.engine) for one in asked]
        for at, (handle, answer) in enumerate(zip(handles, expected, strict=True)):
            assert what(handle.result(SECONDS)) == answer, f"request {at}"
    assert written, "nobody was swapped out"
    tested.check_idle()


@sequences
def lent(tested: MatrixEngine, engines: EngineMatrix) -> None:
    """Calls that use the whole cache put everything back, for those that run and for what is cached."""
    asked, expected = REQUESTS[5], tested.alone[5]
    tested.forget()
    running = Asked(words(95, 40), 12)
    after = tested.answer(running)
    handle = running.submit(tested.engine)
    handle.event(2)
    tested.engine.logits(golden_ids())
    assert what(asked.submit(tested.engine).result(SECONDS)) == expected
    assert what(handle.result(SECONDS)) == after
    tested.engine.logits(golden_ids()[:, :9], by_token=True)
    assert what(asked.submit(tested.engine).result(SECONDS)) == expected
    tested.check_idle()


@sequences
def seeds(tested: MatrixEngine, engines: EngineMatrix) -> None:
    """What is drawn depends on seed and text alone: several answers are those of following seeds."""
    prompt = words(15, 9)
    tested.forget()
    together = tested.engine.submit(prompt, 6, n=4, temperature=1.5, seed=20, ignore_eos=True, logprobs=True)
    alone = [tested.answer(Asked(prompt, 6, {"temperature": 1.5, "seed": 20 + at})) for at in range(4)]
    assert [what(one) for one in together.results(SECONDS)] == alone
    assert len({one[0] for one in alone}) == 4
    rows = tested.engine.generate([prompt, prompt[:4], prompt], 6, ignore_eos=True, temperature=1.5, seed=20)
    assert [rows[0].token_ids, rows[2].token_ids] == [alone[0][0], alone[2][0]]


@sequences
def prompts(tested: MatrixEngine, engines: EngineMatrix) -> None:
    """Log probabilities of a prompt, and embeddings, are those of the logits and hidden states."""
    asked = Asked(golden_ids()[0].tolist(), 2)
    handle = asked.submit(tested.engine, prompt_logprobs=2)
    found = handle.result(SECONDS).prompt_logprobs
    expected = golden_logits(tested.kind)[0].log_softmax(-1)
    assert found is not None
    assert found[0].logprob is None
    for at, one in enumerate(found[1:], start=1):
        given = expected[at - 1, asked.prompt[at]]
        assert_near(torch.tensor(one.logprob), given, tested, f"token {at}")
    assert what(handle.result()) == tested.answer(asked)
    embedded = tested.engine.embed([list(asked.prompt), list(asked.prompt[:9])], normalize=False)
    single = tested.engine.embed([list(asked.prompt[:9])], normalize=False)
    assert torch.equal(embedded[1:], single)


@sequences
def saved(tested: MatrixEngine, engines: EngineMatrix) -> None:
    """A prompt that is saved, forgotten and loaded again is gone on from with the bits of an empty cache."""
    prompt = words(16, 69)
    longer = Asked([*prompt, *words(17, 9)], 4)
    expected = tested.answer(longer), tested.answer(Asked(prompt, 4, DRAWN))
    tested.forget()
    file = engines.folder / f"{tested.kind}-{tested.graph}.cache"
    sure = len(prompt) // CHUNK * CHUNK
    assert tested.engine.save_cache(prompt, file) >= sure
    tested.forget()
    assert tested.engine.load_cache(file) >= sure
    handle = longer.submit(tested.engine)
    assert what(handle.result(SECONDS)) == expected[0]
    assert handle.cached >= sure
    tested.forget()
    running = Asked(words(18, 20), 10)
    handle = running.submit(tested.engine)
    tested.engine.load_cache(file)
    assert what(Asked(prompt, 4, DRAWN).submit(tested.engine).result(SECONDS)) == expected[1]
    assert what(handle.result(SECONDS)) == tested.answer(running)
    tested.check_idle()


MIXTURES = ("mixture", "scored", "latent", "beside")


@sequences
def streamed(tested: MatrixEngine, engines: EngineMatrix) -> None:
    """Weights that move give the bits of weights in place: the same engine, resident, is asked the same."""
    if tested.graph != "streamed":
        return
    resident = engines(tested.kind, "captured")
    assert tested.engine.plan.groups.streamed_nbytes > 0
    assert tested.alone == resident.alone
    ids = golden_ids()
    for by_token in (False, True):
        assert torch.equal(tested.engine.logits(ids, by_token=by_token), resident.engine.logits(ids, by_token=by_token))
    found, expected = (each.engine.logits(ids, output_hidden_states=True)[1] for each in (tested, resident))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    if tested.kind not in MIXTURES:  # whose experts are fetched as they are chosen
        before, passes = tested.engine.loaded.weight_stream.totals.now().nbytes, 12
        tested.engine.generate([words(19, 3)], passes, ignore_eos=True)
        read = tested.engine.loaded.weight_stream.totals.now().nbytes - before
        streamed = tested.engine.plan.groups.streamed_nbytes
        assert streamed * (passes - 1) <= read <= streamed * (passes + 2), "a group is read once for each pass"


@sequences
def planned(tested: MatrixEngine, engines: EngineMatrix) -> None:
    """The plan counts the bytes that are allocated, and streamed groups have a slot more than the one that computes."""
    plan, builder = tested.engine.plan, tested.engine.runner.builder  # type: ignore[attr-defined]
    caches = list({id(cache): cache for cache in builder.caches}.values())
    tables = {id(cache.table): cache.table for cache in caches if isinstance(cache, KVCache)}
    buffers = [*tables.values(), *(one for cache in caches for one in cache.tensors)]
    in_files = sum(one.nbytes for one in buffers if is_of_file(one))
    assert sum(one.nbytes for one in buffers) == plan.kv_nbytes + in_files
    assert in_files == (0 if plan.offloaded_kv is None else plan.offloaded_kv.nbytes)
    assert (in_files > 0) == (tested.graph == "streamed")
    weights = {one.data_ptr(): one.nbytes for one in builder.decoder.buffers() if one.numel()}
    if tested.graph != "streamed":
        assert 0 <= plan.weight_nbytes - sum(weights.values()) < 0.1 * plan.weight_nbytes  # places are aligned
    else:
        assert plan.groups.num_slots == 2
        assert plan.weight_nbytes < engines(tested.kind, "captured").engine.plan.weight_nbytes


DRAFTS = {"lookup": ("speculation=lookup",), "self": ("speculation=self", "speculation.draft_format=q4_0")}


def drafts(way: str, tested: MatrixEngine, engines: EngineMatrix) -> None:
    """Answers with draft tokens, of which some are wrong, are those without; so are those that go on from them."""
    if tested.graph == "eager":
        return  # drafts need native programs; test_speculation.py has the error
    known = KnownAnswers()
    settings = *DRAFTS[way], "speculation.num_speculative_tokens=5"
    with replaced(LookupSpeculation, "of", known._lookup_of), replaced(SelfSpeculation, "of", known._self_of):
        if way == "self" and tested.graph == "streamed" and tested.kind in MIXTURES:
            with pytest.raises(PlanError, match="while experts stream"):
                engines(tested.kind, tested.graph, *settings)
            return
        drafting = engines(tested.kind, tested.graph, *settings)
    asked, expected = REQUESTS, tested.alone
    known.answers.update({tuple(one.prompt): answer[0] for one, answer in zip(asked, expected, strict=True)})
    handles = submit_staggered(
        drafting.engine, [partial(one.submit, drafting.engine) for one in asked], random.Random(2)
    )
    for one, handle, answer in zip(asked, handles, expected, strict=True):
        assert what(handle.result(SECONDS)) == answer, f"{len(one.prompt)} tokens, {one.settings}"
    totals = drafting.engine.totals
    if way == "lookup" or not any("drafts nothing" in note for note in drafting.engine.notes):
        assert 10 < totals.accepted_tokens < totals.draft_tokens - 10
    longer = Asked([*asked[4].prompt, 5], 4)
    handle = longer.submit(drafting.engine)
    assert what(handle.result(SECONDS)) == tested.answer(longer), "behind a prompt that was drafted for"
    drafting.check_idle()


PROPERTIES["drafts_lookup"] = partial(drafts, "lookup")
PROPERTIES["drafts_self"] = partial(drafts, "self")


IN_EVERY_WAY = ("golden", "streamed", "planned")


def quick_ways(name: str, kind: str) -> list[str]:
    """Return how a property runs first: captured, and streamed or eager in turn, so that each two of all three meet."""
    at = [*PROPERTIES].index(name) + [*KINDS].index(kind)
    return [*GRAPHS] if name in IN_EVERY_WAY else ["captured", ("streamed", "eager")[at % 2]]


def check(name: str, kind: str, graphs: Iterable[str], engines: EngineMatrix) -> None:
    for graph in graphs:
        try:
            PROPERTIES[name](engines(kind, graph), engines)
        except BaseException as error:
            error.add_note(f"{name} of {kind} blocks, {graph}: {PROPERTIES[name].__doc__}")
            raise


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PROPERTIES)
def test_sequences(name: str, kind: str, engines: EngineMatrix) -> None:
    check(name, kind, quick_ways(name, kind), engines)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in PROPERTIES if name not in IN_EVERY_WAY])
def test_sequences_in_the_third_way(name: str, kind: str, engines: EngineMatrix) -> None:
    check(name, kind, [graph for graph in GRAPHS if graph not in quick_ways(name, kind)], engines)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_golden_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    folder = write_checkpoint(kind, tmp_path)
    found = logits_of_transformers(kind, folder, golden_ids())
    assert (found - golden_logits(kind)).abs().max() < 1e-5
    about = recorded()[0]["models"][kind]
    described = describe(kind)
    assert {name: tuple(rule) for name, rule in about["tensors"].items()} == described["tensors"]
