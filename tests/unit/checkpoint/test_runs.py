"""Spans merge into runs in the orders that published files have."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from graphcore.checkpoint.open_checkpoint import open_checkpoint
from graphcore.checkpoint.runs import runs_of
from graphcore.checkpoint.span import Span

ONE, TWO = Path("one.safetensors"), Path("two.safetensors")


def stored_layers(sizes: Sequence[tuple[int, int]]) -> dict[int, list[Span]]:
    """Return each layer's spans in a file that has (layer, nbytes) one after the other from byte 88 on."""
    layers: dict[int, list[Span]] = {}
    offset = 88
    for layer, nbytes in sizes:
        layers.setdefault(layer, []).append(Span(ONE, offset, nbytes))
        offset += nbytes
    return layers


def test_spans_that_touch_become_one_whatever_their_order() -> None:
    assert runs_of([Span(ONE, 30, 5), Span(ONE, 10, 10), Span(ONE, 20, 10)]) == (Span(ONE, 10, 25),)


def test_a_gap_of_one_byte_parts_two_runs() -> None:
    assert runs_of([Span(ONE, 0, 9), Span(ONE, 10, 2)]) == (Span(ONE, 0, 9), Span(ONE, 10, 2))


def test_nothing_and_empty_spans_are_no_runs() -> None:
    assert runs_of([]) == runs_of([Span(ONE, 8, 0)]) == ()
    assert runs_of([Span(ONE, 0, 4), Span(ONE, 6, 0), Span(ONE, 8, 4)]) == (Span(ONE, 0, 4), Span(ONE, 8, 4))


def test_a_layer_sorted_by_dtype_is_one_run_for_each_dtype() -> None:
    """Files as gpt-oss has them: first all layers' bfloat16, then all layers' bytes."""
    order = [(layer, nbytes) for nbytes in (24, 4096) for layer in (0, 1, 2) for _ in range(3)]
    assert runs_of(stored_layers(order)[1]) == (Span(ONE, 88 + 72, 72), Span(ONE, 88 + 216 + 3 * 4096, 3 * 4096))


def test_layers_in_the_order_of_their_names_are_runs_where_they_stand() -> None:
    order = sorted(range(12), key=str)
    assert order[:4] == [0, 1, 10, 11]
    layers = stored_layers([(layer, 40) for layer in order for _ in range(2)])
    assert runs_of(layers[0] + layers[1]) == (Span(ONE, 88, 160),)
    assert runs_of(layers[1] + layers[2]) == (Span(ONE, 88 + 80, 80), Span(ONE, 88 + 320, 80))


def test_a_layer_across_two_shards_is_a_run_in_each() -> None:
    spans = [Span(TWO, 40, 8), Span(ONE, 992, 8), Span(ONE, 984, 8), Span(TWO, 48, 16)]
    assert runs_of(spans) == (Span(ONE, 984, 16), Span(TWO, 40, 24))


def test_the_same_offsets_in_two_files_do_not_touch() -> None:
    assert runs_of([Span(ONE, 0, 8), Span(TWO, 8, 8)]) == (Span(ONE, 0, 8), Span(TWO, 8, 8))


def test_offsets_that_are_multiples_of_8_only_stay_as_they_are() -> None:
    assert runs_of([Span(ONE, 4104, 24), Span(ONE, 4136, 8)]) == (Span(ONE, 4104, 24), Span(ONE, 4136, 8))


def test_spans_that_several_weights_share_come_once() -> None:
    """q, k and v out of one fused tensor; a part of it; a span that ends inside a longer one before it."""
    fused = Span(ONE, 100, 300)
    assert runs_of([fused, fused, fused, Span(ONE, 200, 50), Span(ONE, 350, 100)]) == (Span(ONE, 100, 350),)


def test_the_runs_of_a_files_tensors_are_all_of_it_but_the_header(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    tensors = {
        f"layers.{index}.{kind}": torch.ones(index + 1, dtype=kind_of)
        for index in range(12)
        for kind, kind_of in (("w", torch.bfloat16), ("b", torch.float32))
    }
    save_file(tensors, path)
    checkpoint = open_checkpoint(path)
    (run,) = runs_of(span for name in checkpoint.tensors for span in checkpoint.spans(name))
    header = int.from_bytes(path.read_bytes()[:8], "little")
    assert run == Span(path, 8 + header, path.stat().st_size - 8 - header)
