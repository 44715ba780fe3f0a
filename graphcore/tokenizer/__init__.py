"""Converts text to token ids and back, and chat messages to text.

Other packages use `tokenizer.Tokenizer`, and `text_stream` for text that is printed while it is generated. A tokenizer
is built from a Hugging Face folder (`hf_folder`) or from a GGUF file's metadata (`gguf_tokenizer`). This package
does not depend on models, tensors or devices.
"""
