"""Makes what all peers work on from a folder of photos: a folder of 1,000 of which 60 are broken, and both folders as
tar files for the WebDataset loop.

Usage: python bench/compare/prepare.py PHOTOS WORK
Writes WORK/broken, WORK/photos-tar and WORK/broken-tar. Broken are: 20 that end in their middle, 20 of no bytes, 20
that are texts.
"""

import sys
import tarfile
from pathlib import Path

IMAGES = 1_000
EACH_KIND = 20
# Images of a tar file: as many as the other peers have rows in a file.
SHARD = 500


def main() -> None:
    photos, work = Path(sys.argv[1]), Path(sys.argv[2])
    broken = work / "broken"
    broken.mkdir(parents=True)
    for number, path in enumerate(sorted(photos.iterdir())[:IMAGES]):
        content = path.read_bytes()
        (broken / path.name).write_bytes(damage(content, number) if number % 16 == 5 and number < 960 else content)
    for folder in photos, broken:
        pack(folder, work / f"{folder.name}-tar")


def damage(content: bytes, number: int) -> bytes:
    """One of three kinds of damage, in turn: 60 of the numbers below 960 are 5 more than a multiple of 16."""
    kind = number // 16 % (60 // EACH_KIND)
    return [content[: len(content) // 2], b"", b"this is no image\n" * 100][kind]


def pack(folder: Path, tars: Path) -> None:
    tars.mkdir()
    paths = sorted(folder.iterdir())
    for start in range(0, len(paths), SHARD):
        with tarfile.open(tars / f"{start // SHARD:05}.tar", "w") as tar:
            for path in paths[start : start + SHARD]:
                tar.add(path, path.name)


if __name__ == "__main__":
    main()
