"""Copies of beginnings of prompts: only what has a prompt's bits and is there whole, and all of it comes back."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_prefix_cache import CHUNK, CONTEXT, MODELS, PAGE, SNAPSHOTS, Caches, words

from graphcore.kvcache.chunks import Chunks
from graphcore.kvcache.prefix_snapshot import PrefixSnapshots, SnapshotShape


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def copies_of(caches: Caches) -> PrefixSnapshots:
    return PrefixSnapshots(caches.pages, caches.tree, Chunks(CHUNK, 1), CONTEXT)


@pytest.mark.parametrize("length", [2 * CHUNK, 3 * CHUNK])
@pytest.mark.parametrize("name", MODELS)
def test_a_copy_serves_prompts_of_other_caches_and_takes_no_page_for_itself(name: str, length: int) -> None:
    saved, loaded = Caches(name), Caches(name)
    for end in range(CHUNK, length + 1, CHUNK):
        saved.keep(words(end), 100.0)
    copy = copies_of(saved).copy_out(words(length))
    assert copy is not None
    assert len(copy.shape.positions) == (SNAPSHOTS if saved.pages.has_states else 0)
    assert copies_of(loaded).is_possible(copy.shape)
    assert copies_of(loaded).copy_in(copy)
    assert copies_of(loaded).copy_in(copy)  # again: what is there stays
    loaded.check_counts()
    found = loaded.tree.find([*words(length), 9], reuse_cache=False)
    assert (found.length, found.is_bit_exact) == (length, True)
    for table in loaded.pages.tables:
        if not table.is_ring:  # the last page is evicted first
            assert [*table.idle] == [node.pages[0] for node in reversed(found.path)]
    assert loaded.tree.attach(0, found)
    for of_layer in loaded.holds(0, length):
        first = length - len(of_layer)
        assert of_layer in ([100.0 + at for at in range(first, length)], [100.0 + length])
    loaded.pages.free(0)
    assert loaded.is_all_free()


def test_a_copy_that_finds_no_room_leaves_nothing() -> None:
    saved, full = Caches(), Caches(tokens=CONTEXT)
    saved.keep(words(24), 100.0)
    copy = copies_of(saved).copy_out(words(24))
    assert copy is not None
    assert full.write(0, 0, 48, 200.0)
    assert not copies_of(full).copy_in(copy)
    full.check_counts()
    assert not full.tree.path(words(24))


@pytest.mark.parametrize("name", MODELS)
def test_an_error_while_a_copy_is_put_back_loses_no_page_and_keeps_no_state(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, loaded = Caches(name), Caches(name)
    saved.keep(words(2 * CHUNK), 100.0)
    copy = copies_of(saved).copy_out(words(2 * CHUNK))
    assert copy is not None

    def fail(*_: object) -> None:
        raise MemoryError

    for owner, method in (*((table, "put") for table in loaded.pages.tables), (loaded.pages, "put_states")):
        if method == "put_states" and not loaded.pages.has_states:
            continue
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, fail)
            with pytest.raises(MemoryError):
                copies_of(loaded).copy_in(copy)
        loaded.check_counts()
        assert loaded.tree.find([*words(2 * CHUNK), 9], reuse_cache=True).length == 0
        assert loaded.is_all_free()
    assert copies_of(loaded).copy_in(copy)


def test_a_copy_has_nothing_of_the_prompt_that_had_its_last_page_before() -> None:
    saved = Caches()
    for table in saved.pages.tables:
        for cache in table.caches:
            cache.k.fill_(7)
            cache.v.fill_(7)
    saved.keep(words(CHUNK + 1), 100.0)
    copy = copies_of(saved).copy_out(words(CHUNK + 1))
    assert copy is not None
    for tensor in (each for part in copy.parts for each in part):
        assert (tensor[:-1] != 0).all()
        assert (tensor[-1, :, 0] == 100.0 + CHUNK).all()
        assert (tensor[-1, :, 1:] == 0).all()


@pytest.mark.parametrize("name", ["full", "states"])
def test_what_an_answer_has_made_is_not_copied(name: str) -> None:
    caches = Caches(name)
    caches.keep(words(16), 100.0, is_bit_exact=False)
    assert copies_of(caches).copy_out(words(16)) is None
    caches.keep(words(16), 200.0)
    assert copies_of(caches).copy_out(words(16)) is not None


def test_states_of_an_answer_are_not_copied_beside_pages_of_a_prompt() -> None:
    caches = Caches("states")
    assert caches.write(0, 0, 16, 100.0)
    caches.tree.keep(0, words(16), is_bit_exact=True, save_states=False)
    caches.tree.keep(0, words(16), is_bit_exact=False, save_states=True)
    assert all(node.is_bit_exact for node in caches.tree.path(words(16)))
    assert copies_of(caches).copy_out(words(16)) is None


@pytest.mark.parametrize("name", ["ring", "both", "full"])
def test_what_has_lost_a_page_that_is_needed_is_not_copied(name: str) -> None:
    caches = Caches(name)
    caches.keep(words(24), 100.0)
    path, tables = caches.tree.path(words(24)), caches.pages.tables
    ring = next((index for index, table in enumerate(tables) if table.is_ring), 0)
    last = tables[ring].first_seen(24) if tables[ring].is_ring else 0
    page = path[last].pages[ring]
    assert page is not None
    assert copies_of(caches).copy_out(words(24)) is not None
    caches.tree._put_page(path[last], ring, None)
    path[last].pages[ring] = None
    assert copies_of(caches).copy_out(words(24)) is None


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("full", SnapshotShape(0, (0,), ())),
        ("full", SnapshotShape(CONTEXT + 1, (0,), ())),
        ("full", SnapshotShape(8, (), ())),
        ("full", SnapshotShape(8, (1,), ())),
        ("full", SnapshotShape(8, (-1,), ())),
        ("full", SnapshotShape(8, (0,), (8,))),
        ("ring", SnapshotShape(CONTEXT, (0,), ())),
        ("states", SnapshotShape(16, (0,), ())),
        ("states", SnapshotShape(16, (0,), (8,))),
        ("states", SnapshotShape(16, (0,), (16, 8))),
        ("states", SnapshotShape(16, (0,), (8, 8, 16))),
        ("states", SnapshotShape(16, (0,), (4, 16))),
        ("states", SnapshotShape(16, (0,), (-8, 16))),
        ("states", SnapshotShape(12, (0,), (8, 12))),
    ],
)
def test_a_shape_that_no_copy_has_is_impossible(name: str, shape: Any) -> None:
    copies = copies_of(Caches(name))
    assert not copies.is_possible(shape)
    first = CONTEXT // PAGE - copies._pages.tables[0].reach
    usual = {"full": (16, 0, ()), "ring": (CONTEXT, first, ()), "states": (16, 0, (8, 16))}[name]
    assert copies.is_possible(SnapshotShape(usual[0], (usual[1],), usual[2]))
