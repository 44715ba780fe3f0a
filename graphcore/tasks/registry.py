"""The registry of tasks by name; a task's module is imported when the task is asked for."""

import pkgutil
from importlib import import_module

from graphcore.registry import lookup
from graphcore.tasks import commands
from graphcore.tasks.task import Task

NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(commands.__path__)))


def task_named(name: str) -> Task:
    """Return the task of that name.

    Raises:
        ConfigError: there is no such task.
    """
    module = import_module(f"{commands.__name__}.{lookup('task', name, {known: known for known in NAMES})}")
    tasks = [value for value in vars(module).values() if isinstance(value, Task)]
    assert [task.name for task in tasks] == [name], f"{module.__name__} defines {tasks}, not the task {name}"
    return tasks[0]
