"""graphcore::attend on a GPU."""
