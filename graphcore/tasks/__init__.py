"""The tasks of the command line, such as generate, chat and bench; the packages below print nothing."""
