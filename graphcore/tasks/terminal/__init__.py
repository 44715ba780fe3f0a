"""The output of a running task: text, tables and progress."""
