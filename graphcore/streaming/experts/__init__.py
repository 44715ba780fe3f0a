"""Movement of single experts: pools of slots, the cache that fetches into them, and reads from files."""
