"""Settings: typed dataclasses, composed by Hydra from conf/ and the command line, plain Python past this floor."""
