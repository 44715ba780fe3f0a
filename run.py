"""Run graphcore from a checkout: python run.py model=gemma3 prompt="..."."""

from graphcore.cli.start import start

if __name__ == "__main__":
    start(keeps_results=True)
