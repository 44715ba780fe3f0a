"""The mathematics of a model: frozen specs and the modules built from them. Knows no files, devices or graphs."""
