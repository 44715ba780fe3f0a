"""From settings to a loaded model: opened, prepared, planned and built."""
