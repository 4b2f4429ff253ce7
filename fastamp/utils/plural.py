"""Counts and sizes in messages."""


def plural(count: int, one: str, many: str = "") -> str:
    """Return a count with its noun.

    Args:
        count: the number.
        one: noun, with further words, for a count of 1.
        many: the same for other counts. Default: ``one`` with an ``s``.

    >>> plural(1, "image"), plural(2, "image"), plural(0, "query", "queries")
    ('1 image', '2 images', '0 queries')
    """
    return f"{count} {one if count == 1 else many or f'{one}s'}"


def mebibytes(size: float) -> str:
    """Return a size in bytes in MiB, e.g. "94.1 MiB"."""
    return f"{size / 2**20:.1f} MiB"
