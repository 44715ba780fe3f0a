"""A prompt saved to a file and loaded by another engine: the bits of an empty cache, or an error that says why not."""

import hashlib
import json
import random
import resource
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.packed_matrices import native_kernels
from support.tiny_models import VOCAB, TinyModel

from graphcore import Engine
from graphcore.errors import BusyError, ConfigError, GraphcoreError

pytestmark = pytest.mark.thorough

Tiny = Callable[[str], TinyModel]
SECONDS = 120.0
CHUNK, CONTEXT = 16, 96
PROMPT = [random.Random(8).randrange(VOCAB) for _ in range(69)]
ARCHITECTURES = ["llama3", "gemma3", "mistral", "gpt2", "gpt_oss", "qwen3_moe", "qwen3_5", "lfm2", "gemma4"]
KINDS: dict[str, list[str]] = {
    "captured": ["graph=auto"],
    "eager": ["graph=eager"],
    "streamed": ["graph=auto", "streaming=on"],
    "bf16": ["dtype=bf16"],
    "coded": ["kv_dtype=q8_0"],
}
IN_CI = {("llama3", "bf16"), ("qwen3_moe", "coded"), ("lfm2", "captured"), ("gemma4", "streamed")}  # beside the matrix
SETTINGS: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True, "logprobs": True}


def load(tiny: TinyModel | Path, *overrides: str, dtype: str = "fp32") -> Engine:
    folder = tiny if isinstance(tiny, Path) else tiny.folder
    given = [f"context_length={CONTEXT}", f"prefill_chunk={CHUNK}", *overrides]
    dtype = next((word.removeprefix("dtype=") for word in given if word.startswith("dtype=")), dtype)
    return Engine.load(
        folder, dtype=dtype, device="cpu", overrides=[word for word in given if not word.startswith("dtype=")]
    )


def answer(engine: Engine, prompt: Sequence[int]) -> tuple[int, tuple[Any, ...]]:
    """Return how many tokens of a prompt were in the cache, and what it is answered."""
    handle = engine.submit(prompt, **SETTINGS)
    found = handle.result(SECONDS)
    return handle.cached, (found.token_ids, found.logprobs)


