"""A model answers with its author's sampling in every entrance: Python, generate, chat, HTTP, and as the page shows."""

import io
import json
from pathlib import Path

import pytest
from support.chat_folders import save_chat_folder
from support.serving import running_server
from support.task_runs import run_in

from graphcore import Engine

NEW, SEED = 24, 3
ASKED = [{"role": "user", "content": "hello there"}]
FILES = {  # as Qwen 2.5 and Gemma 3 have them
    "qwen": {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
    "gemma": {"do_sample": True, "top_k": 64, "top_p": 0.95, "cache_implementation": "hybrid"},
}
STATED = {
    "qwen": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
    "gemma": {"temperature": 1.0, "top_k": 64, "top_p": 0.95},
}


@pytest.mark.parametrize("family", FILES)
def test_every_entrance_has_the_author_s_values(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_chat_folder(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(FILES[family]), encoding="utf-8")
    stated = STATED[family]
    with Engine.load(folder, graph="eager", device="cpu") as engine:
        expected = engine.generate([ASKED], NEW, seed=SEED, **stated)[0].text
        assert expected != engine.generate([ASKED], NEW, temperature=0)[0].text
        assert engine.generate([ASKED], NEW, seed=SEED)[0].text == expected
        assert "".join(event.text for event in engine.stream(ASKED, NEW, seed=SEED)) == expected
        asked = {"messages": ASKED, "seed": SEED, "max_tokens": NEW}
        with running_server(lambda: engine, has_own_sampling=True) as running, running.client() as http:
            answer = http.post("/v1/chat/completions", json=asked).json()
            assert answer["choices"][0]["message"]["content"] == expected
            told = http.get("/status").json()["sampling"]  # what the page shows in empty fields
            assert {name: told[name] for name in stated} == stated
            greedy = http.post("/v1/chat/completions", json={**asked, "temperature": 0}).json()
            assert greedy["choices"][0]["message"]["content"] != expected
    source = f"model.checkpoint={folder}"
    settings = (source, f"seed={SEED}", f"max_new_tokens={NEW}")
    (tmp_path / "generate").mkdir()
    (tmp_path / "chat").mkdir()
    generated = run_in(tmp_path / "generate", *settings, f"prompt={ASKED[0]['content']}")
    assert generated.record["text"] == expected
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{ASKED[0]['content']}\n"))
    chatted = run_in(tmp_path / "chat", *settings, "task=chat")
    assert [turn["text"] for turn in chatted.record["turns"]] == [expected]
    for run in (generated, chatted):
        assert {name: run.record["sampling"][name] for name in stated} == stated
    assert capsys.readouterr().err.count("(generation_config.json)]") == 2
