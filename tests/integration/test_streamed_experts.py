"""A mixture of experts that is fetched expert by expert gives the resident model's logits, to the bit.

Resident models are compared with transformers in test_gpt_oss.py, test_qwen_moe.py and test_qwen_delta.py. The tiny
models have 4 layers of 6 experts, of which a token goes through 3: a token's working set is 12 of 24.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from support.files import qwen_delta_files, qwen_moe_files
from support.files.gpt_oss_files import build, gguf_tensors, pack, save_dense, save_mxfp4, write_gguf
from support.streaming import SIZES
from support.tiny_models import VOCAB
from torch import Tensor, nn
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from graphcore import Engine
from graphcore.checkpoint.file_bytes import FileSpan
from graphcore.checkpoint.streamed_file import ByteSource
from graphcore.errors import CheckpointError, PlanError
from graphcore.streaming.experts.cache import ExpertCache
from graphcore.streaming.scheduler import run_program
from graphcore.weights.experts import PARTS, expert_weight

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("small_parts")]

LAYERS, EXPERTS, TOP_K = 4, 6, 3
PAGE = 4096  # reads past the page cache begin and end at multiples of it


def mxfp4(folder: Path) -> Path:
    save_mxfp4(folder, 1)
    return folder


def dense(folder: Path) -> Path:
    save_dense(folder, 2, torch.bfloat16)
    return folder


def qwen(folder: Path) -> Path:
    model = qwen_moe_files.build(4).bfloat16()
    qwen_moe_files.save(folder, model, is_fused=False)
    return folder


def qwen_gguf(folder: Path) -> Path:
    model = qwen_moe_files.build(4, moe_intermediate_size=64)
    encoding = GGMLQuantizationType.Q4_0
    return qwen_moe_files.write_gguf(folder / "model.gguf", model, encoding, is_fused=False)


def qwen_delta(folder: Path) -> Path:
    qwen_delta_files.build("qwen3_5_moe", 5, num_hidden_layers=LAYERS).bfloat16().save_pretrained(folder)
    return folder


def gguf(is_packed: bool, is_fused: bool) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        model = build(3)
        packed = pack(model, 3) if is_packed else {}
        return write_gguf(folder / "model.gguf", model, gguf_tensors(model, packed, is_fused))

    return write


FILES = {
    "mxfp4": mxfp4,
    "dense": dense,
    "gguf_mxfp4_apart": gguf(is_packed=True, is_fused=False),
    "gguf_mxfp4_fused": gguf(is_packed=True, is_fused=True),
    "gguf_f32_apart": gguf(is_packed=False, is_fused=False),
    "gguf_f32_fused": gguf(is_packed=False, is_fused=True),
    "qwen": qwen,
    "qwen_gguf_q4_0": qwen_gguf,
    "qwen_delta": qwen_delta,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes each form of the files once."""
    written: dict[str, Path] = {}

    def path_of(form: str) -> Path:
        if form not in written:
            written[form] = FILES[form](tmp_path_factory.mktemp(form))
        return written[form]

    return path_of


def load(path: Path, graph: str, dtype: str, *overrides: str, streaming: str = "on") -> Engine:
    return Engine.load(
        path, dtype=dtype, device="cpu", graph=graph, streaming=streaming, overrides=[*SIZES, *overrides]
    )


def ids_of(tokens: int = 34) -> Tensor:
    return torch.randint(0, VOCAB, (2, tokens), generator=torch.Generator().manual_seed(7))


def outputs_of(engine: Engine) -> list[Tensor]:
    """Return logits of a batch in chunks of 16, of rows of different lengths, token by token, and new tokens."""
    return [*outputs_of_two(engine), *outputs_of_one(engine)]


@torch.inference_mode()
def outputs_of_two(engine: Engine) -> list[Tensor]:
    """Return logits of two rows in chunks of 16, and of rows of different lengths and a step after them."""
    ids = ids_of()
    together = engine.runner.extend([ids[0, :20].tolist(), ids[1, :7].tolist()], [0, 0])
    return [together, engine.runner.extend([[3], [5]], [20, 7]), engine.logits(ids)]


