"""Cuts, penalties and DRY's breakers are those of llama.cpp's samplers (tests/golden/llamacpp/samplers.json)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import in_case
from support.engine_fakes import draw_of
from support.golden_vocab import NAMES, golden_tokenizer, golden_vocab
from support.llama_cpp_samplers import judged

from graphcore.kernels.ops.draw import Draw, changed_by_host, kept_weights
from graphcore.sampling_params import DRY_BREAKERS, SamplingParams

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[3] / "golden" / "llamacpp" / "samplers.json").read_text(encoding="utf-8")
)
CPU = torch.device("cpu")


def test_cuts_keep_the_tokens_that_llama_cpp_keeps() -> None:
    for case in GOLDEN["cuts"]:
        with in_case(case["params"]):
            logits, row = changed_by_host(torch.tensor(case["logits"]), draw_of(**case["params"]))
            if row.mask is not None:
                logits = logits.masked_fill(~row.mask, float("-inf"))
            assert kept_weights(logits, row).nonzero().flatten().tolist() == case["kept"]


def test_penalties_of_an_answer_are_those_of_llama_cpp() -> None:
    for case in GOLDEN["histories"]:
        with in_case(case["params"], case["answer"]):
            params, logits = SamplingParams(**case["params"]), torch.tensor(case["logits"])
            draw = Draw.after((), params, len(logits), CPU, case["answer"], GOLDEN["breakers"]["histories"])
            expected = torch.tensor(case["penalised"])
            assert torch.allclose(changed_by_host(logits, draw)[0], expected, rtol=1e-6, atol=1e-5)


def test_breakers_are_the_tokens_that_llama_cpp_finds() -> None:
    for name in NAMES:
        with in_case(name):
            vocab = len(golden_vocab(name).metadata["tokenizer.ggml.tokens"])  # type: ignore[arg-type]  # a tuple
            texts = golden_tokenizer(name).token_texts(vocab)
            found = [at for at, own in enumerate(texts) if any(breaker in own for breaker in DRY_BREAKERS)]
            assert found == GOLDEN["breakers"][name]


@pytest.mark.slow
def test_llama_cpp_still_answers_what_was_recorded(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (pip install -e '.[peers]')")
    found = judged(tmp_path)
    assert found["breakers"] == GOLDEN["breakers"]
    assert found["cuts"] == GOLDEN["cuts"]
    for one, recorded in zip(found["histories"], GOLDEN["histories"], strict=True):
        assert one.pop("penalised") == pytest.approx(recorded["penalised"], rel=1e-6, abs=1e-5)
        assert one == {name: value for name, value in recorded.items() if name != "penalised"}
