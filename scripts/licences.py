#!/usr/bin/env python3
"""Writes the licences of the crates that are in the binary: each text once, with who it is of.

    scripts/licences.py OUTPUT
"""

import json
import pathlib
import subprocess
import sys

NAMES = ("license", "licence", "copying", "notice", "unlicense")


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main(output):
    tree = run("cargo", "tree", "--package", "trommel", "--edges", "normal", "--prefix", "none", "--format", "{p}")
    linked = {tuple(line.split()[:2]) for line in tree.splitlines() if line and "(proc-macro)" not in line}
    packages = json.loads(run("cargo", "metadata", "--format-version", "1"))["packages"]
    texts, missing = {}, []
    for package in packages:
        name, version = package["name"], package["version"]
        if (name, f"v{version}") not in linked or package["source"] is None:
            continue
        title = f"{name} {version} ({package['license'] or 'licence in its text'})"
        folder = pathlib.Path(package["manifest_path"]).parent
        # The crates around C libraries hold those in folders of their own.
        files = folder.rglob("*") if name.endswith("-sys") else folder.iterdir()
        found = [file for file in sorted(files) if file.is_file() and file.name.lower().startswith(NAMES)]
        if not found:
            missing.append(title)
        for file in found:
            texts.setdefault(file.read_text(errors="replace").strip(), []).append(title)
    with open(output, "w", encoding="utf-8") as out:
        out.write("Trommel holds the crates below. Each text stands under those it belongs to.\n")
        for text, titles in sorted(texts.items(), key=lambda item: item[1]):
            out.write("\n" + "=" * 80 + "\n" + "\n".join(sorted(set(titles))) + "\n\n" + text + "\n")
        if missing:
            out.write("\n" + "=" * 80 + "\nWithout a text of their own, under the licence named:\n\n")
            out.write("\n".join(sorted(missing)) + "\n")


main(sys.argv[1])
