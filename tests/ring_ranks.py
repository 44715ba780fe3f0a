"""Ranks of rings as processes, without torchrun: what each of them finds in several cases, one after another.

Started by `run_cases` with torchrun's variables; all cases share the processes, because each takes seconds to start.
A case of fewer ranks than were started has the first of them.
"""

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from datetime import timedelta
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

import pytest

AFTER_FAILURE = 10.0  # seconds in which all ranks have to end after the first
SIZES = ("batch_size=4", "prefill_chunk=16", "context_length=128", "threads=1", "device=cpu")


class Case(NamedTuple):
    """A model, its settings, and what ranks do with it.

    Attributes:
        ranks: number of ranks, of those that are started; 0 for all.
        work: name of what is done, in WORKS.
        given: argument of it, such as a folder; of "answers", the names of what is asked, in ANSWERS.
    """

    folder: str
    overrides: Sequence[str]
    ranks: int = 0
    work: str = "answers"
    given: str = ""


class Rank(NamedTuple):
    """How a rank's process ended: its status, None if it had to be killed, and its standard error."""

    status: int | None
    errors: str


class Process(NamedTuple):
    """A rank that runs, and the file of its standard error."""

    process: subprocess.Popen[bytes]
    said: IO[str]


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback interface that nobody uses now, and that the system gives to no connection.

    Cases use theirs up to a minute later, and connections are opened all the time.
    """
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(given.read_text(encoding="ascii").split()[0]) if given.exists() else 32768
    candidates = random.SystemRandom().sample(range(first // 2, first), 2 * count + 100)  # other tests take others
    return list(islice(filter(_is_free, candidates), count))


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def start_ranks(
    script: str,
    arguments: Sequence[Sequence[str]],
    port: int = 0,
    prefixes: Sequence[Sequence[str]] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> list[Process]:
    """Start a process for each rank's arguments, with the variables that torchrun sets.

    Args:
        prefixes: commands that start each rank's command; none for no such commands.
        variables: variables that are other than those of ranks of one machine.
    """
    size = str(len(arguments))
    everywhere = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    found = []
    for rank, given in enumerate(arguments):
        said = tempfile.TemporaryFile("w+")  # noqa: SIM115  # read in `ended`; a pipe might be full
        environment = {**os.environ, **everywhere, **variables, "RANK": str(rank), "OMP_NUM_THREADS": "1"}
        command = [*(prefixes[rank] if prefixes else ()), sys.executable, script, *given]
        found.append(Process(subprocess.Popen(command, env=environment, stderr=said), said))
    return found


def ended(processes: Sequence[Process], seconds: float = 100, after_failure: float = AFTER_FAILURE) -> list[Rank]:
    """Wait for the ranks, not much longer than for the first that fails, and return how each has ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(one.process.poll() is None for one in processes):
        if any(one.process.poll() for one in processes):
            end = min(end, time.monotonic() + after_failure)
        time.sleep(0.05)
    found = []
    for process, said in processes:
        status = process.poll()
        process.kill()
        process.wait()
        said.seek(0)
        found.append(Rank(status, said.read()))
    return found


