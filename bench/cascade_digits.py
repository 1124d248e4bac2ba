"""Digits for scripts/bench-cascade.sh, and what became of them.

Usage: python bench/cascade_digits.py make FOLDER COUNT      writes that many different digits as PNG
       python bench/cascade_digits.py list FOLDER SEED       prints their paths in an order of its own
       python bench/cascade_digits.py share LARGE ROWS       prints agreement with the large model, and cost

The digits are those that scikit-learn bundles which the shipped model has not seen (every fifth), each moved,
turned, scaled and made noisy in another way.
"""

import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

SIDE = 64


def main() -> None:
    match sys.argv[1:]:
        case ["make", folder, count]:
            make(Path(folder), int(count))
        case ["list", folder, seed]:
            paths = sorted(Path(folder).iterdir())
            order = np.random.default_rng(int(seed)).permutation(len(paths))
            print("\n".join(str(paths[place]) for place in order))
        case ["share", large, rows]:
            share(Path(large), Path(rows))
        case _:
            sys.exit(__doc__)


def make(folder: Path, count: int) -> None:
    from sklearn.datasets import load_digits

    folder.mkdir(parents=True)
    random = np.random.default_rng(5)
    unseen = load_digits().images[4::5]
    for number in range(count):
        levels = np.clip(unseen[number % len(unseen)] * 255.0 / 16.0, 0, 255).astype(np.uint8)
        picture = Image.fromarray(levels).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        angle, scale = random.normal(0, 4), 1 + random.normal(0, 0.04)
        moved = random.normal(0, 1.5, 2)
        picture = picture.rotate(angle, Image.Resampling.BICUBIC, translate=tuple(map(int, moved)))
        side = int(SIDE * scale)
        picture = picture.resize((side, side), Image.Resampling.BICUBIC)
        canvas = Image.new("L", (SIDE, SIDE))
        canvas.paste(picture, ((SIDE - side) // 2, (SIDE - side) // 2))
        noisy = np.asarray(canvas) + random.normal(0, 6, (SIDE, SIDE))
        Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).save(folder / f"{number:06}.png")


def labels(path: Path) -> dict:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["uri"]: row for row in rows}


def share(large: Path, rows: Path) -> None:
    expected, found = labels(large), labels(rows)
    assert expected.keys() == found.keys(), "not the same images"
    same = sum(found[uri]["label"] == row["label"] for uri, row in expected.items())
    small = sum(row["decided_by"] == "small" for row in found.values())
    print(f"{same / len(found):.4f} {1 - small / len(found):.3f}")


if __name__ == "__main__":
    main()
