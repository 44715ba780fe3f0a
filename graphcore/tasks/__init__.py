"""What a user asks for; the only floor that prints."""
