"""The results of a task: result.json, answers, reports and pictures."""