def run_cases(
    world_size: int, cases: Mapping[str, Case], folder: Path, script: str = __file__, *more: str
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Return by case what rank 0 finds, and for each of `world_size` ranks the errors that it ends with.

    Args:
        script: script that takes more arguments, a file of cases and one for what was found.
    """
    import torch

    described = folder / f"cases_{'_'.join([str(world_size), *more])}.json"
    rows = [[name, *case, port] for (name, case), port in zip(cases.items(), free_ports(len(cases)), strict=True)]
    described.write_text(json.dumps(rows))
    found = described.with_suffix(".pt")
    ranks = ended(start_ranks(script, [[*more, str(described), str(found)]] * world_size), 900, 90)
    assert {rank.status for rank in ranks} <= {0, 9}, ranks  # 9: a case ends the rank
    return torch.load(found), [json.loads(errors_file(found, rank).read_text()) for rank in range(world_size)]


def run_ranks(
    world_size: int, cases: Mapping[str, Case], folder: Path, script: str = __file__, *more: str
) -> dict[str, Any]:
    """Return by case what rank 0 finds, of cases without errors; arguments as for `run_cases`."""
    found, errors = run_cases(world_size, cases, folder, script, *more)
    assert not any(errors), errors
    return found


def errors_file(found: Path, rank: int) -> Path:
    """Return the file of a rank's errors, beside that of what rank 0 finds."""
    return found.with_suffix(f".{rank}.json")


FAULTS = {
    "opening": "graphcore.engine.loading.decoder_loader.open_model",
    "preparing": "graphcore.engine.loading.decoder_loader.check_partitionable",
    "sharing": "graphcore.engine.loading.decoder_loader.share_layers",
    "planning": "graphcore.engine.loading.decoder_loader.plan_run",
    "agreeing": "graphcore.engine.loading.decoder_loader.without_model",
    "comparing": "graphcore.engine.loading.load_model.found_facts",
    "reading weights": "graphcore.engine.loading.decoder_loader.load_resident",
    "making programs": "graphcore.engine.loading.decoder_loader.GraphBuilder",
}
"""Functions that raise on rank 1, by the time when ranks call them."""


def load_with_fault(case: Case, patch: Any) -> list[str] | None:
    """Load a model, of which something fails on rank 1: one of FAULTS or OTHER_FAULTS, or nothing; return its notes."""
    is_rank_1, fault = os.environ["RANK"] == "1", case.given
    if fault in OTHER_FAULTS:
        OTHER_FAULTS[fault](patch, is_rank_1)
    elif fault and is_rank_1:
        path = FAULTS[fault]

        def fail(*_arguments: Any, **_named: Any) -> None:
            raise OSError(f"{path.rpartition('.')[2]} has failed")

        patch.setattr(path, fail)
    engine = load(case, ["parallel=ring"])
    if engine is None:
        return None
    engine.close()
    return list(engine.notes)


def _lose_rank_1(patch: Any, is_rank_1: bool) -> None:
    """Let rank 1 leave without a word while rank 0 reads weights, for as long as nobody notices."""

    def load_resident(_loader: Any, _decoder: Any, _device: Any, on_progress: Any, _moved: Any) -> None:
        if is_rank_1:
            raise KeyboardInterrupt("rank 1 ends")
        end = time.monotonic() + 20
        while time.monotonic() < end:
            on_progress("load", 0, 0, 1)
            time.sleep(0.01)
        raise AssertionError("nobody has noticed that rank 1 is lost")

    patch.setattr("graphcore.engine.loading.decoder_loader.load_resident", load_resident)


def _connect_in_vain(patch: Any, is_rank_1: bool) -> None:
    """Connect the ranks as GPUs are, which fails on rank 1 while rank 0 waits for it; NCCL's groups are gloo's."""
    from support.fake_cuda import FakeCuda

    import graphcore.engine.ring.follow  # noqa: F401  # before torch.cuda is replaced: annotations name its classes
    from graphcore.parallel.nccl_transport import NCCLTransport
    from graphcore.parallel.process_group import ProcessGroup

    def place_on(self: ProcessGroup, device: Any, _asked: str) -> None:
        self.transport = NCCLTransport(self._noticing, self.rank, device, self.limit, backend="gloo")

    def exchange(*_arguments: Any) -> None:
        if is_rank_1:
            raise RuntimeError("no route to rank 0")
        time.sleep(30)
        raise AssertionError("rank 0 has not noticed that rank 1 cannot connect")

    FakeCuda.install(patch)
    patch.setattr(ProcessGroup, "place_on", place_on)
    patch.setattr(NCCLTransport, "_exchange", exchange)


OTHER_FAULTS = {"losing": _lose_rank_1, "connecting": _connect_in_vain}


def answers_of(engine: Any, known: dict[tuple[int, ...], Sequence[int]], asked: str = "") -> dict[str, Any]:
    """Return what an engine of any number of processes answers: whatever may differ in a bit.

    Args:
        known: answers from which drafts are made, if the engine drafts; those of a few prompts are added.
        asked: names in ANSWERS; empty for all.
    """
    import torch

    vocab = engine.config.vocab_size
    rows = torch.randint(1, vocab, (3, 50), generator=torch.Generator().manual_seed(3)).tolist()
    found: dict[str, Any] = {}
    for name in asked.split() or ANSWERS:
        found.update(ANSWERS[name](engine, rows, known))
    return found


Rows = Sequence[Sequence[int]]
Known = dict[tuple[int, ...], Sequence[int]]


def _batch(engine: Any, rows: Rows, _known: Known) -> dict[str, Any]:
    """Return logits, and answers to more requests than run at once."""
    found: dict[str, Any] = {"logits": engine.logits([row[:37] for row in rows[:2]])}
    with engine.holding_back():
        handles = list(_requests(engine, rows))
    return {**found, "answers": [_facts(handle) for handle in handles]}


def _other_calls(engine: Any, rows: Rows, _known: Known) -> dict[str, Any]:
    """Return what other calls than prompts return, and what answers are after one that is cancelled."""
    import torch

    from graphcore.engine.scoring import PATHS, token_losses

    found: dict[str, Any] = {"by_token": engine.logits([row[:5] for row in rows], by_token=True)}
    found["refusals"] = [_refusal(engine, [[1] * 1000]), _refusal(engine, [[1] * 100] * 4)]
    found["again"] = _facts(engine.submit(rows[0], max_new_tokens=4, logprobs=True, ignore_eos=True))
    found["embedding"] = engine.embed([rows[1], rows[0][:9]])
    is_cancelled = threading.Event()
    held = engine.submit(rows[2], max_new_tokens=60, ignore_eos=True, mask=lambda ids: _wait(is_cancelled, ids))
    next(iter(held))
    held.cancel()
    is_cancelled.set()
    found["cancelled"] = held.result(60).finish_reason
    found["after"] = _facts(engine.submit(rows[2], max_new_tokens=6, logprobs=True, ignore_eos=True))
    turns = [*rows[0][:20], *engine.submit(rows[0][:20], max_new_tokens=6, reuse_cache=True).result(60).token_ids]
    found["chat"] = _facts(engine.submit([*turns, 5, 6], max_new_tokens=6, reuse_cache=True, logprobs=True))
    with engine.while_idle():
        found["losses"] = torch.stack([token_losses(engine.runner, rows[1], 3, path) for path in PATHS])
    return found


def _drafted(engine: Any, rows: Rows, known: Known) -> dict[str, Any]:
    """Return answers whose drafts are mostly right, greedy, drawn, and one without drafts beside the others."""
    prompts = [rows[0][:5], rows[1][:30], rows[2][:16]]
    asked: list[dict[str, Any]] = [{"temperature": 1.1, "seed": 4}, {}, {"temperature": 0.8, "frequency_penalty": 0.4}]
    given: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "logprobs": True}
    for prompt, more in zip(prompts, asked, strict=True):
        known[tuple(prompt)] = engine.submit(prompt, speculation="off", **given, **more).result(60).token_ids
    with engine.holding_back():
        handles = [engine.submit(prompt, **given, **more) for prompt, more in zip(prompts, asked, strict=True)]
        handles.append(engine.submit(rows[2][:16], speculation="off", **given))
    return {"known": [_facts(handle) for handle in handles]}


