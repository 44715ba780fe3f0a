"""Saves the KV cache of prompts to files, and loads such files, between an engine's passes."""

from collections.abc import Callable, Sequence
from pathlib import Path

from graphcore.config.user_path import user_path
from graphcore.engine.arguments import token_row
from graphcore.engine.cache_fingerprint import fingerprint_of
from graphcore.engine.loading.load_model import LoadedModel
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.queue import RequestQueue
from graphcore.errors import BusyError
from graphcore.kvcache.prefix_snapshot import PrefixSnapshot, PrefixSnapshots
from graphcore.kvcache.snapshot_file import UnfinishedCache, read_cache
from graphcore.progress import Progress

SAVE_ATTEMPTS = 3  # runs of a prompt whose pages others may need before they are saved


class SavedCaches:
    """Saves and loads the KV cache of one engine; errors are those of `Engine.save_cache` and `Engine.load_cache`.

    Args:
        name: name of the called method, for messages.
    """

    def __init__(
        self, name: str, loaded: LoadedModel, copies: PrefixSnapshots, scheduler: RequestQueue, on_progress: Progress
    ) -> None:
        self._name, self._loaded, self._copies, self._queue = name, loaded, copies, scheduler
        self._on_progress = on_progress

    def save(self, ids: Sequence[int], file: str | Path, run: Callable[[], object]) -> int:
        """Run a prompt and write the KV cache of its prefix to a file; return the number of tokens in the file.

        Args:
            run: function that runs the prompt as a request, so that the caches hold it.
        """
        path = user_path(str(file), f"{self._name}: ")
        length, fingerprint = self._copies.length(len(ids)), self._fingerprint()
        for _ in range(SAVE_ATTEMPTS):
            run()
            if self._write(ids, path, fingerprint):
                return length
        raise BusyError(
            f"other requests needed the KV cache's pages before {length} tokens were saved; save them while fewer "
            "requests run, or set a larger batching.cache_tokens"
        )

    def _write(self, ids: Sequence[int], path: Path, fingerprint: dict[str, str]) -> bool:
        """Write the prefix of a prompt that has run to a file; False if its pages are not there any more."""
        copy = self._queue.run_alone(self._name, lambda: self._copies.copy_out(ids), lends=False)
        if copy is not None:
            UnfinishedCache.write(path, copy, self._copies, fingerprint).finish()
        return copy is not None

    def load(self, file: str | Path) -> int:
        """Read a file into the caches; return how many tokens it holds."""
        path = user_path(str(file), f"{self._name}: ")
        self._copies.check_snapshots()
        tokens, has_room = self._read(path, self._fingerprint())
        if not has_room:
            raise BusyError(f"{path}: running requests leave no pages for {tokens} tokens; load it before they run")
        return tokens

    def _read(self, path: Path, fingerprint: dict[str, str]) -> tuple[int, bool]:
        """Read a file into the caches; return how many tokens it holds, and whether there was room for them."""
        copy = self._checked(path, fingerprint)
        has_room = self._queue.run_alone(self._name, lambda: self._copies.copy_in(copy), lends=False)
        return len(copy.ids), has_room

    def _checked(self, path: Path, fingerprint: dict[str, str]) -> PrefixSnapshot:
        """Return what a file holds, after checking that it is this model's."""
        copy = read_cache(path, self._copies, fingerprint)
        token_row(copy.ids, self._loaded.config.vocab_size)
        return copy

    def _fingerprint(self) -> dict[str, str]:
        runner = self._loaded.runner
        assert isinstance(runner, ProgramRunner), "sequences with pages run in passes"
        return fingerprint_of(self._loaded, runner, self._on_progress)
