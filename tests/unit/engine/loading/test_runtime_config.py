"""What settings come to on a machine and for a model: device, dtype, graph kind, context, and the refusals."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graphcore.arch.checkpoint_config import stored_dtype
from graphcore.arch.config_from_json import parse_model_config
from graphcore.arch.random_checkpoint import RandomCheckpoint
from graphcore.arch.registry import architecture_of
from graphcore.build_folder import temporary_folder
from graphcore.compiler import Compiler
from graphcore.config.compose import compose_settings
from graphcore.engine.loading.open_model import Model, open_model
from graphcore.engine.loading.prepare_model import prepare_model
from graphcore.engine.loading.runtime_config import (
    DEFAULT_CONTEXT,
    choose_graph,
    choose_pdl,
    choose_rounding,
    describe_runtime,
    refuse_graph,
)
from graphcore.errors import CheckpointError, CheckpointNotFoundError, ConfigError
from graphcore.kernels.backend import NativeBackend, TorchBackend, TritonBackend
from graphcore.kernels.cpu import library
from graphcore.kernels.cpu.kernel_packing import KernelPacking
from graphcore.kernels.gpu import registration
from graphcore.kernels.ops.kv_formats import kv_types
from graphcore.nn.decoder import Decoder
from graphcore.nn.linear import Linear
from graphcore.planning.gpu_overhead import chunk_graphs_nbytes
from graphcore.planning.tier import choose_tier

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
RAW = {
    "model_type": "gemma3_text",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 512,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 8,
}


def model(dtype: str | None = "bfloat16", **changes: object) -> Model:
    config = parse_model_config({**RAW, **changes}, "test")
    spec = architecture_of(config).spec(config)
    layers = config.num_hidden_layers
    weights = RandomCheckpoint(spec, 0)
    return Model(
        checkpoint=weights, path=None, config=config, spec=spec, stored_layers=layers, dtype=dtype, tokenizer=None
    )


def on_machine(monkeypatch: pytest.MonkeyPatch, compiler: str | None) -> None:
    """Have graphcore find this compiler, or none."""
    monkeypatch.setattr("graphcore.engine.loading.runtime_config.find_cpp_compiler", lambda: compiler)
    monkeypatch.setattr("graphcore.engine.loading.prepare_model.find_cpp_compiler", lambda: compiler)
    own = None if compiler is None else Compiler((compiler,), (compiler,))
    monkeypatch.setattr(library, "find_own_compiler", lambda: own)
    monkeypatch.setattr(library, "prebuilt_library", lambda: None)


@pytest.mark.parametrize(
    ("kind", "device", "has_kernels", "compiler", "expected"),
    [
        ("auto", CPU, True, "g++", ("captured", "eager")),
        ("auto", CPU, True, None, ("captured", "eager")),  # kernels that came built
        ("captured", CPU, True, "g++", ("captured", "compiled")),
        ("auto", CPU, False, "g++", ("compiled", "compiled")),  # a compiler that cannot build the kernels
        ("compiled", CPU, True, "g++", ("compiled", "compiled")),
        ("compiled", CPU, False, "g++", ("compiled", "compiled")),
        ("eager", CPU, True, "g++", ("eager", "eager")),
        ("eager", CPU, False, None, ("eager", "eager")),
        ("eager", CUDA, True, "g++", ("eager", "eager")),
        ("auto", CUDA, True, None, ("captured", "compiled")),
        ("captured", CUDA, True, None, ("captured", "compiled")),
        ("compiled", CUDA, True, None, ("compiled", "compiled")),
    ],
)
def test_the_graph_kind_is_the_best_that_works(
    kind: str,
    device: torch.device,
    has_kernels: bool,
    compiler: str | None,
    expected: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_machine(monkeypatch, compiler)
    assert choose_graph(kind, device, has_kernels) == (*expected, "")


@pytest.mark.parametrize(
    ("kind", "blocks", "device", "expected"),
    [
        ("auto", "kernels", CPU, ("captured", "eager")),
        ("captured", "kernels", CPU, ("captured", "compiled")),
        ("auto", "compiled", CPU, ("compiled", "compiled")),  # nothing that is captured there has compiled blocks
        ("compiled", "compiled", CPU, ("compiled", "compiled")),
        ("auto", "kernels", CUDA, ("captured", "compiled")),
        ("auto", "compiled", CUDA, ("captured", "compiled")),
        ("captured", "compiled", CUDA, ("captured", "compiled")),
    ],
)
def test_what_runs_has_the_blocks_that_were_asked_for(
    kind: str, blocks: str, device: torch.device, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_machine(monkeypatch, "g++")
    assert choose_graph(kind, device, True, blocks) == (*expected, "")


@pytest.mark.parametrize(
    ("kind", "blocks", "device", "said"),
    [
        (
            "captured",
            "compiled",
            CPU,
            "graph.blocks=compiled is not possible with graph=captured on cpu.*graph=compiled",
        ),
        ("auto", "kernels", CPU, "graph=captured needs a CUDA device, or a C"),
        ("auto", "kernels", CUDA, "graph=captured on a GPU needs Triton"),
        ("auto", "compiled", CUDA, "graph=captured on a GPU needs Triton"),
    ],
)
def test_blocks_that_cannot_run_are_refused_with_what_to_do(
    kind: str, blocks: str, device: torch.device, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_machine(monkeypatch, None)
    with pytest.raises(ConfigError, match=said):
        choose_graph(kind, device, False, blocks)


@pytest.mark.parametrize(
    ("kind", "prefill", "device", "expected"),
    [
        ("auto", "captured", CUDA, ("captured", "captured")),
        ("captured", "compiled", CUDA, ("captured", "compiled")),
        ("auto", "compiled", CPU, ("captured", "compiled")),
        ("captured", "eager", CPU, ("captured", "eager")),
    ],
)
def test_prompts_run_as_asked(
    kind: str, prefill: str, device: torch.device, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_machine(monkeypatch, "g++")
    assert choose_graph(kind, device, True, prefill=prefill) == (*expected, "")


@pytest.mark.parametrize(
    ("kind", "prefill", "device", "said"),
    [
        (
            "auto",
            "captured",
            CPU,
            "graph.prefill=captured needs graph=captured on a CUDA device.*use graph.prefill=eager",
        ),
        (
            "captured",
            "eager",
            CUDA,
            "graph.prefill=eager is not possible with graph=captured on cuda:0.*use graph=eager",
        ),
        ("auto", "compiled", CPU, "graph.prefill=compiled needs a C.*use graph.prefill=eager"),
    ],
)
def test_prompts_that_cannot_run_as_asked_are_refused(
    kind: str, prefill: str, device: torch.device, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_machine(monkeypatch, None)
    with pytest.raises(ConfigError, match=said):
        choose_graph(kind, device, True, prefill=prefill)


def test_captured_prompts_take_their_memory_in_the_plan() -> None:
    """The runtime of a GPU that is not here; the difference is that of the graphs alone."""
    settings = compose_settings(["device=cpu", "graph=eager", "prefill_chunk=64", "context_length=64"])
    parts = prepare_model(settings, model())
    tier = choose_tier(settings.streaming, CPU, parts.loader, "", is_here=True)

    def overhead(prefill: str) -> int:
        runtime = replace(parts.runtime, device=CUDA, graph="captured", blocks="kernels", prefill=prefill)
        return replace(parts, runtime=runtime).costs(settings, tier).overhead_nbytes

    spec, sizes = parts.decoder.spec, (parts.decoder, 64, torch.bfloat16)
    assert overhead("captured") - overhead("compiled") == chunk_graphs_nbytes(spec, *sizes) > 0


def test_the_first_line_says_what_a_gpus_steps_consist_of_where_there_is_a_choice() -> None:
    settings = compose_settings(["device=cpu", "graph=eager"])
    here = prepare_model(settings, model()).runtime
    assert describe_runtime(here, settings) == ("cpu", "bf16", "graph=eager", "streaming=off")
    there = replace(here, device=CUDA, graph="captured", blocks="mixed", prefill="compiled")
    assert describe_runtime(there, settings)[2:5] == ("graph=captured", "blocks=mixed", "prefill=compiled")


def test_compiled_blocks_in_a_native_program_are_refused_before_anything_is_fetched() -> None:
    with pytest.raises(ConfigError, match="use graph=compiled"):
        refuse_graph(compose_settings(["device=cpu", "graph=captured", "graph.blocks=compiled"]))


@pytest.mark.parametrize("setting", ["auto", "on", "off"])
@pytest.mark.parametrize(
    ("device", "capability", "graph", "can"),
    [
        (CUDA, (9, 0), "captured", True),
        (CUDA, (12, 0), "captured", True),
        (CUDA, (8, 9), "captured", False),
        (CUDA, (9, 0), "compiled", False),
        (CPU, None, "captured", False),
    ],
)
def test_launches_are_dependent_where_the_gpu_can_unless_the_user_says_no(
    device: torch.device,
    capability: tuple[int, int] | None,
    graph: str,
    can: bool,
    setting: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    is_on, note = choose_pdl(setting, graph, device)
    assert is_on == (can and setting != "off")
    if setting == "on" and not can:
        assert note == (
            "dependent_launches=on has no effect: it needs graph=captured on a GPU of compute capability 9.0 or more, "
            f"and this is graph={graph} on {device}"
        )
    else:
        assert note == ""


def test_a_run_without_support_says_that_dependent_launches_are_off() -> None:
    asked = prepare_model(compose_settings(["device=cpu", "graph=eager", "dependent_launches=on"]), model())
    assert not asked.runtime.uses_pdl
    assert [note for note in asked.notes if "dependent_launches=on has no effect" in note]
    for setting in ("auto", "off"):
        parts = prepare_model(compose_settings(["device=cpu", "graph=eager", f"dependent_launches={setting}"]), model())
        assert not [note for note in parts.notes if "dependent" in note]


def test_what_would_be_compiled_runs_eager_without_a_compiler_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(monkeypatch, None)
    graph, prefill, note = choose_graph("captured", CPU, has_kernels=True)
    assert (graph, prefill) == ("captured", "eager")
    assert note == "graph=captured: no C++ compiler works here, so prompts run eager; install g++ for compiled blocks"


def test_no_compiler_is_asked_for_where_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> str:
        raise AssertionError("a compiler was looked for")

    monkeypatch.setattr("graphcore.engine.loading.runtime_config.find_cpp_compiler", asked)
    for kind in ("auto", "eager"):
        choose_graph(kind, CPU, has_kernels=True)


@pytest.mark.parametrize(("kind", "is_refused"), [("auto", False), ("eager", False), ("captured", True)])
def test_a_kind_that_kernels_are_missing_for_is_refused_before_anything_is_fetched(
    kind: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_machine(monkeypatch, "g++")
    for has_kernels in (False, True):
        monkeypatch.setattr(
            "graphcore.engine.loading.runtime_config.can_have_kernels", lambda has_kernels=has_kernels: has_kernels
        )
        settings = compose_settings(["device=cpu", f"graph={kind}"])
        if is_refused and not has_kernels:
            with pytest.raises(ConfigError, match=f"graph={kind} needs"):
                refuse_graph(settings)
        else:
            refuse_graph(settings)


def test_auto_without_a_compiler_is_eager_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_machine(monkeypatch, None)
    kind, prefill, note = choose_graph("auto", CPU, has_kernels=False)
    assert (kind, prefill) == ("eager", "eager")
    assert "no C++ compiler" in note
    settings = compose_settings(["device=cpu", "graph=auto", f"cache_dir={tmp_path}"])
    parts = prepare_model(settings, model())
    runtime = parts.runtime
    assert (runtime.graph, runtime.prefill, runtime.backend) == ("eager", "eager", TorchBackend())
    assert parts.notes[0] == note
    assert "kernels are missing: none were built when it was installed" in parts.notes[1]
    assert not any("\n" in line for line in parts.notes)


@pytest.mark.parametrize(("kind", "word"), [("compiled", "compiler"), ("captured", "CUDA device, or a C\\+\\+")])
def test_a_graph_kind_that_cannot_run_is_refused(kind: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(monkeypatch, None)
    with pytest.raises(ConfigError, match=word):
        choose_graph(kind, CPU, has_kernels=False)


def test_loaded_blocks_need_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(monkeypatch, None)
    assert choose_graph("compiled", CPU, has_kernels=False, has_artefacts=True) == ("compiled", "compiled", "")


def test_without_a_home_folder_the_default_cache_is_a_temporary_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", unknown)
    monkeypatch.setattr("graphcore.engine.loading.runtime_config.find_backend", lambda *_: (TorchBackend(), ""))
    assert compose_settings([]).cache_folder == temporary_folder()
    assert compose_settings([f"cache_dir={tmp_path}"]).cache_folder == tmp_path
    notes = prepare_model(compose_settings(["graph=eager"]), model()).notes
    assert any(note.startswith("no home folder is known") for note in notes)


@pytest.mark.parametrize("kind", ["auto", "eager"])
def test_a_gpu_without_triton_runs_eager_and_says_that_it_is_slow(kind: str) -> None:
    found, prefill, note = choose_graph(kind, CUDA, has_kernels=False)
    assert (found, prefill) == ("eager", "eager")
    assert note.startswith("Triton is not installed: blocks run eager")
    assert note.endswith("install triton")


@pytest.mark.parametrize("kind", ["captured", "compiled"])
def test_a_gpu_without_triton_runs_no_graph(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"graph={kind} on a GPU needs Triton, which is not installed; install"):
        choose_graph(kind, CUDA, has_kernels=False)


def test_matrices_lie_as_triton_reads_them_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphcore.engine.loading.runtime_config.resolve_device", lambda _: CUDA)
    monkeypatch.setattr("graphcore.engine.loading.runtime_config.resolve_dtype", lambda *_: torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    for found in (object(), None):
        monkeypatch.setattr(registration, "find_spec", lambda _, found=found: found)
        runtime = prepare_model(compose_settings([]), model()).runtime
        assert isinstance(runtime.backend, TritonBackend) == bool(found)
        assert runtime.graph == ("captured" if found else "eager")


@pytest.mark.parametrize(
    ("activations", "dtype", "expected"),
    [
        ("auto", torch.bfloat16, "wide"),
        ("float", torch.bfloat16, "float"),
        ("int8", torch.float16, "block"),
        ("auto", torch.float32, "float"),
        ("int8", torch.float32, "float"),
    ],
)
def test_activations_are_rounded_as_asked_and_never_in_float32(
    activations: str, dtype: torch.dtype, expected: str
) -> None:
    assert choose_rounding(activations, dtype) == expected


@pytest.mark.parametrize(
    ("overrides", "has_effect"),
    [
        (["quant=q8_0", "dtype=bf16"], True),
        (["quant=q8_0", "dtype=fp32"], False),
        (["dtype=bf16"], False),
        (["quant=q8_0", "dtype=bf16", "quant.activations=auto"], True),
    ],
)
def test_rounding_that_was_asked_for_in_vain_is_told(
    overrides: list[str], has_effect: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "graphcore.engine.loading.runtime_config.find_backend", lambda *_: (NativeBackend("kernels.so"), "")
    )
    monkeypatch.setattr(KernelPacking, "nbytes", 64)
    monkeypatch.setattr(Decoder, "is_batch_invariant", True)  # asks the library, which is no file
    settings = compose_settings(["device=cpu", "graph=eager", "quant.activations=int8", *overrides])
    notes = prepare_model(settings, model()).notes
    assert any("quant.activations=int8 has no effect" in note for note in notes) != has_effect


def test_a_model_that_the_kernels_do_not_know_decodes_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "graphcore.engine.loading.runtime_config.find_backend", lambda *_: (NativeBackend("kernels.so"), "")
    )
    monkeypatch.setattr(Decoder, "is_batch_invariant", True)
    ternary = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
    bitnet = {"model_type": "bitnet", "hidden_act": "relu2", "layer_types": None, "quantization_config": ternary}
    ours = [model(), model(**bitnet)]  # whose rows are too short for i2_s: dense weights between 8-bit activations
    prepared = [prepare_model(compose_settings(["device=cpu"]), each) for each in ours]
    assert [(one.runtime.graph, one.runtime.prefill) for one in prepared] == [
        ("captured", "eager"),
        ("compiled", "compiled"),
    ]
    assert "decode runs compiled" in prepared[1].notes[0]
    with pytest.raises(ConfigError, match="graph=captured is not possible"):
        prepare_model(compose_settings(["device=cpu", "graph=captured"]), ours[1])


@pytest.mark.parametrize(
    ("free_share", "streaming", "is_dense"), [(1.3, "off", True), (1.2, "off", False), (9.0, "on", False)]
)
def test_without_kernels_matrices_are_unpacked_once_if_they_fit(
    free_share: float, streaming: str, is_dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four fifths of what is free may be taken: 1.25 times the dense bytes are the least."""
    spec = model().spec
    packed = replace(model(), checkpoint=RandomCheckpoint(spec, 0, "q8_0"))
    numel = sum(tensor.numel() for tensor in Decoder(spec, torch.bfloat16).buffers() if tensor.ndim > 1)
    monkeypatch.setattr("graphcore.engine.loading.runtime_config.find_backend", lambda *_: (TorchBackend(), ""))
    monkeypatch.setattr(
        "graphcore.engine.loading.runtime_config.free_device_nbytes", lambda _: int(free_share * 2 * numel)
    )
    settings = compose_settings(["device=cpu", "graph=eager", "dtype=bf16", f"streaming={streaming}"])
    prepared = prepare_model(settings, packed)
    linears = [one for one in prepared.decoder.modules() if isinstance(one, Linear)]
    assert {one.packing is None for one in linears} == {is_dense}
    said = "unpacked once" if is_dense else "unpacked for each use"
    assert [said in note for note in prepared.notes] == [True]