@torch.inference_mode()
def outputs_of_one(engine: Engine) -> list[Tensor]:
    """Return logits of one row after a prompt and token by token, and new tokens."""
    ids = ids_of()
    alone = [engine.runner.extend([ids[0, :20].tolist()], [0])]
    alone += [engine.runner.extend([[token]], [at]) for at, token in enumerate(ids[0, 20:25].tolist(), start=20)]
    made = engine.generate([ids[1, :7].tolist()], max_new_tokens=6, ignore_eos=True)[0].token_ids
    return [torch.cat(alone), torch.tensor(made)]


def cache_of(engine: Engine) -> ExpertCache:
    experts = engine.loaded.weight_stream.experts
    assert experts is not None
    return experts.cache


def bytes_of(engine: Engine, num_slots: int) -> str:
    """Return the setting of a cache of so many experts."""
    assert engine.plan.experts is not None
    return f"streaming.expert_cache={num_slots * engine.plan.experts.slot_nbytes}"


def check(
    path: Path,
    graph: str,
    dtype: str,
    source: str,
    slots: Sequence[int],
    outputs: Callable[[Engine], list[Tensor]] = outputs_of,
) -> None:
    with load(path, graph, dtype, streaming="off") as resident:
        expected = outputs(resident)
    with load(path, "eager", dtype, f"streaming.source={source}") as streamed:
        sizes = [bytes_of(streamed, count) for count in slots]
    for count, size in zip(slots, sizes, strict=True):
        with load(path, graph, dtype, f"streaming.source={source}", size) as streamed:
            assert streamed.plan.experts is not None
            assert streamed.plan.experts.num_slots == count
            for found, wanted in zip(outputs(streamed), expected, strict=True):
                assert torch.equal(found, wanted), count


@pytest.mark.parametrize("form", FILES)
def test_experts_from_every_form_of_files_give_resident_bits(files: Callable[[str], Path], form: str) -> None:
    """A chunk of 16 goes through up to 6 experts in waves; one form also token by token."""
    check(files(form), "eager", "bf16", "disk", (TOP_K,), outputs_of if form == "mxfp4" else outputs_of_two)


def test_experts_in_larger_caches_give_resident_bits(files: Callable[[str], Path]) -> None:
    """A cache of a token's working set, and one of all experts; where a file keeps them does not matter to a cache."""
    check(files("mxfp4"), "eager", "bf16", "disk", (12, 24))


@pytest.mark.slow
@pytest.mark.parametrize(("form", "slots"), [("mxfp4", TOP_K), ("dense", 12), ("qwen_gguf_q4_0", TOP_K)])
def test_experts_between_instructions_give_resident_bits(files: Callable[[str], Path], form: str, slots: int) -> None:
    """A decode step is native, of one sequence and of several; prompts run eager."""
    check(files(form), "auto", "bf16", "disk", (slots,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        pytest.param("mxfp4", "bf16", marks=pytest.mark.thorough),
        pytest.param("dense", "fp32", marks=pytest.mark.slow),
    ],
)
def test_compiled_halves_give_resident_bits(files: Callable[[str], Path], form: str, dtype: str) -> None:
    """One sequence; of several, a captured engine runs the same as a compiled one."""
    check(files(form), "compiled", dtype, "disk", (TOP_K,), outputs_of_one)


@pytest.mark.parametrize("form", ["mxfp4", "dense", "gguf_mxfp4_fused", "qwen"])
def test_experts_that_wait_in_ram_give_resident_bits(files: Callable[[str], Path], form: str) -> None:
    check(files(form), "eager", "fp32", "host", (TOP_K if form == "mxfp4" else 14,), outputs_of_two)


@pytest.mark.slow
@pytest.mark.parametrize("form", FILES)
@pytest.mark.parametrize("graph", ["compiled", "captured"])
@pytest.mark.parametrize("source", ["disk", "host"])
def test_every_form_and_source_gives_resident_bits_compiled(
    files: Callable[[str], Path], form: str, graph: str, source: str
) -> None:
    check(files(form), graph, "bf16", source, (TOP_K, 5, 24))


