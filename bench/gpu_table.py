"""Prints what bench/gpu.sh has measured in a folder as a table; medians of the rounds."""

import json
import statistics
import sys
from pathlib import Path


def main() -> None:
    run = Path(sys.argv[1])
    print("| model, device, precision | batch | bare, images/s | one instance | two instances | two of bare | mean fill |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    names = sorted({path.name.removesuffix(".bare.1") for path in run.glob("*.bare.1")})
    for name in names:
        bare = rounds(run, f"{name}.bare")
        for batch in bare[0]:
            limit = median(bare, batch)
            one, two = (rounds(run, f"{name}.engine-{batch}-{count}") for count in (1, 2))
            single, double = (median(engine, "images_per_second") for engine in (one, two))
            print(
                f"| {name} | {batch} | {limit:.0f} | {single:.0f} | {double:.0f} | {double / limit:.2f} "
                f"| {median(two, 'fill'):.3f} |"
            )
    print("\n| model, device, precision | the whole pipeline, images/s | of the best bare figure | GPU in use |")
    print("| --- | --- | --- | --- |")
    for name in names:
        bare = rounds(run, f"{name}.bare")
        whole = [result["run"] for result in rounds(run, f"{name}.whole")]
        limit = max(median(bare, batch) for batch in bare[0])
        rate = median(whole, "images_per_second")
        print(f"| {name} | {rate:.0f} | {rate / limit:.2f} | {utilisation(run, name)} |")


def rounds(run: Path, name: str) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(run.glob(f"{name}.[123]"))]


def median(results: list[dict], key: str) -> float:
    return statistics.median(result[key] for result in results)


def utilisation(run: Path, name: str) -> str:
    lines = [line for path in run.glob(f"{name}.gpu.*") for line in path.read_text().split()]
    return f"{statistics.mean(map(float, lines)):.0f} %" if lines else "not measured"


if __name__ == "__main__":
    main()
