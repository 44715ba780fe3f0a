"""Run graphcore from a checkout: python run.py model=gemma3 prompt="..."."""

from graphcore.tasks.main import main

if __name__ == "__main__":
    main()
