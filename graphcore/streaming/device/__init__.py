"""Streaming to a device with its own memory: queues, copies and their timing."""
