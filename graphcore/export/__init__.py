"""Writing a model as a GGUF file, one tensor at a time: names, order, folds, metadata and bytes."""
