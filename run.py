"""Run graphcore from a checkout: python run.py model=gemma3 prompt="..."."""

from graphcore.tasks.start import start

if __name__ == "__main__":
    start()
