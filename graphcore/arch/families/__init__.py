"""The architecture families: one module each, with `Architecture` constants that `arch.registry` collects."""