@pytest.fixture
def saved(tiny_model: Tiny, tmp_path: Path) -> Path:
    """A saved cache of the tiny Llama's."""
    file = tmp_path / "prompt.cache"
    with load(tiny_model("llama3"), "graph=eager") as engine:
        engine.save_cache(PROMPT, file)
    return file


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if (name, kind) in IN_CI else pytest.mark.slow)
        for name in ARCHITECTURES
        for kind in KINDS
        if kind != "coded" or name in ("qwen3_moe", "qwen3_5")  # others' heads are no blocks of 32
    ],
)
def test_answers_after_loading_are_those_of_an_empty_cache(
    name: str, kind: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    """Of a ring's pages the last ones are saved, of states those after whole chunks."""
    has_ring, has_states = name in ("gemma3", "mistral", "gpt_oss", "gemma4"), name in ("qwen3_5", "lfm2")
    sure = len(PROMPT) - len(PROMPT) % CHUNK  # the last chunk has fewer than 16 tokens
    longer = [*PROMPT, 3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
    others = [longer, PROMPT, [*PROMPT[:50], *[7] * 20]]
    expected, tiny, file = [], tiny_model(name), tmp_path / "prompt.cache"
    for prompt in others:
        with load(tiny, *KINDS[kind]) as engine:
            assert answer(engine, PROMPT[:1])[0] == 0
            expected.append(answer(engine, prompt)[1])
    with load(tiny, *KINDS[kind]) as engine:
        assert engine.save_cache(PROMPT, file) == sure
        assert answer(engine, longer) == (sure, expected[0])
    for prompt, found in zip(others, expected, strict=True):
        with load(tiny, *KINDS[kind]) as engine:
            assert engine.load_cache(file) == sure
            cached, after = answer(engine, prompt)
            assert after == found
            least = sure if prompt is not others[2] else 0 if has_ring else 32 if has_states else 48
            assert cached >= least


@pytest.mark.parametrize("name", ["llama3", "gemma3", "qwen3_5", "lfm2"])
def test_loading_and_saving_while_requests_run_lose_no_page_and_change_no_token(
    name: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    tiny, file = tiny_model(name), tmp_path / "prompt.cache"
    prompts = [[number, *PROMPT[:40]] for number in range(6)]
    with load(tiny) as engine:
        expected = [answer(engine, prompt)[1] for prompt in prompts]
        engine.save_cache(PROMPT, file)
    with load(tiny, "batching.max_sequences=3", f"batching.cache_tokens={2 * CONTEXT}") as engine:
        with engine.holding_back():
            handles = [engine.submit(prompt, **SETTINGS) for prompt in prompts]
        for number in range(3):
            with suppress(BusyError):  # others have the pages
                engine.load_cache(file)
                engine.save_cache(PROMPT, tmp_path / f"again{number}")
        assert [(each.result(SECONDS).token_ids, each.result().logprobs) for each in handles] == expected
        admission: Any = engine.batching._admission  # type: ignore[attr-defined]
        engine.load_cache(file)
        with torch.inference_mode(), engine.while_idle():  # the last request has left
            admission.clear_prefix_cache()
        assert [table.num_free for table in admission.pages.tables] == [
            table.num_pages for table in admission.pages.tables
        ]
        assert engine.save_cache(PROMPT, tmp_path / "last") == engine.load_cache(tmp_path / "last") == 64


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["dtype=bf16"], "was saved with dtype=fp32, and this run has dtype=bf16; set dtype=fp32, or save it again"),
        (["kv_dtype=fp16"], "saved with kv_dtype=fp32, and this run has kv_dtype=fp16"),
        (["quant=q8_0"], "saved with quant=stored, and this run has quant=q8_0"),
        (["prefill_chunk=32"], "set prefill_chunk=16, or save it again"),
        (["context_length=256"], "has pages of 16 positions, and with context_length=256 they have 64; set context_"),
    ],
)
def test_a_file_of_other_settings_is_refused_by_the_one_that_differs(
    overrides: list[str], message: str, saved: Path, tiny_model: Tiny
) -> None:
    with load(tiny_model("llama3"), *overrides) as engine, pytest.raises(ConfigError, match=message):
        engine.load_cache(saved)


def test_a_file_of_more_tokens_than_the_context_is_refused(tiny_model: Tiny, tmp_path: Path) -> None:
    with load(tiny_model("llama3")) as engine:
        assert engine.save_cache([*PROMPT, *PROMPT[:20]], tmp_path / "long") == 80
    message = "has 80 tokens, which do not fit in context_length=64; set context_length to at least 80"
    with load(tiny_model("llama3"), "context_length=64") as engine, pytest.raises(ConfigError, match=message):
        engine.load_cache(tmp_path / "long")


def test_a_file_of_other_weights_is_refused(saved: Path, tiny_model: Tiny, tmp_path: Path) -> None:
    for name in ("mistral", "llama3"):
        copy = tmp_path / name
        copy.mkdir()
        for file in tiny_model(name).folder.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        weights = copy / "model.safetensors"
        if name == "llama3":  # one weight has another last bit
            weights.write_bytes(weights.read_bytes()[:-4] + b"\1" + weights.read_bytes()[-3:])
        with load(copy) as engine, pytest.raises(ConfigError, match=r"belongs to other weights, of .*save the prompt"):
            engine.load_cache(saved)


