"""Settings: typed dataclasses, composed by Hydra from conf/ and the command line; other packages see plain Python."""