def test_the_context_is_the_models_own_up_to_a_default() -> None:
    eager = ["device=cpu", "graph=eager"]
    assert prepare_model(compose_settings(eager), model()).runtime.context_length == 512
    long = model(max_position_embeddings=131072)
    assert prepare_model(compose_settings(eager), long).runtime.context_length == DEFAULT_CONTEXT
    assert prepare_model(compose_settings([*eager, "context_length=100000"]), long).runtime.context_length == 100000
    with pytest.raises(ConfigError, match="512"):
        prepare_model(compose_settings([*eager, "context_length=513"]), model())


def test_a_prefill_chunk_is_no_longer_than_the_context() -> None:
    settings = compose_settings(["device=cpu", "graph=eager", "context_length=64"])
    assert prepare_model(settings, model()).runtime.prefill_chunk == 64


@pytest.mark.parametrize(
    ("dtype", "stored", "expected"),
    [
        ("auto", "float32", torch.float32),
        ("auto", "bfloat16", torch.bfloat16),
        ("auto", "float16", torch.bfloat16),
        ("auto", None, torch.bfloat16),
        ("fp16", "float32", torch.float16),
        ("fp32", None, torch.float32),
    ],
)
def test_dtypes_of_compute_and_cache(dtype: str, stored: str | None, expected: torch.dtype) -> None:
    eager = ["device=cpu", "graph=eager", f"dtype={dtype}"]
    runtime = prepare_model(compose_settings(eager), model(stored)).runtime
    assert (runtime.dtype, runtime.kv_dtype) == (expected, kv_types(expected))
    wide = prepare_model(compose_settings([*eager, "kv_dtype=fp32"]), model(stored)).runtime
    assert (wide.dtype, wide.kv_dtype) == (expected, kv_types(torch.float32))


