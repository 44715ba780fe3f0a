"""Lowering: from what a module computes to the operations that a decode step's targets have entries for."""
