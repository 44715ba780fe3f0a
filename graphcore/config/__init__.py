"""Settings: typed dataclasses, composed by Hydra from conf/ and the command line; tasks and engine get plain values."""
