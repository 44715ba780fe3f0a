"""llama.cpp's samplers on random logits and histories: the judge of ours (tests/golden/llamacpp/samplers.json).

Legend: V vocabulary.
"""

import ctypes
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf

from graphcore.sampling_params import DRY_BREAKERS
from support.golden_vocab import NAMES, golden_vocab

PIECES = ("a", "b", "c", "d", "e", "f", "\u010a", ":", '"', "*", "a*")  # of the histories; GPT-2 spells a new line so
VOCABULARY = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": PIECES,
    "tokenizer.ggml.token_type": (1,) * len(PIECES),
    "tokenizer.ggml.merges": ("a *",),
}
NUM_CUTS, NUM_HISTORIES, VOCAB = 200, 200, 32
LONGEST = 4096  # tokens that llama.cpp looks at where ours look at all


def cut_cases() -> list[dict[str, Any]]:
    """Return logits, [V] with two digits and no two alike, and parameters that cut them; XTC is certain or off."""
    source, cases = random.Random(67), []
    for _ in range(NUM_CUTS):
        spread = source.choice((1.0, 1.5, 2.5))
        logits: list[float] = []
        while len(logits) < VOCAB:
            one = round(source.gauss(0, spread), 2)
            if one not in logits:
                logits.append(one)
        params = {
            "temperature": source.choice((0.6, 1.0, 1.7)),
            "top_n_sigma": source.choice((0.0, 0.0, 1.0, 2.0)),
            "top_k": source.choice((0, 0, 5, 12)),
            "top_p": source.choice((1.0, 1.0, 0.92, 0.7)),
            "min_p": source.choice((0.0, 0.0, 0.03, 0.21)),
            "xtc_probability": source.choice((0.0, 1.0, 1.0)),
            "xtc_threshold": source.choice((0.02, 0.1, 0.24, 0.5, 0.6)),
        }
        cases.append({"logits": logits, "params": params})
    return cases


def history_cases() -> list[dict[str, Any]]:
    """Return answers so far with repetitions, logits [V], and penalties of what was answered; V tokens are PIECES."""
    source, cases = random.Random(68), []
    for _ in range(NUM_HISTORIES):
        num_tokens, answer = source.choice((2, 4, len(PIECES))), list[int]()
        length = source.randrange(1, 60)
        while len(answer) < length:
            begin = source.randrange(len(answer) + 1)
            repeated = answer[begin : begin + source.randrange(8)] if source.random() < 0.6 else []
            answer += repeated or [source.randrange(num_tokens)]
        params = {
            "repetition_penalty": source.choice((1.0, 1.0, 1.3, 0.8)),
            "frequency_penalty": source.choice((0.0, 0.0, 0.5, -0.25)),
            "presence_penalty": source.choice((0.0, 0.0, 0.7, -1.0)),
            "dry_multiplier": source.choice((0.0, 0.8, 0.8, 2.0)),
            "dry_base": source.choice((1.0, 1.75, 3.0, 0.9)),
            "dry_allowed_length": source.choice((1, 2, 2, 4)),
            "dry_penalty_last_n": source.choice((-1, -1, 0, 1, 7, 30)),
        }
        logits = [round(source.gauss(0, 2), 2) for _ in PIECES]
        cases.append({"answer": answer, "logits": logits, "params": params})
    return cases


class LlamaCppSamplers:
    """llama.cpp's samplers with one vocabulary.

    Args:
        metadata: keys tokenizer.ggml.* of the vocabulary.
        folder: an existing folder for its file.
    """

    def __init__(self, metadata: dict[str, object], folder: Path) -> None:
        import llama_cpp

        path = folder / "vocabulary.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        add = {str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool, tuple: writer.add_array}
        for key, value in metadata.items():
            if key == "general.architecture":
                continue
            add[type(value)](key, value)  # type: ignore[operator]  # one function for each type
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        self._library = llama_cpp
        self._model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        self._vocab = llama_cpp.llama_model_get_vocab(self._model.model)

    def cut(self, logits: Sequence[float], params: dict[str, Any]) -> list[int]:
        """Return the tokens that may be drawn, sorted; the order is that of graphcore's docs/prompts.md."""
        lib = self._library
        cuts = (
            lib.llama_sampler_init_top_n_sigma(params["top_n_sigma"]),
            lib.llama_sampler_init_top_k(params["top_k"]),
            lib.llama_sampler_init_temp(params["temperature"]),
            lib.llama_sampler_init_top_p(params["top_p"], 1),
            lib.llama_sampler_init_min_p(params["min_p"], 1),
        )
        kept = self._apply(dict(enumerate(logits)), cuts)
        xtc = lib.llama_sampler_init_xtc(params["xtc_probability"], params["xtc_threshold"], 1, 0)
        return sorted(self._apply({at: logits[at] for at in kept}, [xtc]))  # at a temperature of 1, as llama.cpp's own

    def penalise(self, logits: Sequence[float], answer: Sequence[int], params: dict[str, Any]) -> dict[int, float]:
        """Return the logits after the penalties, by token."""
        lib = self._library
        own = [params[name] for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")]
        penalties = lib.llama_sampler_init_penalties(len(logits), LONGEST, *own)
        return self._apply(dict(enumerate(logits)), [penalties, self._dry(params)], answer)

    def breakers(self) -> list[int]:
        """Return the tokens that break a sequence.

        With an allowed length of 0 DRY penalises each token of the history but the oldest, unless it is a breaker.
        """
        count = self._model.n_vocab()
        params = {"dry_multiplier": 1.0, "dry_base": 1.0, "dry_allowed_length": 0, "dry_penalty_last_n": count + 1}
        found = self._apply(dict.fromkeys(range(count), 0.0), [self._dry(params)], [0, *range(count)])
        return [at for at, logit in sorted(found.items()) if logit == 0.0]

    def _dry(self, params: dict[str, Any]) -> Any:
        texts = (ctypes.c_char_p * len(DRY_BREAKERS))(*(text.encode() for text in DRY_BREAKERS))
        last = params["dry_penalty_last_n"]
        own = params["dry_multiplier"], params["dry_base"], params["dry_allowed_length"], LONGEST if last < 0 else last
        return self._library.llama_sampler_init_dry(self._vocab, *own, texts, len(texts))

    def _apply(self, logits: dict[int, float], samplers: Sequence[Any], answer: Sequence[int] = ()) -> dict[int, float]:
        """Return the tokens that are left, and their logits."""
        lib, infinite = self._library, float("-inf")
        tokens = (lib.llama_token_data * len(logits))(*((at, logit, 0.0) for at, logit in logits.items()))
        left = lib.llama_token_data_array(data=tokens, size=len(logits), selected=-1, sorted=False)
        for sampler in samplers:
            for token in answer:
                lib.llama_sampler_accept(sampler, token)
            lib.llama_sampler_apply(sampler, ctypes.byref(left))
            lib.llama_sampler_free(sampler)
        found = {left.data[at].id: left.data[at].logit for at in range(left.size)}
        return {at: logit for at, logit in found.items() if logit != infinite}


def judged(folder: Path) -> dict[str, Any]:
    """Return all cases with llama.cpp's answers: samplers.json. Files are written to `folder`."""
    judge = LlamaCppSamplers(VOCABULARY, folder)
    breakers = {name: LlamaCppSamplers(golden_vocab(name).metadata, folder).breakers() for name in NAMES}
    return {
        "cuts": [{**case, "kept": judge.cut(**case)} for case in cut_cases()],
        "histories": [{**case, "penalised": [*judge.penalise(**case).values()]} for case in history_cases()],
        "breakers": {"histories": judge.breakers(), **breakers},
    }
