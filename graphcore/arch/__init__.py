"""Which checkpoint is which model: names, folds and specs, one file per architecture."""