def test_threads_count_where_torch_multiplies_prompts(
    tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of its sums depends on them, and on the instructions that a variable leaves it."""
    native_kernels()
    before, file, folder = torch.get_num_threads(), tmp_path / "prompt.cache", tmp_path / "whole_blocks"
    config = deepcopy(tiny_model("llama3").reference.config)
    config.intermediate_size = 128  # whole blocks of 32, so that every matrix is packed
    type(tiny_model("llama3").reference)(config).save_pretrained(folder)
    packed = ("quant=q8_0", "quant.activations=int8", "dtype=bf16")
    try:
        for overrides, name in (((), "torch with 2 threads"), (packed, "C++ kernels")):
            with load(folder, *overrides, "threads=2") as engine:
                saved = engine.save_cache(PROMPT, file)
            assert parts_of(file)[0]["__metadata__"]["products"] == name
            with load(folder, *overrides, "threads=1") as engine:
                if overrides:
                    assert engine.load_cache(file) == saved
                    continue
                with pytest.raises(ConfigError, match="has products=torch with 1 threads; set threads and the env"):
                    engine.load_cache(file)
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
        with load(folder, "threads=2") as engine:
            engine.save_cache(PROMPT, file)
        assert parts_of(file)[0]["__metadata__"]["products"] == "torch with 2 threads, ONEDNN_MAX_CPU_ISA=AVX2"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("key", "value"), [("torch", "1.0"), ("kernels", "kernels-none"), ("device", "cpu Z80")])
def test_a_file_of_another_machine_is_refused(key: str, value: str, saved: Path, tiny_model: Tiny) -> None:
    header, rest = parts_of(saved)
    header["__metadata__"][key] = value
    put_together(saved, header, rest)
    with load(tiny_model("llama3")) as engine, pytest.raises(ConfigError, match=f"saved with {key}={value}, and this"):
        engine.load_cache(saved)


def parts_of(file: Path) -> tuple[dict[str, Any], bytes]:
    """Return a file's header, and the bytes of its tensors."""
    raw = file.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:end]), raw[end:]


def joined(header: dict[str, Any], data: bytes, padding: bytes = b"") -> bytes:
    """Return a file of a header and the bytes of tensors, as they are."""
    text = json.dumps(header).encode() + padding
    return len(text).to_bytes(8, "little") + text + data


def put_together(file: Path, header: dict[str, Any], data: bytes) -> None:
    """Write a file whose sha256 is right, whatever else is wrong."""
    about = header["__metadata__"]
    if isinstance(about, dict):
        told = {key: value for key, value in about.items() if key != "sha256"}
        digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
        for name in sorted(header.keys() - {"__metadata__"}):
            begin, end = header[name]["data_offsets"]
            digest.update(data[begin:end])
        about["sha256"] = digest.hexdigest()
    file.write_bytes(joined(header, data))


def test_a_file_that_is_put_together_again_is_read(saved: Path, tiny_model: Tiny) -> None:
    """So forged files are refused for what they say, and not for how they are written."""
    header, data = parts_of(saved)
    digest = header["__metadata__"]["sha256"]
    put_together(saved, header, data)
    assert parts_of(saved)[0]["__metadata__"]["sha256"] == digest
    with load(tiny_model("llama3"), "graph=eager") as engine:
        assert engine.load_cache(saved) == 64


