"""--help has a sentence for every group, option and key of conf/, at any width."""

import re
from dataclasses import fields

import pytest
from omegaconf import OmegaConf
from support.cases import in_case

from graphcore.cli.conf_comments import groups, option_comment, top_level_keys
from graphcore.cli.help_text import help_text
from graphcore.cli.quoting import FLAGS, VALUE_FLAGS
from graphcore.config.conf_folder import conf_dir, group_options
from graphcore.config.settings import BatchingSettings, Settings
from graphcore.errors import ConfigError

GROUPS = [group for group in group_options() if group != "experiment"]
OPTIONS = [(group, option) for group in GROUPS for option in group_options()[group]]


def words(text: str) -> str:
    """Return the text in one line."""
    return " ".join(text.split())


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_every_group_and_key_is_there_with_its_sentence(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = words(help_text([]))
    keys = {one.key: one for one in top_level_keys()}
    chosen = {one.key: one for one in groups()}
    assert {key.partition(".")[0] for key in keys} | set(chosen) == {field.name for field in fields(Settings)}
    assert {key for key in keys if key.startswith("batching.")} == {
        f"batching.{f.name}" for f in fields(BatchingSettings)
    }
    assert set(chosen) == set(GROUPS)
    for key, one in keys.items():
        value = "" if "$" in one.value else f"={one.value}"
        assert f"{key}{value} {one.sentence}" in shown
    for group, one in chosen.items():
        assert f"{group}={one.value} {one.sentence}" in shown
        for key in option_comment(group, one.value).keys if group != "task" else ():
            assert f" {group}.{key.key}" in shown
            assert key.sentence in shown
    assert all(f" {flag}" in shown for flag in ("-h, --help", "--version", "-m, --multirun", "--cfg job"))


@pytest.mark.parametrize("columns", [40, 80])
def test_no_line_is_wider_than_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for topics in ([], *([f"{group}={option}"] for group, option in OPTIONS), *([group] for group in GROUPS)):
        assert max(map(len, help_text(topics).splitlines())) <= columns


def test_every_option_has_a_sentence_and_every_key_that_its_file_has() -> None:
    for group, option in OPTIONS:
        with in_case(group, option):
            comment = option_comment(group, option)
            assert len(comment.sentence) > 10
            written = OmegaConf.to_container(OmegaConf.load(conf_dir() / group / f"{option}.yaml"))
            assert isinstance(written, dict)
            said = {one.key for one in comment.keys}
            set_by_option = {"dtype": {"name"}, "graph": {"kind"}}.get(group, {"name", "files", "published"})
            assert said == set(written) - set_by_option
            assert all(len(one.sentence) > 3 for one in comment.keys)


def test_a_tasks_own_keys_are_shown_for_it() -> None:
    for topic in ("task=bench", "bench"):
        shown = words(help_text([topic]))
        assert "task.repeats=5 timed runs" in shown
        assert "max_new_tokens" not in shown


def test_help_at_the_end_of_a_command_is_about_its_task_and_groups() -> None:
    assert help_text(["bench", "seed=3", "sampling.top_k=3", "a prompt"]) == help_text(["bench"])
    assert help_text(["seed=3", "a prompt"]) == help_text([])


def test_a_group_lists_its_options() -> None:
    shown = words(help_text(["sampling"]))
    assert "sampling=nucleus Nucleus sampling with common values." in shown


def test_a_key_is_explained_with_its_default_and_its_group() -> None:
    """The whole texts, as conf/ has them."""
    for key in top_level_keys():
        with in_case(key.key):
            default = "" if "$" in key.value else f"={key.value}"
            said = f"{key.key}{default} {key.sentence} In no group: it holds for every task that uses it."
            shown = words(help_text([key.key]))
            assert (shown.startswith("task=chat: ") and shown.endswith(said)) if key.key == "chat" else shown == said
    of_group = words(help_text(["streaming.memory_budget"]))
    assert of_group.startswith("streaming.memory_budget=auto most bytes on the device")
    assert of_group.endswith("In the group streaming, with the default of streaming=off.")
    assert "batching.max_waiting=1024" in words(help_text(["batching"]))


def test_a_key_of_several_tasks_is_explained_for_each() -> None:
    shown = words(help_text(["task.output"]))
    keys = {task: [one.key for one in option_comment("task", task).keys] for task in group_options()["task"]}
    tasks = [task for task, own in keys.items() if "output" in own]
    assert len(tasks) > 2
    assert re.findall(r"default of task=(\w+)", shown) == sorted(tasks, key=lambda task: task != "generate")


@pytest.mark.parametrize("topic", ["streaming.nothing", "nothing.seed", "model.published", "name"])
def test_a_key_that_does_not_exist_is_no_topic(topic: str) -> None:
    with pytest.raises(ConfigError, match="--help has no topic"):
        help_text([topic])


def test_what_is_no_topic_is_refused_with_what_is_one() -> None:
    with pytest.raises(ConfigError, match=r"--help has no topic 'caht'; .*chat") as caught:
        help_text(["caht"])
    assert caught.value.is_unknown


def test_flags_that_take_a_value_are_flags() -> None:
    assert set(VALUE_FLAGS) < set(FLAGS)
