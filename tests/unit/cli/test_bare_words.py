"""What has no key is a task, the prompt, or refused with what it could stand for."""

from pathlib import Path
from typing import get_type_hints

import pytest
from support.cases import in_case

from graphcore.cli.bare_words import with_keys
from graphcore.cli.quoting import prepared_arguments
from graphcore.config import foreign_names
from graphcore.config.conf_folder import group_options
from graphcore.config.settings import Settings
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
        ("hf.co/a/B-GGUF:Q4_K_M Hi", ["model.checkpoint=hf:a/B-GGUF:Q4_K_M", "prompt=Hi"]),
        ("pull https://huggingface.co/a/b", ["task=models", "task.pull=true", "model.checkpoint=hf:a/b"]),
        ("rm hf.co/a/b", ["task=models", "task.remove=hf:a/b"]),
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
    (["Why", "is", "the", "sky", "blue"], "put a prompt of several words in quotes: 'Why is the sky blue'"),
    (["hello", "gemma3"], "write key=value, such as prompt='hello'"),
    (["run", "smollm2:135m", "Hi"], "(did you mean smollm2?)"),
    (["run", "mistral"], "(did you mean mistral_small?)"),
    (["run", "deepseek-r1"], "deepseek_v3"),
    (["pull", "llama3.2"], "(did you mean llama3?)"),
    (["show", "nothing"], "and no model's name; graphcore list has the names, others are hf:org/name"),
    (["pull", "HuggingFaceTB/SmolLM3-3B"], "did you mean hf:HuggingFaceTB/SmolLM3-3B,"),
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


FOREIGN = [
    ("stop smollm2", "there is no 'stop': a model runs only inside the process that was started; end that with Ctrl-C"),
    ("push x", "there is no 'push': there is no Modelfile and no registry"),
    ("cp a b", "there is no Modelfile"),
    ("create x -f Modelfile", "there is no Modelfile, settings stand in ~/.config/graphcore/config.yaml"),
    ("launch", "graphcore serve NAME is a server"),
    ("login", "HF_TOKEN"),
    ("signin", "HF_TOKEN"),
    ("run smollm2 --verbose Hi", "unknown option --verbose; a line with the speed follows an answer"),
    ("serve smollm2 --port 8139", "settings are written task.port=8139,"),
    ("serve smollm2 --port=8139", "settings are written task.port=8139,"),
    ("serve smollm2 --host 0.0.0.0", "task.host=0.0.0.0,"),
    ("serve smollm2 --api-key x", "task.api_key=x,"),
    ("smollm2 --ctx-size 4096", "context_length=4096,"),
    ("smollm2 --max-model-len 4096", "context_length=4096,"),
    ("smollm2 -c 4096", "or context_length=4096"),
    ("smollm2 --temp 0.5", "sampling.temperature=0.5,"),
    ("smollm2 --top-k 5", "sampling.top_k=5,"),
    ("smollm2 -t 4", "threads=4,"),
    ("smollm2 --threads 4", "threads=4,"),
    ("smollm2 --seed 4", "seed=4,"),
    ("smollm2 -n 16", "max_new_tokens=16,"),
    ("smollm2 --n-predict 16", "max_new_tokens=16,"),
    ("smollm2 --dtype bf16", "dtype=bf16,"),
    ("smollm2 --dtype smollm2", "dtype=value,"),
    ("smollm2 -ngl 99", "streaming=auto"),
    ("smollm2 --gpu-memory-utilization 0.9", "streaming.memory_budget=20GB"),
    ("smollm2 --tensor-parallel-size 2", "parallel=ring"),
    ("--model x.gguf", "a model is a word without an option"),
]


def test_words_and_options_of_other_programs_are_refused_with_what_stands_for_them_here() -> None:
    for line, said in FOREIGN:
        with in_case(line):
            with pytest.raises(ConfigError) as caught:
                prepared_arguments(line.split())
            assert said in str(caught.value)
            assert "did you mean" not in str(caught.value)
            assert caught.value.is_unknown
    with pytest.raises(ConfigError, match="a prompt is written without an option, in quotes"):
        prepared_arguments(["smollm2", "-p", "Why is it?"])


def test_every_key_that_stands_for_a_foreign_one_exists() -> None:
    for name, key in foreign_names.KEYS.items():
        group, _, leaf = key.rpartition(".")
        with in_case(name):
            known = (
                foreign_names.tasks_by_key()
                if group == "task"
                else get_type_hints(get_type_hints(Settings)[group] if group else Settings)
            )
            assert leaf in known


def test_no_task_is_suggested_for_a_word_that_is_near_none() -> None:
    with pytest.raises(ConfigError) as caught:
        with_keys(["hello"])
    assert "did you mean" not in str(caught.value)
