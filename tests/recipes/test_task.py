"""A task is one module and one yaml: it runs, --help documents it, and its settings are checked like any other's."""

from pathlib import Path

import pytest
from checkout import Checkout

pytestmark = pytest.mark.slow

TINY = Path(__file__).parents[1] / "golden" / "tiny" / "llama3"
MODULE = '''"""task=repeat: answer a prompt several times, and say whether the answers are the same."""

from dataclasses import dataclass

from omegaconf import MISSING

from graphcore.engine.engine import Engine
from graphcore.errors import ConfigError
from graphcore.tasks.task import Context, Record, Task


@dataclass
class RepeatSettings:
    """conf/task/repeat.yaml."""

    name: str = MISSING
    times: int = MISSING


def run(context: Context, task: RepeatSettings) -> Record:
    """Print how many answers differ from the first."""
    if task.times < 2:
        raise ConfigError(f"task.times={task.times} repeats nothing; ask for 2 or more")
    with Engine.from_settings(context.settings) as engine:
        prompts = [context.settings.prompt_ids] * task.times
        answers = [answer.token_ids for answer in engine.generate(prompts, max_new_tokens=3)]
    differing = sum(answer != answers[0] for answer in answers)
    context.console.line(f"{differing} of {task.times} answers differ")
    return {"repeat": {"answers": [list(answer) for answer in answers], "differing": differing}}


TASK = Task("repeat", RepeatSettings, run)
'''
YAML = """# Answer a prompt several times.
name: repeat
times: 3 # answers that are compared
"""
RUN = ("repeat", f"model.checkpoint={TINY}", "prompt_ids=[1,2,3]", "graph=eager", "device=cpu", "progress=false")


def test_a_task_is_one_module_and_one_yaml(checkout: Checkout) -> None:
    assert checkout.run(*RUN).status == 2, "there is such a task before it is added"
    checkout.add("graphcore/tasks/commands/repeat.py", MODULE)
    checkout.add("conf/task/repeat.yaml", YAML)
    checkout.assert_follows("A task")
    done = checkout.run(*RUN, "batch_size=4", "task.times=4")
    assert done.status == 0, done.error
    assert done.out == "0 of 4 answers differ\n"
    assert done.result is not None
    assert (done.result["task"], done.result["status"]) == ("repeat", "ok")
    assert done.result["settings"]["task"] == {"name": "repeat", "times": 4}
    answers = done.result["repeat"]["answers"]
    assert len(answers) == 4
    assert len(answers[0]) == 3
    assert answers.count(answers[0]) == 4
    checkout.assert_linter_passes()


def test_a_new_task_is_documented_and_refused_like_any_other(checkout: Checkout) -> None:
    checkout.add("graphcore/tasks/commands/repeat.py", MODULE)
    checkout.add("conf/task/repeat.yaml", YAML)
    assert "repeat                      Answer a prompt several times" in checkout.run("--help").out
    assert "task.times=3                answers that are compared" in checkout.run("--help", "repeat").out
    misspelt = checkout.run(*RUN, "task.tmes=4")
    assert misspelt.status == 2
    assert "unknown key 'task.tmes' (did you mean 'times'?)" in misspelt.error
    refused = checkout.run(*RUN, "task.times=1")
    assert refused.result is not None
    assert (refused.status, refused.result["task"], refused.result["status"]) == (1, "repeat", "failed")
    assert refused.result["error"] == "ConfigError: task.times=1 repeats nothing; ask for 2 or more"
