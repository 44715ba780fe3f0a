"""What a task prints and writes: the console, result.json, answers, records and pictures."""
