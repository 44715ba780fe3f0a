"""Quantised weights of Hugging Face's folders: several stored tensors, presented as one packed tensor."""
