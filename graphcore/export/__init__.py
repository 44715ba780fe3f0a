"""Writing a model as a GGUF file, one tensor at a time: names, order and folds, metadata, bytes."""
