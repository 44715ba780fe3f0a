"""Names to tasks; a task is imported when it is asked for, with what it alone needs."""

import pkgutil
from importlib import import_module

from graphcore.registry import lookup
from graphcore.tasks import commands
from graphcore.tasks.task import Task

NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(commands.__path__)))


def task_named(name: str) -> Task:
    """Return a task.

    Raises:
        ConfigError: there is none of that name.
    """
    module = import_module(f"{commands.__name__}.{lookup('task', name, {known: known for known in NAMES})}")
    tasks = [value for value in vars(module).values() if isinstance(value, Task)]
    assert [task.name for task in tasks] == [name], f"{module.__name__} defines {tasks}, not the task {name}"
    return tasks[0]
