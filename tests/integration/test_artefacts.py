"""A model whose compiled blocks are packages, cached or exported, computes what torch.compile makes of it, to the bit.

Packages take a minute to compile, so a worker exports the model of two dense layers once; other kinds are slow.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from support.golden_models import KINDS, write_checkpoint

from graphcore import Engine
from graphcore.device import find_cpp_compiler
from graphcore.engine.loading import decoder_loader
from graphcore.errors import ConfigError
from graphcore.graph.artefacts import CachedPackages
from graphcore.graph.compile import JustInTime
from graphcore.nn.norm import RMSNorm
from graphcore.nn.spec import NormSpec
from graphcore.tasks.commands.export import write_artefacts

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not find_cpp_compiler(), reason="graph=compiled needs a C++ compiler"),
]

PROMPTS = [[5], [1, 2, 3], list(range(1, 50)), list(range(50, 10, -1))]  # the third takes more than a chunk
WITHOUT_COMPILER = """
import hashlib, json, sys
from graphcore import Engine
folder, artefacts, settings, prompts = sys.argv[1], sys.argv[2], *map(json.loads, sys.argv[3:])
settings.append("graph.artefacts=" + artefacts)
with Engine.load(folder, device="cpu", graph="compiled", overrides=settings) as engine:
    hashes = [hashlib.sha256(engine.logits([one]).numpy().tobytes()).hexdigest() for one in prompts]
    tokens = [engine.generate([one], 6)[0].token_ids for one in prompts]
print(json.dumps([hashes, tokens, [name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules]]))
"""


def settings_of(*more: str) -> list[str]:
    return ["context_length=96", "prefill_chunk=32", "threads=1", *more]


def load(model: Path, *more: str) -> Engine:
    return Engine.load(model, device="cpu", graph="compiled", overrides=settings_of(*more))


def load_just_in_time(model: Path, *more: str) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder_loader, "CachedPackages", JustInTime)
        return load(model, *more)


def answers(engine: Engine) -> list[list[object]]:
    """Return hashes of the logits of all prompts, and the tokens that follow."""
    hashes = [sha256(engine.logits([one]).numpy().tobytes()).hexdigest() for one in PROMPTS]
    return [hashes, [list(engine.generate([one], 6)[0].token_ids) for one in PROMPTS]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("dense", tmp_path_factory.mktemp("models") / "dense")


@pytest.fixture(scope="module")
def exported(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[list[object]]]]:
    """Return a folder of artefacts, and what torch.compile makes of the model."""
    folder = tmp_path_factory.mktemp("artefacts")
    with load_just_in_time(model) as engine:
        with engine.while_idle():
            write_artefacts(engine, folder)
        yield folder, answers(engine)


def test_cached_packages_compute_the_same_bits(model: Path, exported: tuple[Path, list[list[object]]]) -> None:
    with load(model) as engine:
        assert answers(engine) == exported[1]


def test_a_package_is_compiled_again_only_for_other_constants_or_where_it_is_damaged(tmp_path: Path) -> None:
    names: list[str] = []
    norm, x = RMSNorm(NormSpec("rms", 1e-6), 16), torch.linspace(-1, 1, 32).reshape(2, 16)
    norm.weight.fill_(1.5)

    def run(name: str) -> torch.Tensor:
        made = CachedPackages(tmp_path, names.append)(RMSNorm.forward, name, norm, (x,))
        assert torch.allclose(made(norm, x), norm(x), rtol=1e-6)
        return made(norm, x)

    with torch.inference_mode():
        first = run("first")
        assert torch.equal(run("cached"), first)
        norm.eps = 0.5
        assert not torch.allclose(run("another constant"), first)
        for path in (tmp_path / "packages").glob("*.pt2"):
            path.write_bytes(path.read_bytes()[:1000])
        run("damaged")
    assert names == ["first", "another constant", "damaged"]


def test_a_process_without_a_compiler_computes_the_same_bits(
    model: Path, exported: tuple[Path, list[list[object]]], tmp_path: Path
) -> None:
    """Nor does it import Inductor; the folder has been moved, and brings the C++ kernels along."""
    folder, expected = exported
    moved = shutil.copytree(folder, tmp_path / "moved")
    environment = {**os.environ, "PATH": str(tmp_path), "CXX": str(tmp_path / "none")}
    given = json.dumps(settings_of(f"cache_dir={tmp_path}")), json.dumps(PROMPTS)
    command = [sys.executable, "-c", WITHOUT_COMPILER, str(model), str(moved), *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [*expected, []]


def test_streamed_weights_run_in_the_same_packages(model: Path, exported: tuple[Path, list[list[object]]]) -> None:
    folder, expected = exported
    with (
        torch.compiler.set_stance("fail_on_recompile"),
        load(model, f"graph.artefacts={folder}", "streaming=on") as one,
    ):
        assert one.plan.is_streaming
        assert answers(one) == expected


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("dtype=bf16", "dtype=fp32, and here it is bf16; set dtype=fp32"),
        ("kv_dtype=bf16", "kv_dtype=float32, and here it is bfloat16"),
        ("quant=q8_0", "use the model, quant and adapters of the export"),
        ("model.num_hidden_layers=1", "use the model, quant and adapters of the export"),
        ("threads=2", "threads=1, and here it is 2; set threads=1"),
        ("batch_size=2", r"has no block0_decode_2 \(it has .*\); use the batch_size of the export \(1\)"),
    ],
)
def test_another_run_is_refused_by_name(
    model: Path, exported: tuple[Path, list[list[object]]], setting: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        load(model, f"graph.artefacts={exported[0]}", setting)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dense"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_kind_of_block_computes_the_same_bits(kind: str, dtype: str, tmp_path: Path) -> None:
    folder, sizes = write_checkpoint(kind, tmp_path / kind), (f"dtype={dtype}", "batch_size=2")
    with load_just_in_time(folder, *sizes) as engine:
        with engine.while_idle():
            write_artefacts(engine, tmp_path)
        together = [one.token_ids for one in engine.generate(PROMPTS[1:3], 6)]
        expected = answers(engine)
    with torch.compiler.set_stance("fail_on_recompile"), load(folder, f"graph.artefacts={tmp_path}", *sizes) as loaded:
        assert answers(loaded) == expected
        assert [one.token_ids for one in loaded.generate(PROMPTS[1:3], 6)] == together
