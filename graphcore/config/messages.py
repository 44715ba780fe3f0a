"""Hydra's and OmegaConf's errors as one line: what key, what value, what is allowed."""


def one_line(error: BaseException) -> str:
    """Return the error's text, and its cause's where that says more, without line breaks.

    OmegaConf puts the offending key on lines of its own ("full_key: sampling.top_k"); they are kept, in parentheses.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if error.__cause__ is not None and "full_key" not in str(error):
        lines += [line.strip() for line in str(error.__cause__).splitlines() if line.strip()]
    said = [
        line for line in lines if not line.startswith(("full_key:", "object_type=", "reference_type=", "Set the env"))
    ]
    keys = [line.removeprefix("full_key:").strip() for line in lines if line.startswith("full_key:")]
    text = " ".join(dict.fromkeys(said))
    return f"{text} (key {keys[0]})" if keys and keys[0] not in text else text