ANSWERS = {"batch": _batch, "other_calls": _other_calls, "drafts": _drafted}


def _requests(engine: Any, rows: Sequence[Sequence[int]]) -> Iterator[Any]:
    """Submit more requests than run at once, of different lengths, so that they join and leave while others run."""
    kept = {"logprobs": True, "ignore_eos": True}
    yield engine.submit(rows[0], max_new_tokens=20, **kept)
    yield engine.submit(rows[1][:7], max_new_tokens=9, temperature=1.0, seed=5, n=2, **kept)
    yield engine.submit(rows[0][:33], max_new_tokens=14, top_logprobs=3, **kept)
    yield engine.submit([rows[2][0]], max_new_tokens=30, temperature=0.7, top_p=0.9, **kept)
    yield engine.submit(rows[2], max_new_tokens=5, prompt_logprobs=2, **kept)
    yield engine.submit(rows[1], max_new_tokens=8, reuse_cache=True, **kept)
    allowed = engine_mask(engine.config.vocab_size)
    yield engine.submit(rows[1][:20], max_new_tokens=6, mask=allowed, ignore_eos=True)


def engine_mask(vocab: int) -> Any:
    """Return a mask that allows every third token."""
    import torch

    allowed = torch.arange(vocab) % 3 == 0
    return lambda _ids: allowed


