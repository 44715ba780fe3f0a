"""What has no key is a task, the prompt, or refused with what it could stand for."""

from pathlib import Path

import pytest
from support.cases import in_case

from graphcore.cli.bare_words import with_keys
from graphcore.cli.quoting import prepared_arguments
from graphcore.config.conf_folder import group_options
from graphcore.errors import ConfigError

PROMPTS = [
    "Is 2+2=4?",
    "What is x = 3?",
    "Why?\n",
    "-5 degrees, is that cold?",
    "+ or -",
    "Où est la gare, s'il vous plaît ?",
    "日本の首都は?",
    "北京=首都?",
    "ما هي عاصمة فرنسا؟",
    "भारत",
    "ไทย",
]


@pytest.mark.parametrize("text", PROMPTS)
def test_a_text_with_white_space_or_of_a_script_without_it_is_the_prompt(text: str) -> None:
    assert with_keys(["seed=1", text]) == ["seed=1", f"prompt={text}"]
    assert prepared_arguments([text, "-m"])[0::2] == [
        "-m",
        "sampling=greedy",
    ]  # flags beside it do not take it as theirs


@pytest.mark.parametrize("task", group_options()["task"])
def test_a_tasks_name_is_the_task(task: str) -> None:
    assert with_keys([task]) == [f"task={task}"]


def test_a_model_s_name_or_place_is_the_model_and_a_word_behind_it_the_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.gguf").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").touch()
    (tmp_path / "chat").mkdir()
    (tmp_path / "chat" / "config.json").touch()
    for words, settings in (
        ("smollm2", ["model=smollm2"]),
        ("chat smollm2", ["task=chat", "model=smollm2"]),
        ("smollm2 chat", ["model=smollm2", "task=chat"]),
        ("my.gguf Hi", ["model.checkpoint=my.gguf", "prompt=Hi"]),
        ("folder bench seed=1", ["model.checkpoint=folder", "task=bench", "seed=1"]),
        ("hf:Qwen/Qwen3-1.7B Hi", ["model.checkpoint=hf:Qwen/Qwen3-1.7B", "prompt=Hi"]),
        ("run gemma3", ["task=chat", "model=gemma3"]),
        ("run gemma3 Hi", ["task=generate", "model=gemma3", "prompt=Hi"]),
        ("list", ["task=models"]),
        ("ls", ["task=models"]),
        ("pull smollm3", ["task=models", "task.pull=true", "model=smollm3"]),
        ("show smollm3", ["task=models", "task.show=true", "model=smollm3"]),
        ("rm smollm3", ["task=models", "task.remove=smollm3"]),
    ):
        with in_case(words):
            assert with_keys(words.split()) == settings


@pytest.mark.parametrize(
    "argument",
    ["prompt=a b", "+task.foo=1", "++x.y=2", "~stop", "hydra.run.dir=a b", "sampling.top_k=3", "x@y=z", "foo=bar"],
)
def test_a_setting_stays_as_it_is(argument: str) -> None:
    assert with_keys([argument]) == [argument]


REFUSED = [
    (["caht"], "did you mean task=chat?"),
    (["Chat"], "did you mean task=chat?"),
    (["gema3"], "did you mean model=gemma3?"),
    (["some/model.gguf"], "'some/model.gguf' is no file or folder of a model here"),
    (["gemma3", "caht"], "did you mean task=chat?"),
    (["gemma3", "smollm2"], "'gemma3' and 'smollm2' are both given as the model; choose one"),
    (["gemma3", "model=smollm2"], "'gemma3' and 'smollm2' are both given as the model"),
    (["gemma3", "Hi", "Bob"], "'Hi' and 'Bob' are both given as the prompt"),
    (["gemma3", "Hi", "there"], "'there' is a second prompt; put the whole prompt into one pair"),
    (["rm", "smollm2", "gemma3"], "a model has no effect with rm"),
    (["list", "smollm2"], "a model has no effect with list"),
    (["pull"], "pull needs the name of a model"),
    (["show"], "show needs the name of a model"),
    (["rm"], "rm needs the name of a cached model"),
    (["help"], "did you mean --help?"),
    (["hello"], "'hello' is no setting and no task; write key=value, such as prompt='hello'"),
    (["Größe"], "prompt='Größe'"),  # one word of a script with white space
    (["2+2=4?"], "prompt='2+2=4?'"),
    ([""], "an argument is empty"),
    (["E=mc2 is what?"], "unknown key 'E'; a prompt with a = in it is written prompt='E=mc2 is what?'"),
    (["promt=a b"], "unknown key 'promt' (did you mean 'prompt'?)"),
    (["prompt = a b"], "has a space before its =; write prompt=..., without spaces there"),
    (["a b", "c d"], "'a b' and 'c d' are both given as the prompt; put the whole prompt into one pair"),
    (["a b", "prompt=c"], "'a b' and 'c' are both given as the prompt"),
    (["chat", "bench"], "'chat' and 'bench' are both given as the task; choose one"),
    (["task=plan", "bench"], "'plan' and 'bench' are both given as the task"),
]


def test_what_is_none_of_these_is_refused() -> None:
    for arguments, said in REFUSED:
        with in_case(arguments, said):
            with pytest.raises(ConfigError) as caught:
                with_keys(arguments)
            assert said in str(caught.value)
            assert caught.value.is_unknown


def test_no_task_is_suggested_for_a_word_that_is_near_none() -> None:
    with pytest.raises(ConfigError) as caught:
        with_keys(["hello"])
    assert "did you mean" not in str(caught.value)
