"""trommel tune next to a full grid: what each finds, measured again in turns, and the time that each takes.

Usage: python bench/tune_grid.py CASE... Run by scripts/bench-tune.sh.
"""

import itertools
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
MADE = pathlib.Path(os.environ["BENCH"])
IMAGES, ROUNDS = int(os.environ.get("IMAGES", 256)), int(os.environ.get("ROUNDS", 21))
CORES = [int(core) for core in os.environ.get("CORES", "0,1").split(",")]
# A model, its images, the objective, and how many times as many images a trial has.
CASES = {
    "digits": ("models/digits", pathlib.Path(os.environ["XDG_CACHE_HOME"]) / "digits", [], 8),
    "depthwise": (MADE / "depthwise", MADE / "photos", [], 1),
    "requests": (MADE / "depthwise", MADE / "photos", ["--p95", "80ms", "--rate", "40", "--duration", "3s"], 1),
}


def digits(folder):
    """As many copies of the digits as a trial takes."""
    folder.mkdir()
    examples = sorted(path for path in (ROOT / "models/digits/examples").rglob("*") if path.is_file())
    for number, digit in zip(range(IMAGES * CASES["digits"][3]), itertools.cycle(examples)):
        shutil.copy(digit, folder / f"{number:06}{digit.suffix}")


def tune(case, settings=None):
    """What a search finds; with settings, one trial of them."""
    model, images, objective, times = CASES[case]
    command = [os.environ["TROMMEL"], "tune", images, "--model", model, "--images", str(IMAGES * times),
               "--dry-run", "--json", *objective]
    environment = dict(os.environ)
    if settings:
        command += ["--max-batch", settings["max-batch"], "--instances", settings["instances"],
                    "--intra-threads", settings["intra-threads"], "--preprocess-threads", settings["preprocess-threads"]]
        environment["TROMMEL_PREPROCESS__MAX_IN_FLIGHT"] = str(settings["max-in-flight"])
        if not objective:
            environment["TROMMEL_INFER__MAX_WAIT"] = settings["max-wait"]
    ended = subprocess.run([str(word) for word in command], env=environment, capture_output=True, cwd=ROOT)
    if ended.returncode not in (0, 3):  # 3: the settings do not meet the latency
        sys.exit(ended.stderr.decode())
    return json.loads(ended.stdout)


def rate(case, settings):
    """Images a second of one trial; none where the latency is not met."""
    tried = tune(case, settings)["tried"][-1]
    return tried["images_per_second"] if tried["keeps"] else 0.0


def grid(case):
    """All settings that tune searches on these cores."""
    cores = len(CORES)
    objective = CASES[case][2]
    instances = sorted({count for count in (1, 2, cores // 2, cores) if 1 <= count <= cores})
    threads = sorted({-(-cores // 2), cores, cores + -(-cores // 2)})
    held, waits = ([4], [None]) if objective else ([2, 4, 8], ["2ms", "20ms", "100ms"])
    for batch, count, each, images, wait in itertools.product((1, 2, 4, 8, 16), instances, threads, held, waits):
        yield {"max-batch": batch, "instances": count, "intra-threads": cores // count, "preprocess-threads": each,
               "max-in-flight": images * each, "max-wait": wait}


def measure(case):
    began = time.monotonic()
    outcome = tune(case)
    # A gain within the noise is no reason to leave the defaults.
    is_better = outcome["choice"] == "only-these" or "better" in outcome["choice"]
    found = outcome["best" if is_better else "default"]
    tuned = time.monotonic() - began
    began = time.monotonic()
    tried = [(rate(case, settings), settings) for settings in grid(case)]
    took = time.monotonic() - began
    best = max(tried, key=lambda trial: trial[0])[1]
    both, rates = (found, best), ([], [])
    for number in range(ROUNDS):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            rates[side].append(rate(case, both[side]))
    ours, theirs = map(statistics.median, rates)
    ratio = statistics.median(one / other for one, other in zip(*rates) if other > 0)
    print(f"| {case} | {len(tried)} | {took:.0f} | {tuned:.0f} | {tuned / took:.2f} | {theirs:.1f} | {ours:.1f} | {ratio:.3f} |",
          flush=True)
    print(f"{case}: tune found {found}, the grid {best}; {rates}", file=sys.stderr)


def main(cases):
    os.sched_setaffinity(0, CORES)
    print("| objective | trials of the grid | grid, s | tune, s | share | grid's best, images/s | tune's, images/s | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    digits(CASES["digits"][1])
    for case in cases:
        measure(case)


if __name__ == "__main__":
    main(sys.argv[1:])