def _wait(event: threading.Event, token_ids: Sequence[int]) -> None:
    """Allow all tokens, the second one when an event is set."""
    if token_ids:
        event.wait(60)


def _facts(handle: Any) -> list[str]:
    """Return what is in a request's answers, without times; Python writes numbers with all their bits."""
    parts = ("token_ids", "finish_reason", "logprobs", "top_logprobs", "prompt_logprobs")
    return [repr([one.timings.cached_tokens, *(getattr(one, part) for part in parts)]) for one in handle.results(60)]


def _refusal(engine: Any, rows: Sequence[Sequence[int]]) -> str:
    from graphcore.errors import ConfigError

    try:
        engine.logits(rows)
    except ConfigError as error:
        return str(error)
    return ""


def load(case: Case, more: Sequence[str]) -> Any:
    """Return the engine of a case, or follow rank 0 and return None."""
    from graphcore import Engine

    settings = settings_of(case, more)
    if more and os.environ["RANK"] != "0":
        from graphcore.engine.ring.follow import follow

        follow(settings)
        return None
    return Engine.from_settings(settings)


def settings_of(case: Case, more: Sequence[str]) -> Any:
    """Return the settings of a case.

    On a ring, a model's folder may have a folder for each rank, and an override that begins with "rank0 " is rank 0's,
    and one that begins with "alone " that of one process.
    """
    from graphcore.config.compose import compose_settings

    own = f"rank{os.environ['RANK']} " if more else "alone "
    of_all = [one for one in case.overrides if one.startswith(own) or not one.startswith(("rank", "alone "))]
    overrides = [one.removeprefix(own) for one in of_all]
    settings = compose_settings([*SIZES, *overrides, *more])
    settings.model.checkpoint = case.folder.replace("RANK", os.environ["RANK"] if more else "all")
    return settings


def main(described: str, found: str) -> None:
    """Run the cases of a file as one of their ranks; rank 0 writes what it finds, and each its errors."""
    import torch

    rank, size, path = int(os.environ["RANK"]), os.environ["WORLD_SIZE"], Path(found)
    is_one_machine = os.environ["LOCAL_WORLD_SIZE"] == size
    errors_file(path, rank).write_text("{}")
    results, errors = dict[str, Any](), dict[str, str]()
    for number, (name, *given, port) in enumerate(json.loads(Path(described).read_text())):
        case, done = Case(*given), path.with_suffix(f".{number}")
        ranks = str(case.ranks or size)
        if rank >= int(ranks):
            wait_for_file(done, 600)
            continue
        os.environ.update(MASTER_PORT=str(port), WORLD_SIZE=ranks)
        os.environ.update({"LOCAL_WORLD_SIZE": ranks} if is_one_machine else {})
        with pytest.MonkeyPatch.context() as patch:
            try:
                results[name] = WORKS[case.work](case, patch)
            except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  # the test checks which one
                errors[name] = f"{type(error).__name__}: {error}"
        errors_file(path, rank).write_text(json.dumps(errors))
        if rank == 0:
            done.touch()
    if rank == 0:
        torch.save({name: one for name, one in results.items() if one is not None}, path)


def run_answers(case: Case, patch: Any) -> dict[str, Any] | None:
    """Return the answers of rank 0, with drafts from known answers and errors, and facts about its engine."""
    from support.engine_fakes import KnownAnswers

    from graphcore.engine.speculation.speculation_record import speculation_record

    known = KnownAnswers()
    known.patch(patch.setattr)
    engine = load(case, ["parallel=ring"])
    if engine is None:
        return None
    with closing(engine):
        found = answers_of(engine, known.answers, case.given)
        groups = engine.plan.groups
        found.update(speculation=speculation_record(engine), notes=list(engine.notes), graph=engine.stats["graph"])
        found.update(streamed=list(groups.streamed), groups=groups.num_layer_groups)
    return found


def run_losing(case: Case, patch: Any) -> list[str] | None:
    """Return what rank 0 says of requests when rank 1 dies in the middle of an answer."""
    from graphcore.errors import ParallelError
    from graphcore.parallel.process_group import ProcessGroup

    if os.environ["RANK"] == "1":
        patch.setattr(ProcessGroup, "hear", _dying(ProcessGroup.hear))
    engine = load(case, ["parallel=ring"])
    if engine is None:
        return None
    said = []
    with closing(engine):
        running, waiting = (engine.submit([1, 2, 3], max_new_tokens=100, ignore_eos=True) for _ in range(2))
        for handle in (running, waiting):
            try:
                handle.result(30)
            except ParallelError as error:
                said.append(f"request: {error}")
        said.append(f"failure: {engine.failure}")
        try:
            engine.submit([1])
        except ParallelError as error:
            said.append(f"later: {error}")
    return said


