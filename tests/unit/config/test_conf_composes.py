"""Every yaml under conf/ composes, is checked, and says what its keys mean."""

import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
from omegaconf import OmegaConf
from support.cases import in_case

from graphcore.arch.config_from_json import parse_model_config
from graphcore.arch.random_checkpoint import RandomCheckpoint
from graphcore.arch.registry import architecture_of
from graphcore.checkpoint.sources.source import HubSource, PackageSource, parse_source
from graphcore.cli.single_run import task_of
from graphcore.cli.sweep.kept_folder import KeepSweepFolder
from graphcore.config.compose import compose_settings
from graphcore.config.conf_folder import conf_dir, group_options
from graphcore.config.settings import Settings
from graphcore.errors import ConfigError
from graphcore.sampling_params import NEUTRAL, check_sampling
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
    assert model.checkpoint == model.published.checkpoint == model.files[model.precision].checkpoint
    assert model.precision == ("q4" if "q4" in model.files else "full")
    check_sampling({**NEUTRAL, **model.published.sampling})
    config = parse_model_config(model.random_config, name)
    spec = architecture_of(config).spec(config)
    assert len(spec.blocks) == config.num_hidden_layers
    if "q4" in model.files:
        source, nbytes = model.files["q4"].checkpoint, model.files["q4"].nbytes
        same = RandomCheckpoint(spec, 0, "q4_0" if "q4_0" in source.lower() else "q4_k")  # of the same shapes
        stored = nbytes / sum(info.nbytes for info in same.tensors.values())
        # Q4_K_M has q6_k where q4_k alone has none. Qwen 3's file has the tied head, too; DeepSeek's rows of 1408 do
        # not divide into blocks of q4_k.
        assert 0.98 < stored < (1.23 if name in ("qwen3", "deepseek_v2_lite") else 1.11), stored


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_every_published_source_has_its_pin_or_says_that_it_has_none(name: str) -> None:
    """Files have a hash; a folder of the Hub has a commit, whose large files the Hub names by their hashes."""
    text = (conf_dir() / f"model/{name}.yaml").read_text("utf-8")
    for file in composed_with(name).model.files.values():
        source = parse_source(file.checkpoint)
        if isinstance(source, HubSource) and source.revision is not None:
            assert re.fullmatch("[0-9a-f]{40}", source.revision)
        if isinstance(source, PackageSource) or file.checkpoint.endswith(".gguf"):
            is_pinned = re.fullmatch("[0-9a-f]{64}", str(file.sha256)) is not None
            lines = text.partition(f"    checkpoint: {file.checkpoint}\n")[2].splitlines()
            assert is_pinned or lines[1].startswith("    sha256: null # not pinned: no public text gives its hash")
        else:
            assert isinstance(source, HubSource)
            assert (source.revision is not None, file.sha256) == (True, None)


def test_a_precision_chooses_the_file_and_all_that_is_known_of_it() -> None:
    small, full = (compose_settings(["model=llama3_8b", *more]).model for more in ([], ["model.precision=full"]))
    assert small.checkpoint.endswith("/Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf")
    assert full.checkpoint.startswith("hf:meta-llama/Llama-3.1-8B-Instruct@")
    assert (small.published.nbytes, full.published.nbytes) == (4920739232, 16060522496)
    assert (small.expected_sha256, full.expected_sha256) == (small.files["q4"].sha256, None)
    assert (small.display_name, full.display_name) == ("llama3_8b", "llama3_8b")
    assert small.random_config == full.random_config
    own = compose_settings(["model=llama3_8b", "model.checkpoint=/my.gguf", "model.precision=full"]).model
    assert (own.expected_sha256, own.display_name) == (None, "my.gguf")


def test_a_precision_that_is_not_published_is_refused_with_the_one_that_is() -> None:
    refused = {
        ("gpt2", "q4"): "model.precision=q4: no such file of gpt2 is known; use model.precision=full (522.7 MiB), or",
        ("smollm2", "full"): "model.precision=full: no such file of smollm2 is known; use model.precision=q4 (93.8",
        ("llama3", "q8"): "model.precision=q8 is not one of q4, full",
    }
    for (name, precision), said in refused.items():
        with pytest.raises(ConfigError) as caught:
            compose_settings([f"model={name}", f"model.precision={precision}"])
        assert str(caught.value).startswith(said)


def test_every_task_has_its_yaml_and_every_yaml_its_task() -> None:
    assert list(NAMES) == group_options()["task"]
    for name in NAMES:
        task, own = task_of(composed(f"task={name}"))
        assert (task.name, own.name) == (name, name)


def test_every_key_has_a_comment() -> None:
    for path in YAMLS:
        with in_case(path):
            lines = (conf_dir() / path).read_text(encoding="utf-8").splitlines()
            assert lines[0].startswith("# ")
            if path.parts[0] in ("dtype", "graph", "quant", "experiment"):
                continue  # one choice, which the first line explains
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
