"""Records what llama.cpp answers: greedy tokens of 16 prompts, and its two likeliest tokens at every position.

    python record.py SmolLM2-135M-Instruct.Q4_1.gguf smollm2.json
    python record.py gemma3-270m-Q4_K_M.gguf gemma3.json

Needs llama-cpp-python and gguf. The file is run twice: as it is (llama.cpp then rounds activations to 8 bits for its
packed matrix products and keeps keys and values in half precision), and with every weight unpacked to float32 and a
float32 cache, fed the tokens that the first run chose.
"""

import json
import sys
import tempfile
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

NEW_TOKENS = 64
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Q: What is 17 + 25?\nA:",
    "The three most important inventions of the 19th century were",
    "import numpy as np\n\nx = np.arange(10)\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 2, 4, 8, 16,",
    "La Révolution française commença en",
    "Die Hauptstadt von Deutschland ist",
    "Water boils at 100 degrees Celsius because",
    '{"name": "Alice", "age": 30, "city":',
    "Shall I compare thee to a summer's day?\n",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "Ingredients:\n- 2 cups flour\n- 1 cup sugar\n\nInstructions:\n1.",
    "In physics, the second law of thermodynamics states that the total entropy of an isolated system",
)


def unpacked(path: Path, out: Path) -> Path:
    """Write the model again with every tensor in float32, by gguf-py alone; with what llama.cpp asks for besides."""
    reader = gguf.GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, arch)
    for name, field in reader.fields.items():
        is_empty_vocabulary = field.name == gguf.Keys.Tokenizer.MODEL and gguf.Keys.Tokenizer.LIST not in reader.fields
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type") or is_empty_vocabulary:
            continue
        is_array = field.types[0] is gguf.GGUFValueType.ARRAY
        writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if is_array else None)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    if gguf.Keys.Tokenizer.LIST not in reader.fields:
        add_tokens(writer, next(int(one.shape[1]) for one in reader.tensors if one.name == "token_embd.weight"))
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, values.reshape(tuple(int(size) for size in reversed(tensor.shape))))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def add_tokens(writer: gguf.GGUFWriter, count: int) -> None:
    """Add a vocabulary of so many tokens, which llama.cpp wants even if it is given token ids."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{index}" for index in range(count)])
    writer.add_token_types([int(gguf.TokenType.NORMAL)] * count)
    writer.add_token_merges(["t 0"])


def load(path: Path, **options: object) -> llama_cpp.Llama:
    return llama_cpp.Llama(
        str(path), n_ctx=256, n_threads=2, n_threads_batch=2, n_gpu_layers=0, logits_all=True, verbose=False, **options
    )


def run(model: llama_cpp.Llama, prompt_ids: list[int], forced: list[int] | None) -> dict[str, list]:
    """Feed the prompt at once and then token by token: the likeliest, or the forced ones."""
    model.reset()
    model.eval(prompt_ids)
    top_ids, margins = [], []
    for step in range(NEW_TOKENS):
        logits = model.scores[model.n_tokens - 1]
        second, first = np.argsort(logits)[-2:]
        top_ids.append(int(first))
        margins.append(round(float(logits[first] - logits[second]), 4))
        model.eval([forced[step] if forced else int(first)])
    return {"top_ids": top_ids, "margins": margins}


def main(path: Path, out: Path) -> None:
    cases = []
    model = load(path)
    for prompt in PROMPTS:
        prompt_ids = model.tokenize(prompt.encode(), add_bos=True, special=True)
        greedy = run(model, prompt_ids, None)
        cases.append({"prompt": prompt, "prompt_ids": prompt_ids, "token_ids": greedy["top_ids"], "stored": greedy})
    model.close()
    with tempfile.TemporaryDirectory() as folder:
        wide = unpacked(path, Path(folder) / "f32.gguf")
        model = load(wide, type_k=gguf.GGMLQuantizationType.F32, type_v=gguf.GGMLQuantizationType.F32)
        for case in cases:
            case["float32"] = run(model, case["prompt_ids"], case["token_ids"])
        model.close()
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    out.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
