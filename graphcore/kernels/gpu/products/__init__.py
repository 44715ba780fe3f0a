"""Products of a decode step with dense or packed weight matrices."""
