"""One module per architecture family, each holding its `Architecture` constants; found by `arch.registry`."""
