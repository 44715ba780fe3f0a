"""Models that graphcore has no architecture for, run by transformers' own classes."""
