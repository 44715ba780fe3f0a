"""The programs that an engine's sequences run on, built and compiled at their first use.

    a chunk of a prompt     a program of one row of the caches, or CUDA graphs that all rows share
    a decode step           native programs of up to 16 rows each, or one program of all rows, or one of each row

Legend: B batch.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from graphcore.graph.builder import GraphBuilder
from graphcore.graph.cpu.native_decode import NativeStep
from graphcore.graph.gpu.capture import captured_steps
from graphcore.graph.gpu.sampling import SamplingRows, sampling_phase
from graphcore.graph.hand_over import stretches
from graphcore.graph.program import Program
from graphcore.kernels.cpu.program import most_step_rows, rows_by_program, widths_of
from graphcore.nn.decoder import Decoder
from graphcore.nn.spec import MoESpec
from graphcore.sampling_params import SamplingParams


class DecodeStep(NamedTuple):
    """A program with tokens of some rows of the caches as its inputs.

    Attributes:
        rows: rows of the program, and so of its logits, of the tokens of each row of the caches, in order.
    """

    program: Program
    rows: Mapping[int, range]


class Programs:
    """The programs of one builder.

    Args:
        batch_size: rows of the caches.
        draft_tokens: most draft tokens of one sequence in a step.
    """

    def __init__(self, builder: GraphBuilder, batch_size: int, draft_tokens: int = 0) -> None:
        self._builder, self._batch_size, self._draft_tokens = builder, batch_size, draft_tokens
        self._widths = widths_of(self.most_rows)
        self._of_width: dict[tuple[str, int, bool, int], Program] = {}
        self._of_row: dict[tuple[str, int], Program] = {}

    @property
    def decoder(self) -> Decoder:
        """The decoder that the programs run."""
        return self._builder.decoder

    def of_width(self, phase: str, width: int, is_greedy: bool = False, number: int = 0) -> Program:
        """Return the program of a decode step, built and compiled at its first use.

        Args:
            phase: "decode"; "sample" or "top_k_top_p" (captured graphs that draw from all tokens, or from those that
                top-k and top-p keep).
            width: number of rows.
            is_greedy: True for a decode program that chooses the likeliest token and feeds it to itself.
            number: number of the program among equal ones, which run together.
        """
        key = (phase, width, is_greedy, number)
        if key not in self._of_width:
            build = {
                "decode": lambda: self._builder.decode(width, is_greedy),
                "sample": lambda: self._builder.sample(width, has_top_k_top_p=False),
                "top_k_top_p": lambda: self._builder.sample(width, has_top_k_top_p=True),
            }
            self._of_width[key] = build[phase]()
        return self._of_width[key]

    def of_row(self, phase: str, cache_row: int) -> Program:
        """Return a program of one sequence, which has that row of the caches, built and compiled at its first use.

        Args:
            phase: "prefill"; "token" (the steps of a decode program, called one by one even where decode is captured).
        """
        key = (phase, cache_row)
        if key not in self._of_row:
            build = {
                "prefill": lambda: self._builder.prefill(1, cache_row),
                "token": lambda: self._builder.token(1, cache_row),
            }
            self._of_row[key] = build[phase]()
        return self._of_row[key]

    def chunk(self, tokens: int, cache_row: int, is_observed: bool = False) -> Program:
        """Return the program of a chunk of one sequence, built and compiled at its first use.

        Args:
            tokens: tokens of the chunk.
            is_observed: True if the caller looks between the steps, which a captured program does not have.
        """
        if tokens == 1:
            return self.of_row("token", cache_row)
        program = self.of_row("prefill", cache_row)
        if is_observed or tokens > self._builder.captured_chunk:
            return program
        return self._builder.captured_prefill(program, tokens)

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a decode program computes each row with the same bits, whatever the other rows are.

        A native program does, and a GPU's decode kernels do. torch's own products and functions do not: which
        instructions compute a number depends on its place among all rows. Compiled code does, unless it calls torch:
        for experts, and for layers' features.
        """
        builder, functions = self._builder, self._builder.functions
        if self._batch_size == 1 or builder.uses_native_programs or functions.decode_kernels is not None:
            return True
        spec = builder.decoder.spec
        has_experts = any(isinstance(each.mlp, MoESpec) for each in spec.blocks)
        return functions.compiles and spec.per_layer is None and not has_experts

    @property
    def finds_likeliest(self) -> bool:
        """Whether decode programs always compute the argmax of the logits, too."""
        return self._builder.uses_native_programs

    def rows_of_step(self, num_sequences: int) -> Sequence[int]:
        """Return the number of rows with a token in each of the programs that `step` returns."""
        if self._builder.uses_native_programs:
            return rows_by_program(num_sequences)
        return [num_sequences] if self._runs_all_rows else [1] * num_sequences

    def instructions_of_step(self, num_sequences: int) -> int | None:
        """Return the number of instructions in the native programs of a decode step; None if they are not native."""
        if not self._builder.uses_native_programs:
            return None
        programs = [step.program for step in self.step(dict.fromkeys(range(num_sequences), ([0], 0)))]
        steps = [step for program in programs for part in stretches(program.steps) for step in part.steps]
        return sum(step.count for step in steps if isinstance(step, NativeStep))

    @property
    def _runs_all_rows(self) -> bool:
        """Whether one program decodes all rows of the KV cache."""
        return self._builder.captures_graphs or self.is_batch_invariant

    @property
    def most_together(self) -> int:
        """Most consecutive tokens of one sequence in a step."""
        return self._builder.most_together if self._builder.uses_native_programs else 1

    @property
    def most_rows(self) -> int:
        """Most tokens in a step, over all sequences."""
        is_native = self._builder.uses_native_programs
        return most_step_rows(self._batch_size, self._draft_tokens) if is_native else self._batch_size

    def step(self, tokens: Mapping[int, tuple[Sequence[int], int]]) -> list[DecodeStep]:
        """Return the programs that run tokens of some rows of the caches, in one pass, with their inputs.

        Native programs take up to 16 tokens each, and no more of them run than the tokens need. A compiled program or a
        CUDA graph has all rows of the caches; those without a token idle. Where it is not batch-invariant, each row
        runs alone.

        Args:
            tokens: ids of consecutive tokens of each row, and the position of the first; one token, or up to
                `most_together` if all rows together have at most `most_rows`.
        """
        if self._builder.uses_native_programs:
            return self._native_step(tokens)
        if self._runs_all_rows:
            program = self.of_width("decode", self._batch_size)
            rows = range(self._batch_size)
            ids = [tokens[row][0] if row in tokens else [] for row in rows]
            program.state.put_rows(ids, [tokens[row][1] if row in tokens else 0 for row in rows])
            return [DecodeStep(program, {row: range(row, row + 1) for row in tokens})]
        steps = []
        for row, (ids_of_row, position) in tokens.items():
            program = self.of_row("token", row)
            program.state.put_rows([ids_of_row], [position])
            steps.append(DecodeStep(program, {row: range(1)}))
        return steps

    def _native_step(self, tokens: Mapping[int, tuple[Sequence[int], int]]) -> list[DecodeStep]:
        """Return native programs with the tokens in turn; each of them finds the likeliest tokens, too."""
        each = [(row, one, first + at) for row, (ids, first) in tokens.items() for at, one in enumerate(ids)]
        begin, steps = 0, list[DecodeStep]()
        for number, share in enumerate(rows_by_program(len(each))):
            rows, token_ids, positions = zip(*each[begin : begin + share], strict=True)
            begin += share
            program = self.of_width("decode", self._widths[number], is_greedy=True, number=number)
            program.state.put_tokens(token_ids, positions, rows)
            firsts = {row: rows.index(row) for row in dict.fromkeys(rows)}
            places = {row: range(first, first + rows.count(row)) for row, first in firsts.items()}
            steps.append(DecodeStep(program, places))
        return steps

    def sampling_program(self, params: Sequence[SamplingParams]) -> Program:
        """Return the captured program of all rows that samples on the device, for rows with these parameters."""
        phase = sampling_phase(params)
        return self.of_width(phase, self._batch_size, is_greedy=phase == "decode")

    @property
    def sampling_rows(self) -> SamplingRows:
        """The rows that all programs of `sampling_program` share."""
        return self._builder.sampling_rows(self._batch_size)

    def warm_up(self, num_sequences: int, params: SamplingParams) -> None:
        """Build the programs for that many sequences: compile them or load them from the cache; on a GPU capture them.

        Args:
            params: sampling parameters that will be used.
        """
        whole = self.chunk(max(2, self._builder.captured_chunk), 0)
        if not self._builder.captures_graphs:
            self.step(dict.fromkeys(range(num_sequences), ([0], 0)))
            return
        if self._builder.hand_over is None:
            self.sampling_rows.warm_up(sampling_phase([params]))
            program = self.sampling_program([params])
        else:  # rank 0's host samples
            program = self.of_width("decode", self._batch_size)
        for step in captured_steps([*program.steps, *whole.steps]):
            step.prepare()

    def build_all(self) -> None:
        """Build the programs of all prompts and decode steps, and those that score every token of a prompt."""
        self.of_row("prefill", 0)
        for width in {1, self._batch_size}:
            self.of_width("decode", width)
        for is_one_token in (True, False):
            self._builder.score(1, is_one_token)

    def clear(self) -> None:
        """Drop all programs."""
        self._of_width.clear()
        self._of_row.clear()
