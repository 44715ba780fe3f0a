"""What people type reaches Hydra's parser so that the text comes out unchanged."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from graphcore.cli.quoting import is_plain, is_sweep, prepared_arguments, quote
from graphcore.errors import ConfigError

SPECIAL = "\\'\"${}x,=!()[]:;\n\té語😀#~+@%& "

GREEDY = "sampling=greedy"  # which sweeps are unless they say otherwise


def read_back(argument: str) -> object:
    """Return the value that a config gets from an override: Hydra's grammar, then OmegaConf's interpolation."""
    override = OverridesParser.create().parse_override(argument)
    config = OmegaConf.create({"value": None})
    OmegaConf.update(config, "value", override.value())
    return OmegaConf.to_container(config, resolve=True)["value"]


@pytest.mark.thorough
@settings(max_examples=400, deadline=None)
@given(st.text(alphabet=SPECIAL, max_size=12) | st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
@example('What\'s 2+2, really? (a=b) !x \\ ${oc.env:HOME} "q"\nnext \\')
@example("\\${a}'\\'\\\\")
@example("trailing backslash\\\n")
def test_any_text_comes_back_unchanged(text: str) -> None:
    (argument,) = prepared_arguments([f"prompt={text}"])
    assert read_back(argument) == text
    assert read_back("stop=" + prepared_arguments([f"stop={text}x"])[0].partition("=")[2]) == [text + "x"]


@given(st.text(alphabet=SPECIAL, max_size=8))
@settings(max_examples=200, deadline=None)
def test_a_sweep_hands_the_same_text_to_its_jobs(text: str) -> None:
    # BasicSweeper parses the override and writes it anew for the job.
    parsed = OverridesParser.create().parse_override(f"prompt={quote(text)}")
    assert read_back(f"prompt={parsed.get_value_element_as_str()}") == text


def test_a_dtype_gets_the_name_of_its_file() -> None:
    assert prepared_arguments(["dtype=BFloat16", "kv_dtype=f16,Q8_0"]) == ["dtype=bf16", "kv_dtype='f16,Q8_0'"]
    assert prepared_arguments(["-m", "dtype=torch.float32,half"]) == ["-m", "dtype=fp32,fp16", GREEDY]


def test_everything_else_is_left_to_hydra() -> None:
    arguments = [
        "model=gemma3",
        "stop=[a,b]",
        "prompt_ids=[1,2]",
        "sampling.temperature=0.5",
        "~experiment",
    ]
    assert prepared_arguments(arguments) == arguments
    assert prepared_arguments([*arguments, "--cfg", "job"]) == ["--cfg", "job", *arguments]


def test_the_sweep_flag_may_stand_anywhere() -> None:
    assert prepared_arguments(["task=bench", "-m", "dtype=fp32,bf16"]) == [
        "-m",
        "task=bench",
        "dtype=fp32,bf16",
        GREEDY,
    ]
    assert prepared_arguments(["a=1", "--multirun"]) == ["-m", "a=1", GREEDY]
    assert prepared_arguments(["-m", "sampling=auto,nucleus"]) == ["-m", "sampling=auto,nucleus"]
    assert is_sweep(["-m", "a=1"])
    assert not is_sweep(["a=1"])
    assert not is_sweep(["-m", "--help"])


def test_a_sweep_may_choose_between_checkpoints_but_never_cuts_a_prompt() -> None:
    prepared = prepared_arguments(["-m", "model.checkpoint=choice(a,b)", "prompt=choice(a,b), or not"])
    assert prepared == ["-m", "model.checkpoint=choice(a,b)", "prompt='choice(a,b), or not'", GREEDY]
    assert prepared_arguments(["-m", "task.text=choice(a,b)", "prompt_file=choice(c,d)"])[1:] == [
        "task.text=choice(a,b)",
        "prompt_file=choice(c,d)",
        GREEDY,
    ]
    assert prepared_arguments(["model.checkpoint=choice(a,b)"]) == ["model.checkpoint='choice(a,b)'"]


def test_a_run_folder_keeps_its_interpolation() -> None:
    (argument,) = prepared_arguments(["hydra.run.dir=out/a=b, c/${now:%Y}"])
    assert argument == "hydra.run.dir='out/a=b, c/${now:%Y}'"


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--prompt", "unknown option --prompt; settings are written prompt=value"),
        ("--prompt=hi", "unknown option --prompt=hi"),
        ("-x", "unknown option -x"),
        ("-x y", "unknown option '-x y'; a prompt that begins so is written prompt='-x y'"),
        ("--hlep", "did you mean '--help'?"),
        ("prompt=\udcff", "is not valid UTF-8"),
    ],
)
def test_what_is_no_setting_is_refused_in_one_line(argument: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prepared_arguments([argument])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("flag", ["-cn", "--config-dir", "--package"])
def test_a_flag_that_takes_any_value_does_not_take_the_next_flag(flag: str) -> None:
    assert prepared_arguments([flag, "name"]) == [flag, "name"]
    with pytest.raises(ConfigError, match=f"{flag} takes a value, not -m"):
        prepared_arguments([flag, "-m"])


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("prompt='Hello'", True),
        ("task=bench", True),
        ("hydra.run.dir='here'", True),
        ("~stop", True),
        ("hydra.mode=MULTIRUN", False),
        ("++hydra.mode=MULTIRUN", False),
        ("experiment=mine", False),  # its file may set hydra.mode
        ("--help", False),
        ("-m", False),
    ],
)
def test_only_settings_that_cannot_ask_for_a_sweep_are_plain(argument: str, expected: bool) -> None:
    assert is_plain([argument]) == expected
    assert is_plain(["seed=1", argument]) == expected
