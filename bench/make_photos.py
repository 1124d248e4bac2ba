"""Writes synthetic photographs for benchmarks: smooth shapes with camera-like noise.

Usage: python bench/make_photos.py FOLDER COUNT WIDTH HEIGHT
The same arguments give the same files. Quality 85 to 95, 4:2:0, as cameras and web sites write.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

DISTINCT = 200


def main() -> None:
    folder, count, width, height = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(11)
    encoded: list[Path] = []
    for number in range(count):
        path = folder / f"{number:06}.jpg"
        if number < DISTINCT:
            quality = int(random.integers(85, 96))
            photo(random, width, height).save(path, quality=quality, subsampling="4:2:0")
            encoded.append(path)
        else:
            path.write_bytes(encoded[number % DISTINCT].read_bytes())


def photo(random: np.random.Generator, width: int, height: int) -> Image.Image:
    """Coarse colours enlarged smoothly, edges of a few rectangles, and noise in every pixel."""
    coarse = random.integers(0, 256, (9, 12, 3), dtype=np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    pixels = np.asarray(smooth).astype(np.int16)
    for _ in range(12):
        top, left = random.integers(0, height), random.integers(0, width)
        bottom, right = top + random.integers(5, height // 2), left + random.integers(5, width // 2)
        pixels[top:bottom, left:right] += random.integers(-70, 70, 3, dtype=np.int16)
    pixels += random.normal(0, 6, pixels.shape).astype(np.int16)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


if __name__ == "__main__":
    main()
