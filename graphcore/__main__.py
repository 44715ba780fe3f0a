"""`python -m graphcore`: the installed command, without its script."""

from graphcore.cli.start import start

if __name__ == "__main__":
    start()
