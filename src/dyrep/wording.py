"""Numbers in words, the same wherever they are told."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """A time in words.

    Example:
        >>> duration(3.2), duration(75), duration(7300)
        ('3 s', '1 min 15 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def large(number: float) -> str:
    """A large number in thousands, millions or billions.

    Example:
        >>> large(1_222_032), large(640)
        ('1.22 M', '640')
    """
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:g}"


def counted(number: int, thing: str, plural: str = "s") -> str:
    """So many things.

    Example:
        >>> counted(1, "block"), counted(1200, "branch", "es")
        ('1 block', '1,200 branches')
    """
    return f"{number:,} {thing}{'' if number == 1 else plural}"