def test_the_first_layers_keep_their_types() -> None:
    config = model().config
    cut = config.cut(2, "here")
    assert (cut.num_hidden_layers, cut.attention.layer_types) == (2, ("sliding_attention", "full_attention"))
    assert config.cut(None, "here") == config
    alike = replace(config, attention=replace(config.attention, layer_types=None))
    assert alike.cut(1, "here").attention.layer_types is None
    with pytest.raises(ConfigError, match="has 3 layers"):
        config.cut(4, "here")


def test_the_stored_dtype_is_that_of_the_matrices() -> None:
    gemma = model()
    assert stored_dtype(gemma.checkpoint, gemma.config) == "bfloat16"


def test_a_checkpoint_without_matrices_is_no_language_model() -> None:
    gemma = model()
    gemma.checkpoint.tensors = {name: info for name, info in gemma.checkpoint.tensors.items() if len(info.shape) == 1}
    with pytest.raises(CheckpointError, match="no language model"):
        stored_dtype(gemma.checkpoint, gemma.config)


def test_random_weights_have_the_groups_shape_and_the_seeds_values(tmp_path: Path) -> None:
    settings = compose_settings(["model=qwen3", "model.checkpoint='random:'", "model.num_hidden_layers=1"]).model
    first, again, other = (open_model(settings, seed, tmp_path, lambda *report: None) for seed in (1, 1, 2))
    assert (first.config.model_type, first.config.num_hidden_layers, first.spec.dim) == ("qwen3", 1, 2048)
    name = "layers.0.self_attn.k_proj.weight"
    weights = [each.checkpoint.read(name) for each in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert weights[0].float().std().item() == pytest.approx(0.02, rel=0.01)
    assert first.tokenizer is None


def test_a_checkpoint_that_is_not_there_is_named(tmp_path: Path) -> None:
    settings = compose_settings([]).model
    settings.checkpoint = str(tmp_path / "nowhere")
    with pytest.raises(CheckpointNotFoundError, match="nowhere"):
        open_model(settings, 0, tmp_path, lambda *report: None)
