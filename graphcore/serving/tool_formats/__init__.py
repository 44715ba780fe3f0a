"""Tool calls and thinking in the syntax of each model family: parsing, grammars, messages and checks."""
