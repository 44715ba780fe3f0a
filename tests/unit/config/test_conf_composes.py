"""Every yaml under conf/ composes, is checked, and says what its keys mean."""

import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from graphcore.arch.config_from_json import parse_model_config
from graphcore.arch.registry import architecture_of
from graphcore.checkpoint.sources.source import HubSource, PackageSource, parse_source
from graphcore.cli.single_run import task_of
from graphcore.cli.sweep.kept_folder import KeepSweepFolder
from graphcore.config.compose import compose_settings
from graphcore.config.conf_folder import conf_dir, group_options
from graphcore.config.settings import Settings
from graphcore.tasks.registry import NAMES

MODELS = group_options()["model"]
OTHERS = [(group, option) for group, options in group_options().items() if group != "model" for option in options]
ROWS = range(max(len(MODELS), len(OTHERS)))
PAIRS = [(MODELS[at % len(MODELS)], *OTHERS[at % len(OTHERS)]) for at in ROWS]  # every option, each with one of a model
YAMLS = sorted(path.relative_to(conf_dir()) for path in conf_dir().rglob("*.yaml"))


@cache
def composed(*overrides: str) -> Settings:
    """Return settings that several tests look at and none changes."""
    return compose_settings(overrides)


def composed_with(model: str) -> Settings:
    """Return the settings of a model and of an option of another group, which another test composes, too."""
    name, group, option = PAIRS[MODELS.index(model)]
    return composed(f"model={name}", f"{group}={option}")


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "group", "option"), PAIRS)
def test_every_option_composes(model: str, group: str, option: str) -> None:
    settings = composed(f"model={model}", f"{group}={option}")
    assert settings.model.name == model
    chosen = vars(settings).get(group)
    if isinstance(chosen, dict):
        assert chosen["name"] == option
    elif chosen is not None and "name" in vars(chosen):
        assert vars(chosen)["name"] == option


def test_the_defaults_are_those_of_the_design() -> None:
    settings = compose_settings([])
    assert (settings.model.name, settings.dtype.name, settings.graph.kind) == ("smollm2", "auto", "auto")
    assert (settings.streaming.policy, settings.quant.format, settings.task["name"]) == ("off", "stored", "generate")
    assert settings.sampling.typed == {}


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_every_model_names_a_source_and_a_shape_that_an_architecture_knows(name: str) -> None:
    model = composed_with(name).model
    parse_source(model.checkpoint)
    assert model.checkpoint == model.published.checkpoint
    assert not model.checkpoint.startswith("random:")
    config = parse_model_config(model.random_config, name)
    assert len(architecture_of(config).spec(config).blocks) == config.num_hidden_layers


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_every_published_source_has_its_pin(name: str) -> None:
    """Files have a hash; a folder of the Hub has a commit, whose large files the Hub names by their hashes."""
    published = composed_with(name).model.published
    source = parse_source(published.checkpoint)
    is_file = isinstance(source, PackageSource) or published.checkpoint.endswith(".gguf")
    assert is_file == (published.sha256 is not None)
    if is_file:
        assert re.fullmatch("[0-9a-f]{64}", str(published.sha256))
    else:
        assert isinstance(source, HubSource)
        assert re.fullmatch("[0-9a-f]{40}", str(source.revision))


def test_every_task_has_its_yaml_and_every_yaml_its_task() -> None:
    assert list(NAMES) == group_options()["task"]
    for name in NAMES:
        task, own = task_of(composed(f"task={name}"))
        assert (task.name, own.name) == (name, name)


@pytest.mark.parametrize("path", YAMLS, ids=str)
def test_every_key_has_a_comment(path: Path) -> None:
    lines = (conf_dir() / path).read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    if path.parts[0] in ("dtype", "graph", "quant", "experiment"):
        return  # one choice, which the first line explains
    blocks = {"defaults:", "hydra:"}
    is_inside = False
    for line in lines:
        if re.match(r"\w", line):
            is_inside = line in blocks
        bare = re.match(r"(name|published):", line)
        if re.match(r"\w", line) and not is_inside and not bare:
            assert "#" in line, f"{path}: {line}"


def test_no_file_lets_a_name_run_code_but_hydra_s_own_callback() -> None:
    found = []
    for path in conf_dir().rglob("*.yaml"):
        found += [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if "_target_" in line]
        OmegaConf.load(path)
    assert found == [f"_target_: {KeepSweepFolder.__module__}.{KeepSweepFolder.__name__}"]


@pytest.mark.parametrize(("written", "meant"), [("on", "on"), ("off", "off"), ("auto", "auto"), ("true", "on")])
def test_switches_are_words_whatever_yaml_reads(written: str, meant: str) -> None:
    assert compose_settings([f"chat={written}"]).chat == meant
    assert compose_settings(["streaming.policy=false"]).streaming.policy == "off"


@pytest.mark.thorough
def test_threads_compose_at_once_and_each_gets_its_own_settings() -> None:
    def compose(number: int) -> int | None:
        return compose_settings([f"context_length={number}"]).context_length

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(compose, range(10, 22))) == list(range(10, 22))
