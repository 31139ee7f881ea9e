"""The letters that name sizes in every file of the project, and the sizes of the power state.

    B batch            T time (tokens)     H query heads      G key/value heads, G divides H
    K key width        V value width       C chunk length     N number of chunks, or of documents
    P feature width    D model width       L layers

Layout is batch first and time second: q is (B, T, H, K). A state is (B, G, P, V).
"""

from __future__ import annotations

from numbers import Integral

# Smaller denominators are replaced by this one: a query with no matching key reads 0, not 0/0.
DENOMINATOR_FLOOR = 1e-30
# Higher degrees raise scores that do occur to powers outside of float32's range, such as 1e-5^8 or
# 1e5^8. Before the power, the scores of a query are then divided by a unit of its own. Degrees 2
# and 4 keep scores from 1e-6 to 1e5 in range without.
HIGHEST_UNSCALED_DEGREE = 4
# The smallest of these units: scores far below it are rounded to 0.
SMALLEST_UNIT = 2.0**-100


def tile_width(degree: int) -> int:
    """Width of the tiles that features of this degree are laid out in.

    Widths of 8 and 2 give tiles of 64 and 16 features, which suit vector units and tensor cores. In
    exchange P exceeds the mathematical count, by 10 % at K = 64 and degree 2, and by 36 % at K = 16
    and degree 4. The other degrees are only used at tiny widths and are not tiled.
    """
    return {2: 8, 4: 2}.get(degree, 1)


def padded_width(width: int, degree: int) -> int:
    """Key width after padding with zeros to whole tiles."""
    tile = tile_width(degree)
    return -(-width // tile) * tile


def state_features(width: int, degree: int) -> int:
    """Rows P of the state as stored: one tile of features per multiset of `degree` tiles."""
    tile = tile_width(degree)
    tiles = padded_width(width, degree) // tile
    return _multisets(tiles, degree) * int(tile**degree)


def symmetric_dim(width: int, degree: int) -> int:
    """Mathematical dimension C(K + p − 1, p) of the symmetric power; both at least 1."""
    for name, size in (("width", width), ("degree", degree)):
        if not isinstance(size, Integral) or size < 1:
            raise ValueError(f"{name}: found {size!r}, wanted a whole number of at least 1")
    return _multisets(width, degree)


def _multisets(kinds: int, size: int) -> int:
    """C(kinds + size − 1, size): multisets of `size` elements of so many kinds."""
    count = 1
    # Not math.comb, which torch.compile cannot trace where it treats a width as a symbol.
    for n in range(size):
        count = count * (kinds + n) // (n + 1)
    return count


def check_degree(degree: int) -> None:
    """Raise unless the weight (q·k)^degree is linear or never negative."""
    is_integer = isinstance(degree, int) and not isinstance(degree, bool)
    if not is_integer or (degree != 1 and (degree < 2 or degree % 2)):
        raise ValueError(f"degree: found {degree!r}, wanted the integer 1 or an even one")