def run_refusing(case: Case, patch: Any) -> list[str] | None:
    """Return what calls say of which rank 1 alone has no pages for a row, none for all, all pages, and then an error.

    The last is no error that the ranks have agreed on, so rank 1 leaves.
    """
    from graphcore.engine.program_runner import ProgramRunner
    from graphcore.errors import ConfigError, GraphcoreError
    from graphcore.kvcache.page_allocator import PageAllocator

    lacking: list[set[int]] = [{1}, {0, 1}, set(), set()]  # rows without pages, by call
    number, logits, reserve, program = -1, ProgramRunner.logits, PageAllocator.reserve, ProgramRunner._program_of

    def count(runner: Any, rows: Any) -> Any:
        nonlocal number
        number += 1
        return logits(runner, rows)

    def refuse(pages: Any, row: int, begin: int, end: int) -> bool:
        return row not in lacking[number] and reserve(pages, row, begin, end)

    def fail(runner: Any, *chunk: Any) -> Any:
        if number == 3:
            raise ConfigError("rank 1 has another opinion")
        return program(runner, *chunk)

    if os.environ["RANK"] == "1":
        patch.setattr(ProgramRunner, "logits", count)
        patch.setattr(PageAllocator, "reserve", refuse)
        patch.setattr(ProgramRunner, "_program_of", fail)
    engine = load(case, ["parallel=ring"])
    if engine is None:
        return None
    said = []
    with closing(engine):
        for _ in lacking:
            try:
                said.append(str(tuple(engine.logits([[1, 2, 3, 4], [5, 6, 7, 8]]).shape)))
            except GraphcoreError as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


def run_masked(case: Case, _patch: Any) -> bool | None:
    """Run answers whose masks come up to 20 ms late, so that some steps run before they are there."""
    import torch

    engine = load(case, ["parallel=ring"])
    if engine is None:
        return None
    allowed, chance = torch.arange(engine.config.vocab_size) % 5 == 0, random.Random(1)

    def mask(_ids: Sequence[int]) -> torch.Tensor:
        time.sleep(chance.random() * 0.02)
        return allowed

    with closing(engine):
        for start in range(5):
            prompts = [[(7 * at + start) % 10 + 1 for at in range(20 + 5 * row)] for row in range(3)]
            handles = [engine.submit(prompt, max_new_tokens=30, ignore_eos=True, mask=mask) for prompt in prompts]
            assert all(len(handle.result(30).token_ids) == 30 for handle in handles)
        assert engine.totals.draft_tokens > engine.totals.accepted_tokens > 0
    return True


def run_saved(case: Case, _patch: Any) -> list[str]:
    """Save a cache to a file, and return what an engine answers that has loaded it."""
    return loaded_answer(case, case.given, ["parallel=ring", "parallel.split=[1,1]"])  # measured shares may be others


def loaded_answer(case: Case, file: str, more: Sequence[str] = ()) -> list[str]:
    """Save the cache of a prompt, load it into another engine, and return what that answers to a longer prompt."""
    ids = [7 * at % 90 + 1 for at in range(70)]
    engine = load(case, more)
    if engine is not None:
        with closing(engine):
            assert engine.save_cache(ids, file) == 64
    engine = load(case, more)
    if engine is None:
        return []
    with closing(engine):
        assert engine.load_cache(file) == 64
        found = _facts(engine.submit([*ids, 3, 4], max_new_tokens=8, logprobs=True, ignore_eos=True))
    assert found[0].startswith("[64, "), "the saved tokens were not used"
    return found


