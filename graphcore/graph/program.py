"""A program: the steps of one decode token or one prefill chunk, in order."""

from collections.abc import Sequence
from dataclasses import dataclass

from graphcore.graph.gpu.sampling import ChooseStep
from graphcore.graph.state import StepState
from graphcore.graph.step import FusionMemory, HeadStep, Step


@dataclass(frozen=True)
class Program:
    """Steps over one state, in the order in which they run.

    Attributes:
        choice: last step of a program that samples on the device, which can also be run alone; None for any other
            program.
        fusion: norm-fusion buffers of the steps; None if none of them may run on decode kernels.
    """

    state: StepState
    steps: Sequence[Step]
    choice: ChooseStep | None = None
    fusion: FusionMemory | None = None

    @property
    def heads(self) -> list[HeadStep]:
        """The steps that compute logits."""
        return [step for step in self.steps if isinstance(step, HeadStep)]

    def without_head(self) -> "Program":
        """Return the program up to the last block."""
        return Program(self.state, [step for step in self.steps if not isinstance(step, HeadStep)])
