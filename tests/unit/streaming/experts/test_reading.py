"""One expert made from its own bytes is the expert of the whole weight, from every form of the files."""

from pathlib import Path

import pytest
import torch
from support.files.gpt_oss_files import build, gguf_tensors, pack, save_dense, save_mxfp4, write_gguf
from support.packed_matrices import native_backend

from graphcore.checkpoint.file_bytes import read_span
from graphcore.config.compose import compose_settings
from graphcore.engine.loading.open_model import open_model
from graphcore.engine.loading.prepare_model import match_model
from graphcore.kernels.backend import TorchBackend
from graphcore.streaming.experts import reading as module
from graphcore.streaming.experts.reading import expert_conversions, expert_obstacle
from graphcore.weights.experts import PARTS, expert_linears, expert_weight
from graphcore.weights.packed_weights import PackingPolicy

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
FORMS = ("mxfp4", "dense", "gguf_mxfp4_apart", "gguf_mxfp4_fused", "gguf_f32_apart", "gguf_f32_fused")


def write(folder: Path, form: str) -> Path:
    if form == "mxfp4":
        save_mxfp4(folder, 0, **SIZES)
    elif form == "dense":
        save_dense(folder, 0, torch.bfloat16, **SIZES)
    else:
        model = build(0, **SIZES)
        packed = pack(model, 0) if "mxfp4" in form else {}
        return write_gguf(folder / "model.gguf", model, gguf_tensors(model, packed, form.endswith("fused")))
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keeps", ["kernel", "stored", "unpacked"])
@pytest.mark.parametrize("piece_nbytes", [4 << 20, 1000], ids=["whole", "in_conversions"])
@pytest.mark.parametrize("form", FORMS)
def test_an_expert_from_its_own_bytes_is_that_of_the_whole_weight(
    form: str, piece_nbytes: int, keeps: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole weight's way is compared with transformers in tests/integration/test_gpt_oss.py."""
    monkeypatch.setattr(module, "CONVERSION_NBYTES", piece_nbytes)
    settings = compose_settings([])
    settings.model.checkpoint = str(write(tmp_path, form))
    model = open_model(settings.model, 0, tmp_path, lambda *_: None)
    backend = native_backend() if keeps == "kernel" else TorchBackend()
    decoder, loader = match_model(model, dtype, None if keeps == "unpacked" else PackingPolicy(backend, "float"))
    linears = expert_linears(decoder)
    assert expert_obstacle(loader, linears) == ""
    names = [expert_weight(0, part) for part in PARTS]
    whole = [
        loader.dense(name, dtype) if linears[name].packing is None else loader.packed(name, linears[name].packing)
        for name in names
    ]
    for expert in (0, 3, 5):
        outs = {name: torch.full_like(one[expert], 77) for name, one in zip(names, whole, strict=True)}
        conversions = expert_conversions(
            loader, expert, {name: (linears[name].packing, out) for name, out in outs.items()}
        )
        read = [span for conversion in conversions for span in conversion.spans]
        for conversion in reversed(conversions):
            conversion.write(
                [read_span(span, loader.checkpoint.files[span.file], conversion.weight) for span in conversion.spans], 1
            )
        assert all(torch.equal(out, one[expert]) for out, one in zip(outs.values(), whole, strict=True))
        stored = {loader.sources[name].name for name in names}
        nbytes = sum(loader.checkpoint.tensors[name].nbytes for name in stored) // 6
        assert sum(span.nbytes for span in read) == nbytes  # each byte once, though gate and up share rows
        assert piece_nbytes > 1000 or len(conversions) > 3


def test_experts_that_are_packed_at_load_cannot_be_read_one_by_one(tmp_path: Path) -> None:
    settings = compose_settings([])
    settings.model.checkpoint = str(write(tmp_path, "dense"))
    model = open_model(settings.model, 0, tmp_path, lambda *_: None)
    decoder, loader = match_model(model, torch.float32, PackingPolicy(TorchBackend(), "float", "q8_0"))
    linears = expert_linears(decoder)
    assert "experts.gate_up_proj' (bf16) cannot be read one by one" in expert_obstacle(loader, linears)
