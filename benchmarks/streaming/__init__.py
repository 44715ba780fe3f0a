"""What streaming_compare.py is made of: the model, a peer's process and who watches it, the report."""
