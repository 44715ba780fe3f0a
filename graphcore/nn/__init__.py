"""Model definitions: frozen specs and the torch modules built from them. Independent of files, devices and graphs."""