def test_every_damage_is_an_error_of_one_line_and_the_engine_goes_on(saved: Path, tiny_model: Tiny) -> None:
    """Each byte of the header is damaged, and the first, the last and others of each tensor."""
    raw, generator = saved.read_bytes(), random.Random(3)
    header, data = parts_of(saved)
    start = len(raw) - len(data)
    damaged = [raw[:length] for length in (0, 1, 7, 8, 9, 200, len(raw) // 2, len(raw) - 33, len(raw) - 1)]
    damaged += [raw + b"\0", raw[:100] + raw[101:], b"\xff" * 8 + raw[8:], b"GGUF" + raw[4:], b"\0" * len(raw)]
    damaged += [joined(header, data, padding=b"\t")]
    places = [*range(start), *generator.choices(range(start, len(raw)), k=80)]
    for name in header.keys() - {"__metadata__"}:
        begin, end = header[name]["data_offsets"]
        places += [start + begin, start + end - 1]
    for at in places:
        damaged.append(raw[:at] + bytes([raw[at] ^ 1 << generator.randrange(8)]) + raw[at + 1 :])
    keys, values = (f"pages.0.0.{name}" for name in ("keys", "values"))
    header[keys], header[values] = header[values], header[keys]
    damaged.append(joined(header, data))
    with load(tiny_model("llama3"), "graph=eager") as engine:
        expected = answer(engine, PROMPT)
        for content in damaged:
            saved.write_bytes(content)
            with pytest.raises(ConfigError) as caught:
                engine.load_cache(saved)
            assert str(caught.value).startswith(str(saved))
        saved.write_bytes(raw)
        assert engine.load_cache(saved) == 64
        assert answer(engine, PROMPT)[1] == expected[1]


KEYS = "pages.0.0.keys"
METADATA = "damaged cache: its metadata"
TENSORS = "damaged cache: its tensors do not match its metadata"
LIBRARY = "damaged cache: Error while deserializing header"
LIES: list[tuple[str, Callable[[dict[str, Any], dict[str, Any]], object]]] = [
    ("tokens, which do not fit", lambda about, _: about.update(tokens=str(10**9))),
    (METADATA, lambda about, _: about.update(tokens="9" * 5000)),
    (METADATA, lambda about, _: about.update(tokens="-64")),
    (TENSORS, lambda about, _: about.update(tokens="48")),
    (METADATA, lambda about, _: about.update(tokens="64,64")),
    (METADATA, lambda about, _: about.update(tokens="064")),
    (METADATA, lambda about, _: about.update(tokens="67")),
    (METADATA, lambda about, _: about.update(first_pages="1")),
    (METADATA, lambda about, _: about.update(first_pages="-1")),
    (METADATA, lambda about, _: about.update(first_pages="0,0")),
    (METADATA, lambda about, _: about.update(states="16,32")),
    (LIBRARY, lambda about, _: about.update(states=16)),
    ("saved cache of version '1', and this graphcore reads 2", lambda about, _: about.update(graphcore_cache="1")),
    (METADATA, lambda about, _: about.pop("tokens")),
    (METADATA, lambda about, _: about.pop("model.checkpoint")),
    (METADATA, lambda about, _: about.update(more="1")),
    ("no saved cache", lambda about, _: about.pop("graphcore_cache")),
    (LIBRARY, lambda _, header: header.update({"__metadata__": ["a"]})),
    ("no saved cache", lambda _, header: header.update({"__metadata__": {}})),
    (LIBRARY, lambda _, header: header[KEYS].update(shape=[1 << 40])),
    (LIBRARY, lambda _, header: header[KEYS].update(shape=[1 << 40] * 2)),
    (LIBRARY, lambda _, header: header[KEYS].update(data_offsets=[0, 1 << 60])),
    (LIBRARY, lambda _, header: header[KEYS].update(dtype="I8")),
    (LIBRARY, lambda _, header: header.update(extra=header[KEYS])),
    (LIBRARY, lambda _, header: header.pop(KEYS)),
    (TENSORS, lambda _, header: header[KEYS].update(dtype="I32")),
    (TENSORS, lambda _, header: header[KEYS].update(dtype="BF16", shape=[*header[KEYS]["shape"], 2])),
    (TENSORS, lambda _, header: header[KEYS].update(shape=[1, *header[KEYS]["shape"]])),
    (TENSORS, lambda _, header: header[KEYS].update(shape=header[KEYS]["shape"][::-1])),
    (TENSORS, lambda _, header: header["token_ids"].update(dtype="F32")),
    (TENSORS, lambda _, header: header.update(more={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})),
    (TENSORS, lambda _, header: header.update(more=header.pop(KEYS))),
]


@pytest.mark.parametrize(("message", "lie"), LIES)
def test_a_file_that_lies_with_a_right_checksum_is_refused(
    message: str, lie: Callable[[dict[str, Any], dict[str, Any]], object], saved: Path, tiny_model: Tiny
) -> None:
    header, data = parts_of(saved)
    lie(header["__metadata__"], header)
    put_together(saved, header, data)
    with load(tiny_model("llama3"), "graph=eager") as engine, pytest.raises(ConfigError, match=message):
        engine.load_cache(saved)


def test_a_header_longer_than_any_caches_is_not_parsed(tiny_model: Tiny, tmp_path: Path) -> None:
    """The library parses up to 100 MB, which may become many times as much."""
    file = tmp_path / "long"
    file.write_bytes(joined({"__metadata__": {"graphcore_cache": "2"}}, b"", padding=b" " * (1 << 24)))
    with load(tiny_model("llama3"), "graph=eager") as engine, pytest.raises(ConfigError, match="is not a saved cache"):
        engine.load_cache(file)


def test_tokens_that_the_model_does_not_have_are_refused(saved: Path, tiny_model: Tiny) -> None:
    header, data = parts_of(saved)
    at = header["token_ids"]["data_offsets"][0]
    put_together(saved, header, data[:at] + VOCAB.to_bytes(4, "little") + data[at + 4 :])
    with (
        load(tiny_model("llama3"), "graph=eager") as engine,
        pytest.raises(ConfigError, match=f"token id {VOCAB} is not"),
    ):
        engine.load_cache(saved)


def test_a_full_disk_leaves_the_old_file_and_nothing_else(saved: Path, tiny_model: Tiny) -> None:
    before = saved.read_bytes()
    with load(tiny_model("llama3"), "graph=eager") as engine:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
        try:
            with pytest.raises(ConfigError, match=r"cannot be written there: .*File too large.*; name another file"):
                engine.save_cache(PROMPT, saved)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert [path.name for path in saved.parent.iterdir()] == [saved.name]
        assert saved.read_bytes() == before
        model = tiny_model("llama3").folder / "model.safetensors"
        weights = model.read_bytes()
        for place in (saved.parent, saved.parent / "no" / "such", saved / "under", model, Path("/dev/null")):
            with pytest.raises(
                ConfigError, match=r"cannot be written there|no regular file|not a saved cache, so it is"
            ):
                engine.save_cache(PROMPT, place)
        assert model.read_bytes() == weights
        saved.write_bytes(before[:1000])  # a damaged one may be replaced
        engine.save_cache(PROMPT[:40], saved)
        assert engine.load_cache(saved) == 32


def test_others_may_read_a_file_that_the_umask_lets_them_read(saved: Path) -> None:
    beside = saved.parent / "beside"
    beside.touch()
    assert saved.stat().st_mode == beside.stat().st_mode


@pytest.mark.parametrize(
    ("name", "overrides", "prompt", "message"),
    [
        (
            "llama3",
            [],
            PROMPT[:15],
            "a prompt of 15 tokens is too short .* only prompts of 16 tokens or more",
        ),
        ("qwen3_5", ["prefill_chunk=64"], PROMPT[:40], "only whole chunks .*prefill_chunk=64.*at most 40"),
        ("qwen3_5", ["batching.snapshots=0"], PROMPT, "batching.snapshots=0 keeps no recurrent states"),
        ("llama3", [], [1] * (CONTEXT + 1), f"context_length={CONTEXT}"),
        ("llama3", [], [[1, 2], [3]], "one prompt, found 2"),
    ],
)
def test_a_prompt_that_cannot_be_saved_is_refused(
    name: str, overrides: list[str], prompt: Any, message: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    with load(tiny_model(name), *overrides) as engine, pytest.raises(ConfigError, match=message):
        engine.save_cache(prompt, tmp_path / "prompt.cache")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_file_is_refused(tiny_model: Tiny, tmp_path: Path) -> None:
    with load(tiny_model("llama3")) as engine:
        weights = tiny_model("llama3").folder / "model.safetensors"
        for file, message in (
            (tmp_path / "none", "no such file"),
            (tmp_path, "is no regular file"),
            ("", "is empty; name a path"),
            (Path("/dev/zero"), "is no regular file"),
            (weights, "is a safetensors file, but no saved cache"),
        ):
            with pytest.raises(ConfigError, match=message):
                engine.load_cache(file)
    for call in (engine.load_cache, lambda file: engine.save_cache(PROMPT, file)):
        with pytest.raises(GraphcoreError, match="closed"):
            call(tmp_path / "none")
