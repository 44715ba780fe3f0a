"""Fixtures for all tests: real checkpoints, fetched once, and tiny random ones, saved once by transformers."""

import os
import sys
import tempfile

# No test reads or fills the user's own Hugging Face cache, reads their settings, or writes beside their servers:
os.environ["XDG_RUNTIME_DIR"] = os.path.join(tempfile.gettempdir(), "graphcore-tests", "runtime")  # noqa: PTH118
os.environ["XDG_CONFIG_HOME"] = os.path.join(tempfile.gettempdir(), "graphcore-tests", "no-settings")  # noqa: PTH118
os.environ["HF_HUB_CACHE"] = os.path.join(tempfile.gettempdir(), "graphcore-tests", "hub")  # noqa: PTH118  # before all else
# Read by torch, here and in the processes that tests start:
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads of two workers must not spin
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of processes that each import torch
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # g++ is not tried with each instruction set of the processor

if os.environ.get("GRAPHCORE_LIMIT_CPU"):  # tests as on a processor with another instruction set
    sys.path.append(os.path.join(os.path.dirname(__file__), os.pardir, "benchmarks"))  # noqa: PTH118, PTH120
    from instruction_sets import environment_of

    os.environ.update(environment_of(os.environ["GRAPHCORE_LIMIT_CPU"]))

import atexit
import gc
import re
import signal
from collections.abc import Callable, Generator, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():  # Triton asks at its import; what is imported below may import it
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import settings
from support.budget import ProcessorTime
from support.tiny_models import TinyModel, save_tiny

from graphcore import Engine
from graphcore.checkpoint.sources.fetch import resolve_source
from graphcore.config.compose import compose_settings
from graphcore.errors import CheckpointNotFoundError
from graphcore.nn.decoder import Decoder

PREFILL_CHUNK = 16
BATCH_SIZE = 3
CONTEXT = 256
ASKED_BY_NAME = ("slow", "hub")  # marks of tests that run only if `-m` names the mark
WITHOUT = " and ".join(f"not {mark}" for mark in ASKED_BY_NAME)
QUICK, ONLY_THOROUGH = f"{WITHOUT} and not thorough", f"(thorough) and {WITHOUT}"  # no `-m`, and `-m thorough`
LATER_FILE = re.compile(r"^pytestmark = \[?pytest\.mark\.(thorough|slow|hub)\b", re.MULTILINE)

if os.environ.get("GRAPHCORE_LIMIT_CPU"):
    from instruction_sets import apply_limit

    apply_limit()

if find_spec("triton"):
    from support.triton_interpreter import mend_interpreter

    mend_interpreter()

# How long an example takes is the machine's business. On a GPU each size may be a kernel to compile.
examples = int(os.environ.get("GRAPHCORE_EXAMPLES", 10 if torch.cuda.is_available() else 25))
settings.register_profile("graphcore", deadline=None, max_examples=examples)
settings.load_profile("graphcore")


# A shell without job control starts background jobs, and so all their children, with the first two ignored;
# `nohup` starts it with the third ignored:
ENDING = (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
)
for number, handler in ENDING:
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kernel-lists",
        type=Path,
        help="folder for golden lists of kernels: of a GPU (tests/golden/kernels) or of the interpreter (tests/golden)",
    )
    parser.addoption(
        "--record-durations", action="store_true", help="write the processor time of each file to tests/durations.json"
    )
    parser.addini("unit_budget", "seconds of processor time that a file of tests/unit should take", default="1")
    parser.addini("unit_limit", "seconds of processor time above which it fails in CI", default="2")


def pytest_configure(config: pytest.Config) -> None:
    """Leave out slow tests and those of the Hub unless `-m` names them, and thorough ones unless it or a path does."""
    asked = config.option.markexpr  # as given: workers of xdist read the command line, too
    chosen = [f"({asked})"] if asked else []
    chosen += [f"not {mark}" for mark in ASKED_BY_NAME if mark not in asked]
    if not asked and config.args_source is not pytest.Config.ArgsSource.ARGS:
        chosen.append("not thorough")
    config.option.markexpr = " and ".join(chosen)
    config.pluginmanager.register(ProcessorTime(config), "processor-time")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file without a test to run: to import all takes 20 s in each process."""
    asked = config.option.markexpr
    if asked not in (QUICK, ONLY_THOROUGH) or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text(encoding="utf-8")
    if asked == QUICK:
        return LATER_FILE.search(text) is not None or None
    return not ("thorough" in text or "library: str" in text) or None  # unit/kernels/conftest.py marks libraries


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that take longest."""
    from support.sharing import in_order

    items[:] = in_order(items, config.rootpath)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Share files among workers as support/sharing.py says; other ways to share tests are xdist's own."""
    if config.getoption("dist") != "loadfile":
        return None
    from support.sharing import LongestFilesFirst

    return LongestFilesFirst(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are found: nearly all that is made then stays, and is looked through each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Keep the million objects of modules and collected tests out of each later garbage collection.

    The interpreter's end, after pytest's own, collects everything again: else Triton's library reports what is left.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)


@pytest.fixture(scope="module", autouse=True)
def collected() -> None:
    """Leave what earlier files have imported and made out of this file's collections.

    Tests that wait for garbage collect many times, and each time would look through transformers and the compiler.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def small_parts() -> Iterator[None]:
    """Let the parts of tiny models' layers be single matrices, as those of large models are.

    It is for tests of such parts: by default the layers of a tiny model stream whole.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "least_part_nbytes", 0)
        yield


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Give the thread count back after each test: it is a guard of every compiled graph, shared engines' included."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def fetch_real(model: str) -> Path:
    """Return the file of a model group's published checkpoint, or skip the test that needs it."""
    settings = compose_settings([f"model={model}"])
    published = settings.model.published
    try:
        return resolve_source(published.checkpoint, Path(settings.cache_dir).expanduser(), published.sha256)
    except CheckpointNotFoundError as error:
        pytest.skip(f"model={model} cannot be fetched here: {error}")


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2 135M Instruct, Q4_1."""
    return fetch_real("smollm2")


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma 3 270M base, Q4_K_M."""
    return fetch_real("gemma3")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """A function from a name in `tiny_models.BUILDERS` to the checkpoint and its reference."""

    @cache
    def make(name: str) -> TinyModel:
        return save_tiny(name, tmp_path_factory.mktemp(name))

    return make


@pytest.fixture(scope="session")
def load_tiny(tiny_model: Callable[[str], TinyModel]) -> Callable[[str, str], Engine]:
    """A function from a name and a graph kind to a float32 engine that all tests share: do not close it."""

    @cache
    def load(name: str, graph: str) -> Engine:
        sizes = [f"batch_size={BATCH_SIZE}", f"prefill_chunk={PREFILL_CHUNK}", f"context_length={CONTEXT}"]
        return Engine.load(tiny_model(name).folder, dtype="fp32", device="cpu", graph=graph, overrides=sizes)

    return load
