"""The tasks that a user can ask for; only this floor prints."""
