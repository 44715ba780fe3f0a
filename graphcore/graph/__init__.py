"""What is compiled and captured: steps, programs, and the builder that makes them from a decoder."""
