"""The command line: its arguments, help, one run, and sweeps."""
