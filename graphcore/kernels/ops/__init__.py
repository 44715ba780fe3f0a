"""Custom ops: their schemas, and reference implementations in plain torch."""
