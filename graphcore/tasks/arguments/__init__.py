"""The arguments of the command line: flags, settings and bare words, and the answer to --help."""
