"""The instructions of native programs are the golden ones: what runs, in which order, on which buffers.

python tests/unit/graph/cpu/test_native_lists.py writes them anew.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from support.cases import in_case

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[3])]

import torch
from block_specs import ARCHITECTURES, BLOCKS, PLAIN, WIDE, WIDE_EXPERTS, attending, feeding
from packed_decoder import pack_all
from support.kernel_lists import PROGRAMS, native_list
from test_native_decode import builder_of
from tiny_graph import CONTEXT, FULL, filled_decoder, model_of

from graphcore.activations import Gating
from graphcore.graph.cpu.native_decode import NativeStep
from graphcore.nn.decoder import Decoder
from graphcore.nn.spec import MLPSpec, MoESpec, PerLayerSpec


def dense(name: str) -> Decoder:
    return filled_decoder(WHOLE[name] if name in WHOLE else model_of(ARCHITECTURES.get(name) or BLOCKS[name]))


def packed(name: str) -> Decoder:
    spec, kind, rounding = PACKED[name]
    decoder = pack_all(filled_decoder(spec, torch.bfloat16), kind, rounding)
    for module in decoder.modules():
        if getattr(module, "weight_scale", None) is not None:
            module.weight_scale.fill_(0.75)
    return decoder


TERNARY = feeding(attending(WIDE, sub_norm=WIDE.norm), sub_norm=WIDE.norm)
PACKED = {
    "packed": (model_of(WIDE), "q4_k", "wide"),
    "packed experts": (model_of(WIDE_EXPERTS), "mxfp4", "block"),
    "bitnet divided": (model_of(replace(TERNARY, int8_activations="divided")), "i2_s", "token"),
    "bitnet online": (model_of(replace(TERNARY, int8_activations="online")), "i2_s", "token"),
    "positions": (replace(model_of(WIDE), embedding_scale=5.5, positions=CONTEXT), "q8_0", "float"),
}
OWN = replace(attending(FULL, v_norm_eps=1e-6, values_are_keys=True), has_output_factor=True)
FEATURED = replace(OWN, per_layer=6, per_layer_activation="gelu_pytorch_tanh")
SHARING = attending(FEATURED, v_norm_eps=0.0, values_are_keys=False, shares_cache=True)
PARALLEL = MoESpec(
    6, 3, 24, Gating("gelu_pytorch_tanh"), expert_scales=True, parallel_mlp=MLPSpec(48, "gelu_pytorch_tanh")
)
WHOLE = {  # Gemma 4, whose layers say something of each other
    "gemma4": replace(
        model_of(FEATURED), blocks=(FEATURED, SHARING), per_layer=PerLayerSpec(6, 2, 40, FULL.norm), logit_cap=3.0
    ),
    "gemma4_moe": model_of(replace(OWN, mlp=PARALLEL)),
}
NAMES = [*ARCHITECTURES, *(name for name in BLOCKS if name not in ARCHITECTURES), *PACKED, *WHOLE]


def found_list(name: str) -> str:
    decoder = packed(name) if name in PACKED else dense(name)
    builder = builder_of(decoder.spec, "captured", decoder=decoder)
    return "".join(f"{line}\n" for line in native_list(builder, builder.decode(1, is_greedy=True)))


def golden_lists() -> dict[str, str]:
    parts = PROGRAMS.read_text(encoding="utf-8").split("== ")[1:]
    return dict(part.split("\n", 1) for part in parts)


def test_a_program_is_the_golden_one() -> None:
    for name in NAMES:
        with in_case(name):
            assert found_list(name).splitlines() == golden_lists()[name].splitlines()


def test_features_of_layers_are_made_without_the_host() -> None:
    builder = builder_of(WHOLE["gemma4"], "captured")
    assert [type(step) for step in builder.decode(3, is_greedy=True).steps] == [NativeStep]


def test_there_is_no_golden_program_of_nothing() -> None:
    assert set(golden_lists()) == set(NAMES)


def test_a_change_shows() -> None:
    lines = golden_lists()["llama"].splitlines()
    assert lines != golden_lists()["qwen3"].splitlines()
    assert PLAIN.mlp.activation == "silu"
    assert [line.split()[0] for line in lines] == [
        "embed", *["project", "attend", "project", "project", "project"], "project", "choose", "advance",
    ]  # fmt: skip


def sections() -> Iterator[str]:
    for name in NAMES:
        yield f"== {name}\n{found_list(name)}"


if __name__ == "__main__":
    PROGRAMS.write_text("".join(sections()), encoding="utf-8")
