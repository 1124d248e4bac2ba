#!/usr/bin/env python3
"""Writes docs/configuration.md from the comments of the settings in the code, so that the two cannot
differ. With --check it only compares, and fails where they do."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/configuration.md"
WORKER = "crates/worker/src/config.rs"

# Sections with the file and the type that define them; those of other crates have files of their own.
SECTIONS = [
    ("", WORKER, "WorkerConfig"),
    ("preprocess", WORKER, "PreprocessConfig"),
    ("infer", "crates/worker/src/config/infer.rs", "InferConfig"),
    ("sink", WORKER, "SinkConfig"),
    ("ingest", WORKER, "IngestConfig"),
    ("retry", WORKER, "RetryPolicy"),
    ("shutdown", WORKER, "ShutdownConfig"),
    ("access", WORKER, "AccessConfig"),
    ("broker", "crates/queue/src/jetstream/config.rs", "BrokerConfig"),
    ("s3", "crates/storage/src/s3/mod.rs", "S3Config"),
    ("cloud", "crates/storage/src/cloud/mod.rs", "CloudConfig"),
    ("serve", "crates/worker/src/serve_config.rs", "ServeConfig"),
    ("live", "crates/worker/src/config/live.rs", "LiveConfig"),
    ("http", "crates/storage/src/http/config.rs", "HttpConfig"),
    ("video", "crates/source/src/ffmpeg/mod.rs", "VideoConfig"),
    ("postgres", "crates/sink/src/table/mod.rs", "PostgresConfig"),
    ("telemetry", "crates/worker/src/config/telemetry.rs", "TelemetryConfig"),
]

KINDS = [
    (r"Vec<", "list of texts"),
    (r"bool", "true or false"),
    (r"Duration", "duration"),
    (r"f32|f64", "number"),
    (r"usize|u8|u16|u32|u64|NonZero", "whole number"),
    (r"PathBuf", "path"),
    (r"SocketAddr", "address"),
    (r"", "text"),
]

HEAD = """# Configuration

Settings come from four places; a later one wins: the defaults below, a file (`trommel.toml` in the current directory, or
`--config FILE`), environment variables, and flags. `trommel config` prints the result, without passwords.
All values that cannot work are reported at once, before anything starts. What a row holds is not configured
here: it is part of the job (`trommel classify --help`, `trommel submit --help`).

```toml
# trommel.toml
memory-budget = 2048

[infer]
device = "cuda:0"
max-wait = "10ms"
```

The same in the environment: `TROMMEL_INFER__DEVICE=cuda:0 TROMMEL_INFER__MAX_WAIT=10ms`. Durations have a unit (`200ms`, `30s`,
`15m`, `30d`). This page is written by `scripts/configuration.py` from the comments in the code.
"""


def fields(file, name):
    """The settings of a type: name, type, comment."""
    text = (ROOT / file).read_text()
    found = re.search(rf"pub struct {name} \{{\n(.*?)\n\}}", text, re.S)
    if not found:
        sys.exit(f"configuration.py: {file} has no struct {name}")
    comment, skipped = [], False
    for line in found[1].splitlines():
        line = line.strip()
        if line.startswith("///"):
            comment.append(line[3:].strip())
        elif line.startswith("#[serde(skip"):
            skipped = True
        elif field := re.match(r"pub (\w+): (.+),$", line):
            if not skipped:
                yield field[1].replace("_", "-"), field[2], " ".join(comment)
            comment, skipped = [], False


def rows(section, file, name):
    sections = {section for section, _, _ in SECTIONS}
    for option, kind, comment in fields(file, name):
        if not section and option in sections:
            continue
        default = re.search(r"\s*Default: (.+?)\.(?=\s|$)", comment)
        if not default:
            sys.exit(f"configuration.py: {file}: {section}.{option} names no default")
        meaning = comment.replace(default[0], "").strip()
        kind = next(words for pattern, words in KINDS if re.search(pattern, kind))
        path = f"{section}.{option}" if section else option
        variable = "TROMMEL_" + path.replace(".", "__").replace("-", "_").upper()
        yield f"| `{path}` | {kind} | {default[1]} | {meaning} | `{variable}` |"


def page():
    parts = [HEAD]
    for section, file, name in SECTIONS:
        title = f"## `[{section}]`" if section else "## The process"
        table = "| option | type | default | meaning | variable |\n| --- | --- | --- | --- | --- |"
        parts.append("\n".join([title, "", table, *rows(section, file, name)]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        if not PAGE.exists() or PAGE.read_text() != page():
            sys.exit("docs/configuration.md is not what the code says; run scripts/configuration.py")
    else:
        PAGE.write_text(page())
