"""Locking memory where it lies: by whole pages, all of it or none, within what the machine allows."""

from dataclasses import dataclass, field
from itertools import pairwise

import torch

from graphcore.host_pages import shared_pages
from graphcore.streaming.pinned_memory import Pins, page_runs, pages_apart, spread

PAGE = 4096


@dataclass
class Driver:
    """Locks pages up to a quota, and no page twice."""

    quota: int = 1 << 30
    shift: int = 0
    locked: dict[int, int] = field(default_factory=dict)

    def register(self, address: int, nbytes: int) -> str:
        pages = {page for start, size in self.locked.items() for page in range(start // PAGE, (start + size) // PAGE)}
        assert address % PAGE == nbytes % PAGE == 0
        assert not pages & set(range(address // PAGE, (address + nbytes) // PAGE)), "already locked"
        if sum(self.locked.values()) + nbytes > self.quota:
            return "out of memory"
        self.locked[address] = nbytes
        return ""

    def unregister(self, address: int) -> None:
        del self.locked[address]

    def device_address(self, address: int) -> int | None:
        found = any(start <= address < start + size for start, size in self.locked.items())
        return address + self.shift if found else None


def test_every_byte_is_locked_and_no_page_twice() -> None:
    """Rows of one table, tensors that share a page, and tensors that lie inside others, as a store has them."""
    table = shared_pages(10 * PAGE)
    tensors = [table[: 5 * PAGE + 100], table[5 * PAGE + 100 :], table[300:400], shared_pages(3 * PAGE)]
    tensors += [torch.zeros(5, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8), torch.zeros(7)]
    driver = Driver()
    pins = Pins(driver)
    assert pins.add(tensors) == ""
    for tensor in tensors:
        first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        assert any(start <= first and last <= start + size for start, size in driver.locked.items()) or first == last
    assert sum(driver.locked.values()) <= 10 * PAGE + 3 * PAGE + 4 * PAGE
    pins.close()
    assert driver.locked == {}


def test_memory_that_shares_a_page_is_one_run_and_other_memory_is_not() -> None:
    whole = shared_pages(8 * PAGE)
    start = whole.data_ptr()
    parts = [whole[10:20], whole[PAGE - 1 : PAGE + 1], whole[3 * PAGE : 4 * PAGE], whole[4 * PAGE : 4 * PAGE + 1]]
    assert page_runs(parts, PAGE) == [
        (start, 2 * PAGE),
        (start + 3 * PAGE, PAGE),
        (start + 4 * PAGE, PAGE),
    ]


def test_what_does_not_fit_leaves_nothing_locked_and_says_why() -> None:
    driver = Driver(quota=5 * PAGE)
    pins = Pins(driver)
    assert pins.add([shared_pages(2 * PAGE)]) == ""
    before = dict(driver.locked)
    assert pins.add([shared_pages(2 * PAGE), shared_pages(2 * PAGE)]) == "out of memory"
    assert driver.locked == before
    assert pins.add([shared_pages(3 * PAGE)]) == ""


def store_of(sizes: list[int]) -> dict[int, torch.Tensor]:
    return {group: shared_pages(pages * PAGE) for group, pages in enumerate(sizes, start=1)}


def test_all_of_a_store_that_may_be_locked_is_and_its_ring_is_not() -> None:
    driver, store, ring = Driver(), store_of([3, 3, 3]), shared_pages(2 * PAGE)
    pins = Pins(driver)
    locked = pins.add_most(store, ring)
    assert (locked.keys, locked.is_ring, locked.obstacle) == ({1, 2, 3}, False, "")
    assert set(driver.locked) == {one.data_ptr() for one in store.values()}
    assert len(pins.held) == 3
    pins.close()
    assert driver.locked == {}


def test_a_quota_locks_the_ring_and_whole_groups_spread_over_the_order_and_leaves_some() -> None:
    """Eight groups of four pages, two for the ring, and room for five groups: four are locked."""
    driver, store, ring = Driver(quota=(2 + 5 * 4 + 1) * PAGE), store_of([4] * 8), shared_pages(2 * PAGE)
    pins = Pins(driver)
    locked = pins.add_most(store, ring)
    assert (locked.keys, locked.is_ring, locked.obstacle) == ({1, 3, 5, 7}, True, "out of memory")
    assert set(driver.locked) == {ring.data_ptr(), *(store[group].data_ptr() for group in locked.keys)}
    assert sum(driver.locked.values()) <= driver.quota - 4 * PAGE
    assert sorted(one.data_ptr() for one in pins.held) == sorted(driver.locked)
    pins.close()
    assert driver.locked == {}


def test_a_quota_below_every_group_locks_the_ring_alone_and_one_below_that_nothing() -> None:
    for pages, is_ring in ((3, True), (1, False)):
        driver, ring = Driver(quota=pages * PAGE), shared_pages(2 * PAGE)
        locked = Pins(driver).add_most(store_of([4, 4]), ring)
        assert (locked.keys, locked.is_ring, locked.obstacle) == (set(), is_ring, "out of memory")
        assert list(driver.locked) == [ring.data_ptr()] * is_ring


def test_slices_of_one_table_are_locked_together_or_not_at_all() -> None:
    """No copy may start from memory of which a part is locked: a slice's last page is the next one's first."""
    table = shared_pages(8 * PAGE)
    store = {1: shared_pages(PAGE), 2: table[: 3 * PAGE + 64], 3: table[3 * PAGE + 64 :]}
    assert pages_apart(store) == [[1], [2, 3]]
    driver = Driver(quota=5 * PAGE)
    assert Pins(driver).add_most(store, shared_pages(PAGE)).keys == set()
    driver = Driver(quota=10 * PAGE)
    assert Pins(driver).add_most(store, shared_pages(PAGE)).keys == {1, 2, 3}
    assert driver.locked == {store[1].data_ptr(): PAGE, table.data_ptr(): 8 * PAGE}


def test_any_beginning_of_the_order_of_locking_is_spread_evenly() -> None:
    assert [unit[0] for unit in spread([[index] for index in range(8)])] == [0, 4, 2, 6, 1, 5, 3, 7]
    for count in (1, 2, 3, 5, 33):
        order = [unit[0] for unit in spread([[index] for index in range(count)])]
        assert sorted(order) == list(range(count))
        half = sorted(order[: (count + 1) // 2])
        assert all(after - before <= 3 for before, after in pairwise(half))


def test_kernels_read_what_is_locked_where_the_device_sees_it_at_the_same_address() -> None:
    tensor = shared_pages(PAGE)
    for shift, expected in ((0, True), (1 << 40, False)):
        pins = Pins(Driver(shift=shift))
        assert not pins.is_readable_by_kernels(tensor)
        assert pins.add([tensor]) == ""
        assert pins.is_readable_by_kernels(tensor) is expected