@pytest.mark.parametrize(
    ("graph", "group_size"), [("eager", 3), pytest.param("captured", 1, marks=pytest.mark.slow), ("auto", 3)]
)
def test_many_tokens_are_the_resident_ones(files: Callable[[str], Path], graph: str, group_size: int) -> None:
    prompt = ids_of()[0, :20].tolist()
    found = []
    streamed = (f"streaming.layer_group_size={group_size}", "streaming.expert_cache=0")
    for streaming, overrides in (("off", ()), ("on", streamed)):
        with load(files("mxfp4"), graph, "bf16", *overrides, streaming=streaming) as engine:
            found.append(engine.generate([prompt], max_new_tokens=40, ignore_eos=True)[0].token_ids)
    assert len(found[0]) == 40
    assert found[0] == found[1]


def routed_by(model: nn.Module, ids: Tensor) -> list[set[int]]:
    """Return which experts transformers' routers choose for some tokens, by layer."""
    chosen: list[set[int]] = [set() for _ in model.model.layers]

    def watch(layer: int) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...], _output: object) -> None:
            mlp = model.model.layers[layer].mlp
            is_qwen = isinstance(mlp, Qwen3MoeSparseMoeBlock | Qwen3_5MoeSparseMoeBlock)
            router, bias = (mlp.gate, None) if is_qwen else (mlp.router, mlp.router.bias)
            scores = nn.functional.linear(inputs[0].reshape(-1, inputs[0].shape[-1]), router.weight, bias)
            chosen[layer] |= set(scores.topk(router.top_k).indices.flatten().tolist())

        return hook

    hooks = [layer.mlp.register_forward_hook(watch(index)) for index, layer in enumerate(model.model.layers)]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return chosen


class RecordingSource:
    """A file that says what was read of it."""

    def __init__(self, source: ByteSource, reads: list[FileSpan]) -> None:
        self.source, self.reads, self.size = source, reads, source.size

    def read_into(self, space: Tensor, offset: int, nbytes: int) -> int:
        self.reads.append(FileSpan(self.source.path, offset, nbytes))
        return self.source.read_into(space, offset, nbytes)

    def check_unchanged(self) -> None:
        self.source.check_unchanged()


LARGE = {"hidden_size": 256, "intermediate_size": 256}  # other experts lie further away than what is read along


@pytest.mark.parametrize("form", FILES)
def test_only_the_bytes_of_routed_experts_are_read(form: str, tmp_path: Path) -> None:
    path, model = tmp_path, build(3, **LARGE)
    if form == "mxfp4":
        model = save_mxfp4(tmp_path, 3, **LARGE)
    elif form == "dense":
        model = save_dense(tmp_path, 3, torch.bfloat16, **LARGE)
    elif form == "qwen":
        model = qwen_moe_files.build(3, hidden_size=256, moe_intermediate_size=256)
        qwen_moe_files.save(tmp_path, model, is_fused=False)
    elif form == "qwen_gguf_q4_0":
        model = qwen_moe_files.build(3, hidden_size=256, moe_intermediate_size=256)
        qwen_moe_files.round_experts(model, GGMLQuantizationType.Q4_0)
        path = qwen_moe_files.write_gguf(tmp_path / "model.gguf", model, GGMLQuantizationType.Q4_0, is_fused=False)
    elif form == "qwen_delta":
        sizes = {"num_hidden_layers": LAYERS, "hidden_size": 256, "moe_intermediate_size": 256}
        model = qwen_delta_files.build("qwen3_5_moe", 3, **sizes)
        model.save_pretrained(tmp_path)
    else:
        packed = pack(model, 3) if "mxfp4" in form else {}
        tensors = gguf_tensors(model, packed, is_fused=form.endswith("fused"))
        path = write_gguf(tmp_path / "model.gguf", model, tensors)
        for layer in model.model.layers:
            layer.mlp.experts.limit, layer.mlp.experts.alpha = 7.0, 1.702  # which no GGUF key describes
    ids = ids_of()[:1, :1]
    routed = routed_by(model, ids)
    with load(path, "eager", "fp32", "streaming.source=disk") as engine:
        cache, reads = cache_of(engine), list[FileSpan]()
        cache.filler.files = {at: RecordingSource(one, reads) for at, one in cache.filler.files.items()}
        with torch.inference_mode():
            engine.runner.extend([[int(ids[0, 0])]], [0])
        wanted = list(expert_spans(engine, routed))
    assert (cache.hits, cache.misses) == (0, LAYERS * TOP_K)
    for read in reads:
        touching = [one for one in wanted if one.file == read.file and one.offset < read.end and read.offset < one.end]
        assert touching
        assert min(one.offset for one in touching) - read.offset < PAGE
        assert read.end - max(one.end for one in touching) < PAGE
    assert sum(read.nbytes for read in reads) < sum(span.nbytes for span in wanted) + 2 * PAGE * len(reads)
    for span in wanted:
        inside = sorted(
            one for one in reads if one.file == span.file and one.offset < span.end and span.offset < one.end
        )
        assert inside[0].offset <= span.offset
        assert inside[-1].end >= span.end


