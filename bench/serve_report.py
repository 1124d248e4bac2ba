"""The tables of scripts/bench-serve.sh. Usage: python bench/serve_report.py FOLDER

FOLDER holds what was measured, a file each: saturated.json, bare.json, bulk.json, TIMES-ROUND.json of
bench/serve_load.py at so many times saturation, bench-TIMES-ROUND.json of `trommel bench` before it, and
hey-KIND.csv next to ours-KIND.json for the same load by two generators; echo.json and echo-paused.json of
bench/serve_echo.py. Medians over rounds.
"""

import csv
import json
import statistics
import sys
from pathlib import Path

folder = Path(sys.argv[1])


def read(name):
    return json.loads((folder / f"{name}.json").read_text())


def rounds(times, value):
    found = [json.loads(path.read_text())[value] for path in sorted(folder.glob(f"{times}-*.json"))]
    return statistics.median(number for number in found if number is not None)


def hey(kind, seconds):
    """Answers a second, p50 and p95 in milliseconds, of hey's list of answers."""
    with (folder / f"hey-{kind}.csv").open() as lines:
        answers = [row for row in csv.DictReader(lines) if row["status-code"] == "200"]
    times = sorted(1000 * float(row["response-time"]) for row in answers)
    at = lambda share: times[min(int(share * len(times)), len(times) - 1)]
    return len(answers) / seconds, at(0.5), at(0.95)


def least(found, threads):
    """Milliseconds of the fastest way with so many threads."""
    return min(time for way, time in found.items() if way.endswith(threads))


def main():
    saturated, bare = read("saturated")["answered"], read("bare")
    alone = read("ours-1")["p50_ms"]
    hot, paused = (least(found, "all threads") for found in (bare, bare["paused"]))
    hot_one, paused_one = (least(found, "one thread") for found in (bare, bare["paused"]))
    bulk = read("bulk")["run"]["images_per_second"]
    low, half = rounds("0.02", "p50_ms"), rounds("0.5", "p95_ms")
    print("| what | measured | of | ratio | aim |\n| --- | --- | --- | --- | --- |")
    for line in [
        ("p50 at 0.02 of saturation, ms", low, f"one photo without a server at this rate, {paused:.1f} ms", low / paused, "≤ 1.3"),
        ("the same", low, f"with one thread of ONNX Runtime, {paused_one:.1f} ms", low / paused_one, ""),
        ("p50 of one client without a pause, ms", alone, f"the same without a server, {hot:.1f} ms", alone / hot, "≤ 1.3"),
        ("the same", alone, f"with one thread of ONNX Runtime, {hot_one:.1f} ms", alone / hot_one, ""),
        ("p95 at 0.5 of saturation, ms", half, f"p50 at 0.02, {low:.1f} ms", half / low, "≤ 3"),
        ("saturated, answers/s", saturated, f"`trommel classify`, {bulk:.0f} images/s", saturated / bulk, "≥ 0.85"),
        (
            "within 120 ms at 3 times saturation, answers/s",
            rounds("3", "in_time"),
            f"saturated, {saturated:.0f}/s",
            rounds("3", "in_time") / saturated,
            "≥ 0.9",
        ),
    ]:
        print("| {} | {:.1f} | {} | {:.2f} | {} |".format(*line))
    echo, echo_paused = (read(name)["p50_ms"] for name in ("echo", "echo-paused"))
    print(f"\nA server that answers at once takes the same client {echo_paused:.1f} ms at 0.02 of saturation, and {echo:.1f} ms without a pause.")
    print("\n| times saturation | answers/s | refused | p50, ms | p95, ms | p99, ms | sent late, p95, ms |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for times in ("0.02", "0.5", "0.9", "0.95", "3"):
        values = [rounds(times, name) for name in ("answered", "refused", "p50_ms", "p95_ms", "p99_ms", "sent_late_p95_ms")]
        print("| {} | {:.1f} | {:.2%} | {:.1f} | {:.1f} | {:.1f} | {:.1f} |".format(times, *values))
    print("\n| times saturation | p95 by `trommel bench`, ms | ± | p95 in the load after it, ms | ratio, of each round |\n| --- | --- | --- | --- | --- |")
    for times in ("0.3", "0.6", "0.8"):
        loads = [json.loads(path.read_text())["loads"][0] for path in sorted(folder.glob(f"bench-{times}-*.json"))]
        said = [load["milliseconds"]["p95"] for load in loads]
        uncertain = [load["p95_uncertainty"] or float("nan") for load in loads]
        came = [json.loads(path.read_text())["p95_ms"] for path in sorted(folder.glob(f"{times}-*.json"))]
        ratios = ", ".join(f"{after / before:.2f}" for before, after in zip(said, came, strict=True))
        columns = (statistics.median(values) for values in (said, uncertain, came))
        ratio = statistics.median(after / before for before, after in zip(said, came, strict=True))
        print("| {} | {:.1f} | {:.1f} | {:.1f} |".format(times, *columns), f"{ratio:.2f} ({ratios}) |")
    seconds = float(read("seconds"))
    print("\n| one photo, no pause | load generator | answers/s | p50, ms | p95, ms |\n| --- | --- | --- | --- | --- |")
    for kind in ("1", "16"):
        ours = read(f"ours-{kind}")
        print("| {} clients | hey | {:.1f} | {:.1f} | {:.1f} |".format(kind, *hey(kind, seconds)))
        print(f"| {kind} clients | bench/serve_load.py | {ours['answered']:.1f} | {ours['p50_ms']:.1f} | {ours['p95_ms']:.1f} |")


main()
