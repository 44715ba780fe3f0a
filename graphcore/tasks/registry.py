"""Names to tasks; importing this imports every task, and torch with them."""

from collections.abc import Mapping
from types import MappingProxyType

from graphcore.registry import collect
from graphcore.tasks import commands
from graphcore.tasks.task import Task

TASKS: Mapping[str, Task] = MappingProxyType({task.name: task for task in collect(commands, Task)})