def expert_spans(engine: Engine, routed: Sequence[set[int]]) -> Iterator[FileSpan]:
    """Yield where the files hold some experts: the e-th of equal parts of each tensor, or the e-th tensor."""
    loader = engine.loaded.loader
    for layer, experts in enumerate(routed):
        for name in {loader.sources[expert_weight(layer, part)].name for part in PARTS}:
            spans = loader.checkpoint.spans(name)
            if len(spans) == EXPERTS:
                yield from (spans[expert] for expert in experts)
                continue
            for span in spans:
                each = span.nbytes // EXPERTS
                yield from (FileSpan(span.file, span.offset + expert * each, each) for expert in experts)


def test_padding_and_rows_without_a_sequence_fetch_nobody(files: Callable[[str], Path]) -> None:
    """The second row has one token, the others of its chunk are padding."""
    asked: list[set[int]] = []
    with load(files("mxfp4"), "eager", "fp32", "batch_size=4") as engine:
        cache = cache_of(engine)
        waves = cache.waves

        def watched(layer: int, experts: Sequence[int]) -> Iterator[list[int]]:
            if layer == 0:
                asked.append(set(experts))
            return waves(layer, experts)

        engine.runner.builder.functions.fetched.fetcher.waves = watched
        with torch.inference_mode():
            program = engine.runner.builder.prefill(4)
            program.state.put_rows([[5, 5, 5, 5, 5], [5]], [0, 0])
            run_program(program, engine.runner.policy)
    (experts,) = asked
    assert len(experts) <= 5 * TOP_K
    model = build(1)
    pack(model, 1)
    assert experts == routed_by(model, torch.tensor([[5, 5, 5, 5, 5]]))[0]


def test_the_hit_rate_is_that_of_the_tokens_that_ran(files: Callable[[str], Path]) -> None:
    with load(files("mxfp4"), "captured", "bf16") as engine:
        assert engine.loaded.weight_stream.expert_hit_rate is None
        assert "expert_hit_rate" not in engine.stats
        with torch.inference_mode():
            engine.runner.extend([[5]], [0])
            assert engine.stats["expert_hit_rate"] == 0.0
            engine.runner.extend([[5]], [0])
        assert engine.stats["expert_hit_rate"] == 0.5
    with load(files("mxfp4"), "captured", "bf16", streaming="off") as engine:
        assert "expert_hit_rate" not in engine.stats


def test_a_file_that_ends_early_is_one_error_and_no_token(files: Callable[[str], Path], tmp_path: Path) -> None:
    path = mxfp4(tmp_path)
    with load(path, "captured", "bf16", "streaming.source=disk") as engine:
        weights = path / "model.safetensors"
        with weights.open("r+b") as file:
            file.truncate(weights.stat().st_size // 2)
        for _ in range(2):
            with pytest.raises(CheckpointError, match=r"model\.safetensors"):
                engine.generate([[1, 2, 3]], max_new_tokens=2)


def test_a_budget_below_what_one_token_chooses_is_refused_with_one_that_works(files: Callable[[str], Path]) -> None:
    with pytest.raises(PlanError, match=r"smallest streaming\.memory_budget that works") as error:
        load(files("mxfp4"), "eager", "bf16", "streaming.memory_budget=100KB")
    least = str(error.value).rpartition(" is ")[2].partition(" bytes")[0]
    with load(files("mxfp4"), "eager", "bf16", f"streaming.memory_budget={least}") as engine:
        assert engine.plan.experts is not None
        assert engine.plan.experts.num_slots == TOP_K
        assert engine.logits(ids_of(9)).isfinite().all()
