"""Choose the colours of all pictures: hue by kind of unit, shade by chunk."""

import colorsys
from typing import NamedTuple

# Hue in degrees and saturation of each kind.
HUES = {"F": (212, 0.72), "B": (28, 0.88), "I": (338, 0.65), "W": (162, 0.60)}
DARKEST, LIGHTEST = 0.46, 0.76
NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


class Rgb(NamedTuple):
    """Red, green and blue, 0 to 255."""

    red: int
    green: int
    blue: int

    @property
    def hex(self) -> str:
        return f"#{self.red:02x}{self.green:02x}{self.blue:02x}"


STAGES = (Rgb(116, 86, 214), Rgb(47, 134, 208), Rgb(34, 160, 140), Rgb(211, 152, 40))


def unit_colour(kind: str, chunk: int, num_repeats: int) -> Rgb:
    """Return the fill colour of a unit; later chunks are lighter."""
    hue, saturation = HUES[kind]
    step = chunk / (num_repeats - 1) if num_repeats > 1 else 0.15
    lightness = DARKEST + (LIGHTEST - DARKEST) * step
    return Rgb(*(round(255 * c) for c in colorsys.hls_to_rgb(hue / 360, lightness, saturation)))


def stage_colour(stage: int, num_stages: int) -> Rgb:
    """Return the line colour of a stage, violet to amber; legible on dark and light ground."""
    position = (len(STAGES) - 1) * (stage / (num_stages - 1) if num_stages > 1 else 0.0)
    below = min(int(position), len(STAGES) - 2)
    pairs = zip(STAGES[below], STAGES[below + 1], strict=True)
    return Rgb(*(round(a + (b - a) * (position - below)) for a, b in pairs))


def ink(fill: Rgb) -> Rgb:
    """Return white or near black, whichever can be read on a fill colour."""
    linear = [(c / 255 / 12.92) if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in fill]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    # WCAG's contrast with white; above 3.5 white looks better even where black scores higher.
    return Rgb(255, 255, 255) if 1.05 / (luminance + 0.05) >= 3.5 else Rgb(18, 22, 28)
