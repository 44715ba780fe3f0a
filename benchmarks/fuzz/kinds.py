"""What is damaged and who reads it: one `Kind` for each file that comes from strangers, or out of the cache folder.

A reader returns when the file is good enough for it, and raises graphcore's own error otherwise; nothing else.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from random import Random

import torch

from fuzz import seeds
from fuzz.mutation import damage_bytes, damage_json, damage_text
from graphcore.arch.config_from_json import load_model_config
from graphcore.arch.registry import architecture_of
from graphcore.checkpoint.gguf_checkpoint import GGUFCheckpoint
from graphcore.checkpoint.sources.cached_file import find_whole, keep
from graphcore.config.compose import compose_settings
from graphcore.config.settings import Settings
from graphcore.engine.loading.open_model import open_model
from graphcore.engine.loading.prepare_model import prepare_model
from graphcore.errors import TemplateError
from graphcore.kernels.cpu.kernel_packing import KernelPacking
from graphcore.kernels.cpu.library import FORMAT_NUMBERS, find_library
from graphcore.progress import ignore_progress
from graphcore.quant import FORMATS
from graphcore.tokenizer.chat_template import ChatTemplate
from graphcore.tokenizer.template_sandbox import compile_template, render_template
from graphcore.tokenizer.tokenizer import Tokenizer

TEXT = "the <|end|> th\u00e9 123  \U0001f600"
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "\u00fc"}]
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Kind:
    """One kind of file.

    Attributes:
        whole: undamaged files, which the reader must take.
        damage: returns one of them with faults.
        read: takes a file's bytes.
    """

    whole: Sequence[bytes]
    damage: Callable[[bytes, Random], bytes]
    read: Callable[[bytes], object]


def _gguf(folder: Path) -> Kind:
    whole = [seeds.gguf_bytes(folder, tokenizer) for tokenizer in ("gpt2", "llama", "gemma4")]
    whole += [seeds.packed_bytes(folder, config) for config in seeds.BY_LAYER]
    return Kind(
        whole,
        partial(damage_bytes, header=11000),
        partial(_load, folder / "model.gguf", folder / "model.gguf", graph="eager"),  # see `_load`
    )


def _safetensors(folder: Path) -> Kind:
    _write_folder(folder)
    path = folder / "model.safetensors"
    return Kind([path.read_bytes()], partial(damage_bytes, header=1400), partial(_load, folder, path))


def _index(folder: Path) -> Kind:
    _write_folder(folder)
    (folder / "model.safetensors").unlink()
    stored = list(seeds.tensors().items())
    places = {name: SHARDS[index % 2] for index, (name, _) in enumerate(stored)}
    for shard in SHARDS:
        (folder / shard).write_bytes(seeds.safetensors_bytes({n: value for n, value in stored if places[n] == shard}))
    whole = json.dumps({"metadata": {"total_size": 113000}, "weight_map": places}).encode()
    return Kind([whole], damage_json, partial(_load, folder, folder / INDEX))


def _config(folder: Path) -> Kind:
    _write_folder(folder)
    path = folder / "config.json"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        config = load_model_config(folder)
        architecture_of(config).spec(config)
        if config.model_type == "llama":
            _load(folder, path, content)

    return Kind([json.dumps(config).encode() for config in seeds.CONFIGS], damage_json, read)


def _tokenizer(folder: Path) -> Kind:
    return _text_kind(folder, "tokenizer.json", seeds.tokenizer_json())


def _tokenizer_config(folder: Path) -> Kind:
    return _text_kind(folder, "tokenizer_config.json", seeds.tokenizer_config())


def _text_kind(folder: Path, name: str, whole: bytes) -> Kind:
    _write_folder(folder)

    def read(content: bytes) -> None:
        (folder / name).write_bytes(content)
        tokenizer = Tokenizer.from_folder(folder)
        ids = tokenizer.encode(TEXT)
        tokenizer.decode(ids)
        tokenizer.decode([0, 299, 10**6])
        assert isinstance(tokenizer.eos_token_ids, tuple), "what engines ask for"

    return Kind([whole], damage_json, read)


def _template(_: Path) -> Kind:
    def read(content: bytes) -> None:
        compiled, reason = compile_template(content.decode("utf-8", "surrogatepass"))
        if compiled is None:
            raise TemplateError(f"the chat template cannot be read: {reason}")
        text, reason = render_template(compiled, {"messages": CHAT, "bos_token": "b"}, 1 << 20)
        if text is None:
            raise TemplateError(f"the chat template refuses these messages: {reason}")

    return Kind(*_template_seeds(), read)


def _template_process(_: Path) -> Kind:
    def read(content: bytes) -> None:
        ChatTemplate(content.decode("utf-8", "surrogatepass"), "template").render(CHAT, {"bos_token": "b"})

    return Kind(*_template_seeds(), read)


def _template_seeds() -> tuple[list[bytes], Callable[[bytes, Random], bytes]]:
    def damage(content: bytes, random: Random) -> bytes:
        return damage_text(content.decode(), random).encode("utf-8", "surrogatepass")

    return [text.encode() for text in seeds.TEMPLATES], damage


def _packed(_: Path) -> Kind:
    """Weights' blocks of every format that has a kernel; damaged bytes are still weights, whatever they mean."""
    golden = seeds.golden_blocks()
    library = _kernels()
    names = [name for name in golden if name in FORMAT_NUMBERS and FORMATS[name].block_elements > 1]

    def read(content: bytes) -> None:
        name = names[content[0] % len(names)] if content else names[0]
        width, rows = golden[name].shape[1], 1 + (content[1] % 40 if len(content) > 1 else 0)
        raw = torch.frombuffer(bytearray(content[2:].ljust(rows * width, b"\x7f")), dtype=torch.uint8)
        raw = raw[: rows * width].view(rows, width)
        packing = KernelPacking(name, rows, FORMATS[name].block_elements, library)
        packed = packing.pack(raw)
        by_definition = FORMATS[name].dequantize(raw.flatten(), (rows, packing.columns), torch.float32)
        torch.testing.assert_close(packing.unpack(packed, torch.float32), by_definition, rtol=0, atol=0, equal_nan=True)
        packing.linear(torch.ones(3, packing.columns), packed, None, "wide")

    whole = [bytes([index, 40]) + golden[name][:40].tobytes() for index, name in enumerate(names)]
    return Kind(whole, damage_bytes, read)


