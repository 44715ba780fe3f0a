"""What is computed: frozen specs and the modules built from them. Knows nothing of files, devices or graphs."""
