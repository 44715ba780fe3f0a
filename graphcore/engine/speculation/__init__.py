"""Speculative decoding: draft tokens that a decode step checks beside the known one, without changing any answer."""
