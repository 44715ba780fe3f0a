"""Model architectures: configs, tensor names, folds and specs, one file per family."""
