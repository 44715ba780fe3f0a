"""Custom ops: the schema of each, and the same computation in plain torch."""
