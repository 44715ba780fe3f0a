"""Writing a model as a GGUF file, one tensor at a time: its tensors' names, order and folds, its metadata, its bytes."""
