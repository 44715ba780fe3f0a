"""Ranks compare what their results depend on before they read weights."""

import pytest

from graphcore.errors import ParallelError
from graphcore.parallel.handshake import FILE, KERNELS, PROCESSOR, compare_ranks, refuse_any

FACTS = {"graphcore": "1.0", "files": "abc", "dtype": "torch.bfloat16", KERNELS: "0123", PROCESSOR: "x86-64-v4"}


def test_equal_ranks_have_nothing_to_say() -> None:
    assert compare_ranks([FACTS, FACTS, dict(FACTS)]) == ()


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("graphcore", "install the same version on all machines"),
        ("files", "copy the same model to all machines"),
        ("dtype", "start all ranks with the same settings"),
        (KERNELS, "install graphcore from the same wheel on all machines"),
    ],
)
def test_a_difference_names_the_rank_and_what_to_do(name: str, advice: str) -> None:
    other = {**FACTS, name: "another"}
    with pytest.raises(ParallelError, match=f"rank 2 has other {name} than rank 0: another, not .*; {advice}"):
        compare_ranks([FACTS, FACTS, other])


def test_a_fact_that_only_one_rank_has_is_a_difference() -> None:
    with pytest.raises(ParallelError, match="rank 1 has other context_length than rank 0: 512, not nothing"):
        compare_ranks([FACTS, {**FACTS, "context_length": "512"}])


def test_a_file_is_compared_on_the_ranks_that_have_it() -> None:
    first, second = f"{FILE}1.gguf", f"{FILE}2.gguf"
    assert compare_ranks([{**FACTS, first: "a"}, {**FACTS, second: "b"}, {**FACTS, first: "a", second: "b"}]) == ()
    with pytest.raises(
        ParallelError, match=r"rank 2 has other files than rank 1: 2\.gguf differs; copy the same model"
    ):
        compare_ranks([{**FACTS, first: "a"}, {**FACTS, second: "b"}, {**FACTS, first: "a", second: "c"}])


def test_another_instruction_set_is_a_note_and_has_other_kernels() -> None:
    (note,) = compare_ranks([FACTS, {**FACTS, PROCESSOR: "x86-64-v3", KERNELS: "4567"}, FACTS])
    sets = "x86-64-v4 on ranks 0 and 2, x86-64-v3 on rank 1"
    assert note.startswith(f"ranks have different processors ({sets}): results have other last bits")


def test_the_error_of_another_rank_is_raised_and_one_s_own_is_not() -> None:
    refuse_any([None, None], 0)
    refuse_any([None, "no such file"], 1)
    with pytest.raises(ParallelError, match="rank 1 cannot run its share: no such file"):
        refuse_any([None, "no such file"], 0)
