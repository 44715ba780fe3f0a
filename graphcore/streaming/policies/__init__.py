"""The streaming policies: one file for each value of `streaming.policy`."""