def run_files(case: Case, patch: Any) -> dict[str, str] | None:
    """Save and load caches whose part on rank 1 cannot be written or read, or is not written until a request has ended.

    The last lets rank 1 wait for a file `go`. The errors are returned by name, and the tokens loaded at last.
    """
    from graphcore.engine.ring import saved_parts
    from graphcore.errors import GraphcoreError

    folder, said = Path(case.given), dict[str, str]()
    if os.environ["RANK"] == "1":
        patch.setattr(saved_parts, "UnfinishedCache", slow_files(folder / "go"))
    engine = load(case, ["parallel=ring"])
    if engine is None:
        return None
    ids = [7 * at % 90 + 1 for at in range(70)]
    with closing(engine):
        for name, call in (
            ("taken", lambda: engine.save_cache(ids, folder / "taken")),
            ("lost", lambda: engine.load_cache(folder / "lost")),
            ("other", lambda: engine.load_cache(folder / "other")),
        ):
            if name != "taken":
                assert engine.save_cache(ids, folder / name) > 30
            if name == "lost":
                (folder / "lost.rank1").unlink()
            if name == "other":
                assert engine.save_cache([*reversed(ids)], folder / "reversed") > 30
                (folder / "reversed.rank1").replace(folder / "other.rank1")
            try:
                call()
            except GraphcoreError as error:
                said[name] = f"{type(error).__name__}: {error}"
        saving = threading.Thread(target=lambda: engine.save_cache(ids, folder / "slow"))
        saving.start()
        wait_for_file(folder / "slow.begun")
        assert len(engine.submit([5, 6, 7], max_new_tokens=9, ignore_eos=True).result(30).token_ids) == 9
        assert saving.is_alive()
        (folder / "go").touch()
        saving.join(30)
        said["slow"] = str(engine.load_cache(folder / "slow"))
    return said


def slow_files(go: Path) -> Any:
    """Return a class that writes files named `slow...` only when another file is there."""
    from graphcore.kvcache.snapshot_file import UnfinishedCache

    class SlowCache(UnfinishedCache):
        @classmethod
        def write(cls, path: Path, *rest: Any) -> UnfinishedCache:
            if path.name.startswith("slow"):
                (path.parent / "slow.begun").touch()
                wait_for_file(go)
            return super().write(path, *rest)

    return SlowCache


def wait_for_file(path: Path, seconds: float = 30) -> None:
    """Wait until a file exists."""
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.02)


def run_sleeping(case: Case, patch: Any) -> str | None:
    """Wait as rank 0, which asks for nothing, until it notices that rank 1 does not answer; return how it says so."""
    from graphcore.engine.ring import heartbeat
    from graphcore.parallel import process_group

    patch.setattr(heartbeat.begin_heartbeat, "__defaults__", (0.2,))
    patch.setattr(process_group, "BEAT_LIMIT", timedelta(seconds=1))
    if os.environ["RANK"] == "1":
        patch.setattr(process_group.ProcessGroup, "beat", _sleep_and_end)
    engine = load(case, ["parallel=ring"])
    if engine is None:
        return None
    with closing(engine):
        end = time.monotonic() + 30
        while engine.failure is None and time.monotonic() < end:
            time.sleep(0.02)
        return str(engine.failure)


def run_stopped(case: Case, patch: Any) -> float | None:
    """Close the engine of rank 0 while rank 1 does nothing, as if it were stopped; return the seconds that it takes."""
    from graphcore.parallel import process_group

    patch.setattr(process_group, "CLOSE_LIMIT", timedelta(seconds=1))
    if os.environ["RANK"] == "1":
        patch.setattr(process_group.ProcessGroup, "dismiss", _sleep_and_end)
    engine = load(case, ["parallel=ring"])
    if engine is None:
        return None
    began = time.monotonic()
    engine.close()
    return time.monotonic() - began


def _sleep_and_end(_ranks: Any) -> None:
    time.sleep(4)
    raise KeyboardInterrupt("rank 1 has slept")


def _dying(hear: Any) -> Any:
    """Return a function that ends the process, as a kill does, instead of hearing the 40th message."""
    heard = 0

    def hear_or_die(ranks: Any) -> Any:
        nonlocal heard
        heard += 1
        if heard == 40:
            os._exit(9)
        return hear(ranks)

    return hear_or_die


WORKS = {
    "answers": run_answers,
    "load": load_with_fault,
    "lose": run_losing,
    "refuse": run_refusing,
    "masks": run_masked,
    "save": run_saved,
    "files": run_files,
    "sleep": run_sleeping,
    "stop": run_stopped,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
