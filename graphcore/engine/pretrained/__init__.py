"""The engine behind the interface of transformers: a PreTrainedModel with its cache and config."""
