"""Text to token ids and back, and chat messages to text.

`tokenizer.Tokenizer` is what the floors above use, with `incremental.IncrementalDecoder` and `stop.StopStrings` for
text that is printed while it is generated. It is built from a Hugging Face folder (`hf_folder`) or from a GGUF file's
metadata (`gguf_tokenizer`). Nothing here knows models, tensors or devices.
"""
