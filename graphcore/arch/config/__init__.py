"""The typed settings of a model, and readers of each kind of setting. Model types are defined elsewhere in arch/."""
