"""Ranks of a ring as processes, without torchrun: what rank 0 answers in each of several cases, one after another.

Started by `run_ranks` with torchrun's variables; all cases share the processes, because each takes seconds to start.
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
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

AFTER_FAILURE = 10.0  # seconds in which all ranks have to end after the first
SIZES = ("batch_size=4", "prefill_chunk=16", "context_length=128", "threads=1", "device=cpu")


class Case(NamedTuple):
    """A model and its settings."""

    folder: str
    overrides: Sequence[str]


class Rank(NamedTuple):
    """How a rank's process ended: its status, None if it had to be killed, and its standard error."""

    status: int | None
    errors: str


class Process(NamedTuple):
    """A rank that runs, and the file of its standard error."""

    process: subprocess.Popen[bytes]
    said: IO[str]


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback interface that nobody uses now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


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


def ended(processes: Sequence[Process], seconds: float = 100) -> list[Rank]:
    """Wait for the ranks, not much longer than for the first that fails, and return how each has ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(one.process.poll() is None for one in processes):
        if any(one.process.poll() for one in processes):
            end = min(end, time.monotonic() + AFTER_FAILURE)
        time.sleep(0.05)
    found = []
    for process, said in processes:
        status = process.poll()
        process.kill()
        process.wait()
        said.seek(0)
        found.append(Rank(status, said.read()))
    return found


def run_ranks(
    world_size: int, cases: Mapping[str, Case], folder: Path, script: str = __file__, *more: str
) -> dict[str, Any]:
    """Return what rank 0 of `world_size` ranks answers in each case, by its name.

    Args:
        script: script that takes more arguments, a file of cases and one for answers.
    """
    import torch

    ports = free_ports(len(cases))
    described = folder / f"cases_{'_'.join([str(world_size), *more])}.json"
    described.write_text(
        json.dumps([[name, *case, port] for (name, case), port in zip(cases.items(), ports, strict=True)])
    )
    answers = described.with_suffix(".pt")
    ranks = ended(start_ranks(script, [[*more, str(described), str(answers)]] * world_size), seconds=600)
    assert [rank.status for rank in ranks] == [0] * world_size, "\n".join(rank.errors for rank in ranks)
    found: dict[str, Any] = torch.load(answers)
    return found


def run_refused(cases: Mapping[str, tuple[Case, str]], folder: Path) -> list[dict[str, str]]:
    """Return for each of two ranks the error, with its type, with which each case ends while the ranks load.

    Args:
        cases: by name a case, and the key in FAULTS or OTHER_FAULTS of what fails on rank 1; empty if nothing does.
    """
    ports = free_ports(len(cases))
    described = folder / "refused.json"
    described.write_text(
        json.dumps(
            [[name, *case, fault, port] for (name, (case, fault)), port in zip(cases.items(), ports, strict=True)]
        )
    )
    errors = [folder / f"errors_{rank}.json" for rank in range(2)]
    ranks = ended(start_ranks(__file__, [[str(described), str(path)] for path in errors]), seconds=120)
    assert [rank.status for rank in ranks] == [0, 0], "\n".join(rank.errors for rank in ranks)
    return [json.loads(path.read_text()) for path in errors]


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


def refuse(described: str, found: str) -> None:
    """Load each of the cases, and write their errors."""
    errors = {}
    for name, folder, overrides, fault, port in json.loads(Path(described).read_text()):
        os.environ["MASTER_PORT"] = str(port)
        with _with_fault(fault):
            try:
                engine = load(Case(folder, overrides), ["parallel=ring"])
            except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  # the test checks which one
                errors[name] = f"{type(error).__name__}: {error}"
            else:
                if engine is not None:
                    engine.close()
    Path(found).write_text(json.dumps(errors))


@contextmanager
def _with_fault(fault: str) -> Iterator[None]:
    """Let something fail on rank 1 inside the block: one of FAULTS or OTHER_FAULTS, or nothing."""
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        if fault in OTHER_FAULTS:
            OTHER_FAULTS[fault](patch, os.environ["RANK"] == "1")
        elif fault and os.environ["RANK"] == "1":
            path = FAULTS[fault]

            def fail(*_arguments: Any, **_named: Any) -> None:
                raise OSError(f"{path.rpartition('.')[2]} has failed")

            patch.setattr(path, fail)
        yield


def _lose_rank_1(patch: Any, is_rank_1: bool) -> None:
    """Let rank 1 leave without a word while rank 0 reads weights, for as long as nobody notices."""

    def load_resident(_loader: Any, _decoder: Any, _device: Any, on_progress: Any, _moved: Any) -> None:
        if is_rank_1:
            raise KeyboardInterrupt("rank 1 ends")
        end = time.monotonic() + 20
        while time.monotonic() < end:
            on_progress("load", 0, 0, 1)
            time.sleep(0.01)

    patch.setattr("graphcore.engine.loading.decoder_loader.load_resident", load_resident)


def _connect_in_vain(patch: Any, is_rank_1: bool) -> None:
    """Connect the ranks as GPUs are, which fails on rank 1 while rank 0 waits for it; NCCL's groups are gloo's."""
    from fake_cuda import FakeCuda

    import graphcore.engine.ring.follow  # noqa: F401  # before torch.cuda is replaced: annotations name its classes
    from graphcore.parallel.nccl_transport import NCCLTransport
    from graphcore.parallel.process_group import ProcessGroup

    def place_on(self: ProcessGroup, device: Any, _asked: str) -> None:
        self.transport = NCCLTransport(self._noticing, self.rank, device, self.limit, backend="gloo")

    def exchange(*_arguments: Any) -> None:
        if is_rank_1:
            raise RuntimeError("no route to rank 0")
        time.sleep(30)

    FakeCuda.install(patch)
    patch.setattr(ProcessGroup, "place_on", place_on)
    patch.setattr(NCCLTransport, "_exchange", exchange)


OTHER_FAULTS = {"losing": _lose_rank_1, "connecting": _connect_in_vain}


def answers_of(engine: Any, known: dict[tuple[int, ...], Sequence[int]]) -> dict[str, Any]:
    """Return what an engine of any number of processes answers: whatever may differ in a bit.

    Args:
        known: answers from which drafts are made, if the engine drafts; those of a few prompts are added.
    """
    import torch

    from graphcore.engine.scoring import PATHS, token_losses

    vocab = engine.config.vocab_size
    rows = torch.randint(1, vocab, (3, 50), generator=torch.Generator().manual_seed(3)).tolist()
    found: dict[str, Any] = {"logits": engine.logits([row[:37] for row in rows[:2]])}
    found["by_token"] = engine.logits([row[:5] for row in rows], by_token=True)
    found["refusals"] = [_refusal(engine, [[1] * 1000]), _refusal(engine, [[1] * 100] * 4)]
    with engine.holding_back():
        handles = list(_requests(engine, rows))
    found["answers"] = [_facts(handle) for handle in handles]
    found["again"] = _facts(engine.submit(rows[0], max_new_tokens=4, logprobs=True, ignore_eos=True))
    found["embedding"] = engine.embed([rows[1], rows[0][:9]])
    is_cancelled = threading.Event()
    held = engine.submit(rows[2], max_new_tokens=60, ignore_eos=True, mask=lambda ids: _wait(is_cancelled, ids))
    next(iter(held))
    held.cancel()
    is_cancelled.set()
    found["cancelled"] = held.result(60).finish_reason
    found["after"] = _facts(engine.submit(rows[2], max_new_tokens=6, logprobs=True, ignore_eos=True))
    found["known"] = _drafted(engine, rows, known)
    turns = [*rows[0][:20], *engine.submit(rows[0][:20], max_new_tokens=6, reuse_cache=True).result(60).token_ids]
    found["chat"] = _facts(engine.submit([*turns, 5, 6], max_new_tokens=6, reuse_cache=True, logprobs=True))
    with engine.while_idle():
        found["losses"] = torch.stack([token_losses(engine.runner, rows[1], 3, path) for path in PATHS])
    return found


def _drafted(
    engine: Any, rows: Sequence[Sequence[int]], known: dict[tuple[int, ...], Sequence[int]]
) -> list[list[str]]:
    """Return answers whose drafts are mostly right, greedy, drawn, and one without drafts beside the others."""
    prompts = [rows[0][:5], rows[1][:30], rows[2][:16]]
    asked: list[dict[str, Any]] = [{"temperature": 1.1, "seed": 4}, {}, {"temperature": 0.8, "frequency_penalty": 0.4}]
    given: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "logprobs": True}
    for prompt, more in zip(prompts, asked, strict=True):
        known[tuple(prompt)] = engine.submit(prompt, speculation="off", **given, **more).result(60).token_ids
    with engine.holding_back():
        handles = [engine.submit(prompt, **given, **more) for prompt, more in zip(prompts, asked, strict=True)]
        handles.append(engine.submit(rows[2][:16], speculation="off", **given))
    return [_facts(handle) for handle in handles]


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


def main(described: str, answers: str) -> None:
    """Run all cases as one of their ranks."""
    import torch

    from graphcore import Engine  # before torch, whose threads would spin otherwise
    from graphcore.engine.speculation.speculation_record import speculation_record

    drafts, found = drafts_from_answers(), {}
    for name, folder, overrides, port in json.loads(Path(described).read_text()):
        os.environ["MASTER_PORT"] = str(port)
        engine: Engine | None = load(Case(folder, overrides), ["parallel=ring"])
        if engine is not None:
            with closing(engine):
                found[name] = answers_of(engine, drafts)
                found[name]["speculation"] = speculation_record(engine)
                groups = engine.plan.groups
                found[name].update(streamed=list(groups.streamed), groups=groups.num_layer_groups)
                found[name].update(notes=list(engine.notes), graph=engine.stats["graph"])
    if found:
        torch.save(found, answers)


def drafts_from_answers() -> dict[tuple[int, ...], Sequence[int]]:
    """Draft from known answers, with errors, whatever it costs; return the answers by prompt."""
    from fallible_drafter import KnownAnswers

    known = KnownAnswers()
    known.patch(setattr)
    return known.answers


def run_one(folder: str, *overrides: str) -> None:
    """Run one case as one of its ranks.

    With "lose" among the overrides rank 1 dies in the middle of an answer, with "sleep" it answers no heartbeat, and
    with "stop" it does nothing when rank 0 closes. With "save" a cache is saved to the file that follows, then loaded
    by another engine; with "files" errors of files of rank 1 are tried, in the folder that follows. With "masks" the
    masks of answers come late.
    """
    from graphcore.errors import ParallelError
    from graphcore.parallel.process_group import ProcessGroup

    if "sleep" in overrides:
        run_sleeping(folder)
        return
    if "stop" in overrides:
        run_stopped(folder)
        return
    if "masks" in overrides:
        run_masked(folder, [one for one in overrides if one != "masks"])
        return
    if "save" in overrides:
        ring = ["parallel=ring", "parallel.split=[1,1]"]  # measured shares may be others for the second engine
        print(*loaded_answer(Case(folder, overrides[:-2]), overrides[-1], ring), file=sys.stderr)
        return
    if "files" in overrides:
        run_files(Case(folder, overrides[:-2]), Path(overrides[-1]))
        return
    if "lose" in overrides and os.environ["RANK"] == "1":
        ProcessGroup.hear = _dying(ProcessGroup.hear)  # type: ignore[method-assign]
    engine = load(Case(folder, [one for one in overrides if one != "lose"]), ["parallel=ring"])
    if engine is None:
        return
    with closing(engine):
        running, waiting = (engine.submit([1, 2, 3], max_new_tokens=100, ignore_eos=True) for _ in range(2))
        for handle in (running, waiting):
            try:
                handle.result(30)
            except ParallelError as error:
                print("request:", error, file=sys.stderr)
        print("failure:", engine.failure, file=sys.stderr)
        try:
            engine.submit([1])
        except ParallelError as error:
            print("later:", error, file=sys.stderr)


def run_masked(folder: str, overrides: Sequence[str]) -> None:
    """Run answers whose masks come up to 20 ms late, so that some steps run before they are there."""
    import torch

    engine = load(Case(folder, overrides), ["parallel=ring"])
    if engine is None:
        return
    allowed, chance = torch.arange(engine.config.vocab_size) % 5 == 0, random.Random(1)

    def mask(_ids: Sequence[int]) -> torch.Tensor:
        time.sleep(chance.random() * 0.02)
        return allowed

    with closing(engine):
        for start in range(10):
            prompts = [[(7 * at + start) % 10 + 1 for at in range(20 + 5 * row)] for row in range(3)]
            handles = [engine.submit(prompt, max_new_tokens=30, ignore_eos=True, mask=mask) for prompt in prompts]
            assert all(len(handle.result(30).token_ids) == 30 for handle in handles)
        assert engine.totals.draft_tokens > engine.totals.accepted_tokens > 0
        print("answered", file=sys.stderr)


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


def run_files(case: Case, folder: Path) -> None:
    """Save and load caches whose part on rank 1 cannot be written or read, or is not written until a request has ended.

    The last lets rank 1 wait for a file `go`.
    """
    from graphcore.engine.ring import saved_parts
    from graphcore.errors import GraphcoreError

    if os.environ["RANK"] == "1":
        saved_parts.UnfinishedCache = slow_files(folder / "go")  # type: ignore[misc]
    engine = load(case, ["parallel=ring"])
    if engine is None:
        return
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
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
        saving = threading.Thread(target=lambda: engine.save_cache(ids, folder / "slow"))
        saving.start()
        wait_for_file(folder / "slow.begun")
        assert len(engine.submit([5, 6, 7], max_new_tokens=9, ignore_eos=True).result(30).token_ids) == 9
        assert saving.is_alive()
        (folder / "go").touch()
        saving.join(30)
        print("slow:", engine.load_cache(folder / "slow"), file=sys.stderr)


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


def wait_for_file(path: Path) -> None:
    """Wait until a file exists."""
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.01)


def run_sleeping(folder: str) -> None:
    """Wait as rank 0, which asks for nothing, until it notices that rank 1 does not answer."""
    from graphcore.engine.ring import heartbeat
    from graphcore.parallel import process_group

    heartbeat.begin_heartbeat.__defaults__ = (0.2,)
    process_group.BEAT_LIMIT = timedelta(seconds=1)
    if os.environ["RANK"] == "1":
        process_group.ProcessGroup.beat = _sleep_and_die  # type: ignore[method-assign]
    engine = load(Case(folder, []), ["parallel=ring"])
    if engine is not None:
        with closing(engine):
            end = time.monotonic() + 30
            while engine.failure is None and time.monotonic() < end:
                time.sleep(0.02)
            print("noticed:", engine.failure, file=sys.stderr)


def run_stopped(folder: str) -> None:
    """Close the engine of rank 0 while another rank does nothing, as if it were stopped."""
    from graphcore.parallel import process_group

    process_group.CLOSE_LIMIT = timedelta(seconds=1)
    if os.environ["RANK"] == "1":
        process_group.ProcessGroup.dismiss = _sleep_and_die  # type: ignore[method-assign]
    engine = load(Case(folder, []), ["parallel=ring"])
    if engine is not None:
        began = time.monotonic()
        engine.close()
        print("closed:", time.monotonic() - began, file=sys.stderr)


def _sleep_and_die(_ranks: Any) -> None:
    time.sleep(4)
    os._exit(9)


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


if __name__ == "__main__":
    given = sys.argv[1:]
    (refuse if given[0].endswith("refused.json") else main if given[0].endswith(".json") else run_one)(*given)
