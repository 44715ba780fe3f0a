"""The engines that comparisons time: a module for each, with its constants (see peer.py)."""
