"""A program: the steps of one decode token or one prefill chunk, in order."""

from collections.abc import Sequence
from dataclasses import dataclass

from graphcore.graph.choosing import ChooseStep
from graphcore.graph.state import StepState
from graphcore.graph.step import Step


@dataclass(frozen=True)
class Program:
    """Steps over one state. The scheduler (streaming floor) runs them under its policy.

    Attributes:
        choice: of a program that chooses tokens and ends rows without asking the host: its last step, to run alone.
    """

    state: StepState
    steps: Sequence[Step]
    choice: ChooseStep | None = None
