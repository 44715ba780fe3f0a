"""Sizes in words: the units' powers are those of IEC 80000-13 (GiB) and of the SI (GB)."""

import pytest

from graphcore.config.byte_sizes import (
    both_in_words,
    enough_in_words,
    in_words,
    parse_nbytes,
    part_in_words,
    rate_in_words,
)
from graphcore.errors import ConfigError

SIZES = [
    ("auto", None),
    (0, 0),
    (1024, 1024),
    ("4096", 4096),
    (1e9, 1_000_000_000),
    ("14GiB", 15_032_385_536),
    ("600MB", 600_000_000),
    ("1.5 GB", 1_500_000_000),
    ("1.5gib", 1_610_612_736),
    (".5 KiB", 512),
    ("2.kB", 2000),
    ("0.3GB", 300_000_000),
    ("1TB", 1_000_000_000_000),
    ("1TiB", 1_099_511_627_776),
    ("3B", 3),
    ("1.0001KiB", 1024),
    (" 7 MiB ", 7_340_032),
]


@pytest.mark.parametrize(("written", "nbytes"), SIZES)
def test_a_size_is_its_bytes(written: object, nbytes: int | None) -> None:
    assert parse_nbytes("budget", written) == nbytes


@pytest.mark.parametrize(
    "written",
    ["", "GiB", "-1GB", "1,5GB", "1e3MB", "0x10", "1 2", "half", None, True, False, -3, 1.5, "1.5", float("nan"), [1]],
)
def test_what_is_no_size_is_refused_with_its_key(written: object) -> None:
    with pytest.raises(ConfigError, match=r"^budget=.* is no size; write auto, whole bytes, or a number with a unit"):
        parse_nbytes("budget", written)


@pytest.mark.parametrize("written", ["5G", "5Gb/s", "5 gigabytes", "5PiB", "5m"])
def test_an_unknown_unit_is_named(written: str) -> None:
    with pytest.raises(ConfigError, match=r"budget=5.*(has the unknown unit '\w+'; known: B, kB|is no size)"):
        parse_nbytes("budget", written)


@pytest.mark.parametrize("written", [1, 14, "14", 1023])
def test_a_few_bytes_without_a_unit_are_taken_for_a_forgotten_unit(written: object) -> None:
    with pytest.raises(ConfigError, match=rf"budget={written} would be {written} bytes; write the unit, such as"):
        parse_nbytes("budget", written)


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB"),
        (5120, "5.00 KiB"),
        (346030, "337.9 KiB"),
        (96_700_000, "92.22 MiB"),
        (1 << 30, "1.00 GiB"),
        (11_005_853_696, "10.25 GiB"),
        (3 << 50, "3072.0 TiB"),
    ],
)
def test_a_size_is_shown_in_the_largest_unit_of_which_there_is_one(nbytes: int, shown: str) -> None:
    assert in_words(nbytes) == shown
    assert parse_nbytes("size", shown.replace("bytes", "B")) == pytest.approx(nbytes, rel=5e-3)


def test_a_part_is_shown_in_the_unit_of_the_whole() -> None:
    assert part_in_words(0, 98_000_000) == "0.00/93.46 MiB"
    assert part_in_words(98_000_000, 5_000_000_000) == "0.09/4.66 GiB"
    assert part_in_words(3, 12) == "3/12 bytes"


@pytest.mark.parametrize(
    ("rate", "shown"),
    [
        (900, "900 bytes/s"),
        (35_200, "34.38 KiB/s"),
        (7_150_000, "6.82 MiB/s"),
        (359_240_000, "342.6 MiB/s"),
        (1_310_000_000, "1.22 GiB/s"),
        (0, "0 bytes/s"),
    ],
)
def test_a_rate_is_shown_in_the_units_of_sizes(rate: float, shown: str) -> None:
    assert rate_in_words(rate) == shown


def test_sizes_that_read_the_same_are_told_apart_by_the_byte() -> None:
    assert both_in_words(3 * 1024**2, 2 * 1024**2) == ("3.00 MiB", "2.00 MiB")
    assert both_in_words(268_854_886, 268_854_885) == ("268854886 bytes", "268854885 bytes")


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [
        (1000, "1000 bytes"),
        (1024**3, "1.00 GiB"),
        (1024**3 + 1, "1.01 GiB"),
        (127_024_496_640, "118.31 GiB"),  # 118.3008 GiB
    ],
)
def test_a_size_that_is_enough_is_rounded_up(nbytes: int, words: str) -> None:
    assert enough_in_words(nbytes) == words
    parsed = parse_nbytes("key", words.replace("bytes", "B"))
    assert parsed is not None
    assert parsed >= nbytes
