"""The type table against gguf's table, ggml's published sizes, and the ids that collide."""

import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from support.cases import in_case

from graphcore.checkpoint.gguf_checkpoint import GGML_TYPES, UNREAD_TYPE_NAMES
from graphcore.quant.registry import ENCODINGS

# Not in the gguf package: q2_0 from ggml 0.25's ggml_blck_size and ggml_type_size, i2_s from BitNet's fork.
NOT_IN_GGUF = {42: ("q2_0", 64, 18), 36: ("i2_s", 128, 32)}


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    for kind in GGML_TYPES.values():
        with in_case(kind):
            if kind.ggml_id in NOT_IN_GGUF:
                assert (kind.name, kind.block_elements, kind.block_nbytes) == NOT_IN_GGUF[kind.ggml_id]
            else:
                theirs = GGMLQuantizationType(kind.ggml_id)
                assert kind.name == theirs.name.lower()
                assert (kind.block_elements, kind.block_nbytes) == GGML_QUANT_SIZES[theirs]


def test_every_type_of_the_gguf_package_is_read_or_refused_by_name():
    for theirs in GGMLQuantizationType:
        assert theirs.value in GGML_TYPES or UNREAD_TYPE_NAMES[theirs.value].startswith(theirs.name.lower())
    assert not GGML_TYPES.keys() & UNREAD_TYPE_NAMES.keys()
    assert len(GGML_TYPES) == sum(one.ggml_id is not None for one in ENCODINGS.values())


def test_the_table_cannot_be_changed():
    with pytest.raises(TypeError):
        GGML_TYPES[99] = ENCODINGS["f32"]


def test_i2_s_has_one_scale_per_tensor_and_blocks_that_cross_rows():
    # A quarter of the elements, then 32 bytes: the golden i2_s arrays are [48, 256] -> 3104 and [20, 384] -> 1952.
    assert ENCODINGS["i2_s"].nbytes((48, 256)) == 3104
    assert ENCODINGS["i2_s"].nbytes((20, 384)) == 1952
    assert ENCODINGS["i2_s"].divides((8, 80))
    assert not ENCODINGS["i2_s"].divides((1, 80))


def test_block_rows_must_be_whole():
    assert ENCODINGS["q4_k"].divides((3, 512))
    assert not ENCODINGS["q4_k"].divides((512, 3))
    assert ENCODINGS["q4_k"].nbytes((3, 512)) == 3 * 2 * 144
    assert ENCODINGS["f32"].nbytes(()) == 4