def _kept_tokenizer(folder: Path) -> Kind:
    """A tokenizer in the cache folder; whatever is there, the vocabulary's own tokens come out."""
    (folder / "model.gguf").write_bytes(seeds.gguf_bytes(folder, "gpt2"))
    metadata = GGUFCheckpoint(folder / "model.gguf").metadata
    right = Tokenizer.from_gguf(metadata, "m", folder).encode(TEXT)
    (path,) = (folder / "tokenizers").glob("*.json")

    def read(content: bytes) -> None:
        path.write_bytes(content)
        assert Tokenizer.from_gguf(metadata, "m", folder).encode(TEXT) == right, "other tokens"

    return Kind([path.read_bytes()], damage_json, read)


def _download_record(folder: Path) -> Kind:
    """What says that a download is whole; if it does not, the file is fetched again."""
    (folder / "made").write_bytes(b"model")
    keep(folder / "made", folder, "model.gguf", "pypi:a@1/model.gguf", "0" * 64)
    path = folder / "source.json"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        find_whole(folder)

    return Kind([path.read_bytes()], damage_json, read)


MAKERS: dict[str, Callable[[Path], Kind]] = {
    "gguf": _gguf,
    "safetensors": _safetensors,
    "index": _index,
    "config": _config,
    "tokenizer": _tokenizer,
    "tokenizer_config": _tokenizer_config,
    "template": _template,
    "template_process": _template_process,
    "packed": _packed,
    "kept_tokenizer": _kept_tokenizer,
    "download_record": _download_record,
}
"""Each needs an empty folder of its own."""


def _write_folder(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(seeds.safetensors_bytes(seeds.tensors()))
    (folder / "config.json").write_text(json.dumps(seeds.CONFIG), encoding="utf-8")
    (folder / "tokenizer.json").write_bytes(seeds.tokenizer_json())
    (folder / "tokenizer_config.json").write_bytes(seeds.tokenizer_config())


def _load(checkpoint: Path, path: Path, content: bytes, graph: str = "auto") -> None:
    """Do all that loading does, but for building programs: every weight is read, unpacked and folded.

    With graph=auto a decode step is traced as well, which takes as long as the rest and depends on the settings of the
    file alone: the kind `config` damages those.
    """
    path.write_bytes(content)
    settings = _settings(graph)
    settings.model.checkpoint = str(checkpoint)
    model = open_model(settings.model, 0, path.parent, ignore_progress)
    loader = prepare_model(settings, model).loader
    for name in loader.sources:
        loader.dense(name, torch.float32)
    if model.tokenizer is not None:
        model.tokenizer.decode(model.tokenizer.encode(TEXT))


@cache
def _settings(graph: str = "auto") -> Settings:
    return compose_settings([f"graph={graph}"])  # takes longer than a case


@cache
def _kernels() -> str:
    library = find_library(_settings().cache_folder / "kernels")
    assert library is not None, "packed weights need the kernels"
    return str(library)
