"""An HTTP server that clients of OpenAI's and Anthropic's interfaces accept (task=serve)."""
