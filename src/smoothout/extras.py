"""What to say when a package of an extra is missing."""


def install(extra: str) -> str:
    """How to get it: from an index, or in a checkout of the repository."""
    return f"pip install 'smoothout[{extra}]', or '.[{extra}]' in a checkout"
