"""Colours of kinds: any two that are drawn side by side differ visibly, on a light and on a dark page."""

from __future__ import annotations

import math
import re
from itertools import combinations, product

from ringprof.analysis.kinds.kinds import COMPUTE, COMPUTE_PARTS, KIND, ORANGE, PURPLE
from ringprof.report.palette import UNSPLIT, WAIT


def linear(channel):
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4


def xyz(colour):
    r, g, b = (linear(int(colour[offset : offset + 2], 16) / 255) for offset in (1, 3, 5))
    weights = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    return [red * r + green * g + blue * b for red, green, blue in weights]


def lab(colour):
    """Return CIE 1976 L*a*b* coordinates, under daylight."""
    x, y, z = (
        (value / white) ** (1 / 3) if value / white > 0.008856 else 7.787 * value / white + 16 / 116
        for value, white in zip(xyz(colour), (0.95047, 1.0, 1.08883), strict=True)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def contrast(colour, page):
    low, high = sorted((xyz(colour)[1], xyz(page)[1]))
    return (high + 0.05) / (low + 0.05)


COMMUNICATION = {"wire": ORANGE, "wait": WAIT, "unsplit": UNSPLIT}
DRAWN = {**{kind: KIND[kind].colour for kind in COMPUTE}, **COMMUNICATION, "memory": PURPLE}


FAR = 25
"""Least distance in L*a*b* between two colours. 2.3 is just noticeable; the two blues of attention are 26 apart."""


def free_colours():
    """Return the colours left for a new kind, farthest from all others first; none as bright as a warning."""
    used = [lab(colour) for colour in DRAWN.values()]
    grid = (f"#{red:02X}{green:02X}{blue:02X}" for red, green, blue in product(range(15, 256, 30), repeat=3))
    candidates = [colour for colour in grid if has_contrast(colour) and 15 < math.hypot(*lab(colour)[1:]) < 60]
    distance_of = {colour: min(math.dist(lab(colour), other) for other in used) for colour in candidates}
    return sorted(
        (colour for colour in candidates if distance_of[colour] >= FAR), key=lambda colour: -distance_of[colour]
    )


def has_contrast(colour):
    return contrast(colour, "#ffffff") > 1.3 and contrast(colour, "#15181c") > 2.5


def test_kind_colours_are_distinguishable():
    near = [pair for pair in combinations(DRAWN, 2) if math.dist(*(lab(DRAWN[name]) for name in pair)) < FAR]
    assert not near, f"free are {free_colours()[:9]}"


def test_every_colour_has_contrast_on_light_and_dark_pages():
    assert all(map(has_contrast, DRAWN.values()))


def test_a_free_colour_remains_for_a_new_kind():
    assert free_colours()


def test_every_compute_kind_outside_attention_is_in_one_part():
    parts = [kind for kinds in COMPUTE_PARTS.values() for kind in kinds]
    assert sorted(parts) == sorted(set(COMPUTE) - {"flash_fwd", "flash_bwd"})


def test_every_kind_has_a_colour():
    assert all(re.fullmatch(r"#[0-9A-Fa-f]{6}", kind.colour) for kind in KIND.values())
