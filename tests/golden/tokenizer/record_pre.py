"""Records what llama.cpp makes of `TEXTS` with each name of `tokenizer.ggml.pre`: pre.json.gz beside this file.

    python record_pre.py

Needs llama-cpp-python, gguf and tokenizers. The vocabulary is trained on the texts without cutting them into words, so
that its tokens reach across the borders of words, and show where a splitter cuts. No merge makes the last text, which
is a token: splitters that ignore merges encode it as one.
"""

import gzip
import json
import tempfile
from pathlib import Path

import gguf
import llama_cpp
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

NAMES = (
    None, "default", "a.x-4.0", "afmoe", "bailingmoe", "bailingmoe2", "bloom", "chameleon", "chatglm-bpe", "codeshell",
    "cohere2moe", "command-r", "dbrx", "deepseek-coder", "deepseek-llm", "deepseek-r1-qwen", "deepseek-v3", "exaone",
    "exaone-moe", "exaone4", "f2llmv2", "falcon", "falcon-h1", "falcon3", "gigachat", "glm4", "glm5", "gpt-2", "gpt-4o",
    "gpt3-finnish", "granite-docling", "granite-embed-multi-97m", "grok-2", "hunyuan", "hunyuan-dense", "hy_v4", "jais",
    "jais-2", "jina-de", "jina-es", "jina-v1-en", "jina-v2-code", "jina-v2-de", "jina-v2-es", "jina-v5-nano",
    "joyai-llm", "kanana2", "kimi-k2", "kormo", "laguna", "lfm2", "llada-moe", "llama-bpe", "llama-v3", "llama3",
    "llama4", "megrez", "mellum", "mellum2", "midm-2.0", "minerva-7b", "minicpm5", "minimax-m2", "modern-bert", "mpt",
    "olmo", "phi-2", "pixtral", "poro-chat", "qwen2", "qwen35", "refact", "roberta-bpe", "seed-coder", "smaug-bpe",
    "smollm", "solar-open", "spark2_5", "stablelm2", "starcoder", "superbpe", "talkie", "tekken", "tiny_aya",
    "trillion", "ufakzeka", "viking", "youtu",
)  # fmt: skip
TEXTS = (
    "Hello world", " Hello  world ", "Hello, World! How are you?", "I'm we'll they'd you've SHE'S it's 'sure 'Tis",
    "WE'RE don't DON'T o'clock rock'n'roll", "1 12 123 1234 12345 123456 1234567 0.5 3.14159 1,000,000 2024-12-31",
    "abc123def 7 a1b2 v2.0.1 0x1F 1st 42nd 50% $100 #1", "  two  spaces", "   three", "tab\ttab\t\tend\t", "\n", "\n\n",
    "a\nb\n\nc\n\n\nd", "line\r\nline\r\n\r\nline", " \n \n", "a \n b", "end   ", "x\n  y\n    z\n        w",
    "def f(x):\n    return {'a': [1, 2], \"b\": x**2} != None  # comment\n", "if (a<b && c>=d || !e) { f->g += h::i; }",
    "camelCase snake_case SCREAMING HTTPServer iPhone XMLHttpRequest", "(parens) [brackets] {braces} <tags/> `ticks`",
    "a.b.c...d", "...!?,;:", "-- --- -> => == != <= >=", "user@example.com http://a.b/c?d=e&f=g#h", "\\n \\t C:\\dir",
    "~^|+=<>$`", "caf\u00e9 na\u00efve \u00fcber stra\u00dfe \u00c9cole", "\u4f60\u597d\uff0c\u4e16\u754c\u3002",
    "\u4e2d\u6587 and English \u6df7\u5408 123 \u6587\u5b57", "\u3053\u3093\u306b\u3061\u306f\u30a2\u30a4\u30a6",
    "\uc548\ub155\ud558\uc138\uc694 \uc138\uacc4", "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440!",
    "\u0393\u03b5\u03b9\u03ac \u03c3\u03bf\u03c5", "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e", "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "e\u0301x A\u030a Vi\u1ec7t", "\U0001f600\U0001f468\u200d\U0001f469 ok \U0001f680!",
    "\u20ac100 \u00bd \u00b2 \u2163",
    "\u201cquoted\u201d \u2018single\u2019 \u2014 dash \u2026", "a\u00a0b\u3000c", "don\u2019t",
    "<sentinel:12> IMGIMGABZ x",
    "A", "a ", " a", "", "'", "''s", "123abc", "   \t \n  mixed \r\n", "word.word,word;word", "Aa aA AA aa AaA",
    "1234567890123456789", "12345 a 67", "\u0967\u0968\u0969\u096a \u0661\u0662\u0663\u0664", "_x_ __init__ a_b",
    "\u4e2d\u6587and\u6df7\u5408", "x\u3042\u30aby \u3042z", "\ud55c\uad6d\uc5b4abc \u3131b", "\u0e2a\u0e27abc",
    " IMGIMGAZ", "\u00ac ", "unreachable",
)  # fmt: skip
NUM_TOKENS = 1400


def trained() -> dict[str, object]:
    """Return a byte-level vocabulary that is trained on the texts, as GGUF metadata."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS, min_frequency=1, initial_alphabet=alphabet, special_tokens=["<|bos|>", "<|eos|>"],
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(TEXTS, trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"] if "".join(merge) != TEXTS[-1]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def ids_of(metadata: dict[str, object], pre: str | None, folder: Path) -> list[list[int]]:
    """Return llama.cpp's ids of each text, with BOS where it adds one."""
    path = folder / "vocab.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        add = {str: writer.add_string, int: writer.add_uint32, list: writer.add_array}[type(value)]
        add(key, value)
    if pre is not None:
        writer.add_string("tokenizer.ggml.pre", pre)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    found = [model.tokenize(text.encode(), add_bos=True, special=True) for text in TEXTS]
    model.close()
    return found


def main() -> None:
    metadata = trained()
    kinds: list[list[list[int]]] = []
    names: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for pre in NAMES:
            found = ids_of(metadata, pre, Path(folder))
            if found not in kinds:
                kinds.append(found)
            names[pre or ""] = kinds.index(found)
    stored = {"metadata": metadata, "texts": TEXTS, "names": names, "ids": kinds}
    raw = json.dumps(stored, ensure_ascii=False, separators=(",", ":")).encode()
    (Path(__file__).parent / "pre.json.gz").write_bytes(gzip.compress(raw, mtime=0))


if __name__ == "__main__":
    main()
