"""`trommel fit` compared with scikit-learn's logistic regression, on the digits that scikit-learn ships.

Usage: python bench/fit_peers.py TROMMEL
The embedding of a digit is its 64 grey values. scikit-learn gets the same values, divided as `fit` divides them, the
same choices of C, and five folds of its own.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_score


def main():
    digits = load_digits()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        with open(folder / "rows.jsonl", "w") as rows, open(folder / "truth.csv", "w") as truth:
            truth.write("uri,label\n")
            for index, (vector, label) in enumerate(zip(digits.data, digits.target)):
                row = {
                    "job_id": "digits", "index": index, "uri": f"{index}.png", "status": "ok", "top": [], "model": "pixels",
                    "model_version": "0123456789ab", "attempts": 1, "embedding": vector.tolist(),
                }  # fmt: skip
                rows.write(json.dumps(row) + "\n")
                truth.write(f"{index}.png,{label}\n")
        command = [sys.argv[1], "fit", folder / "rows.jsonl", "--labels", folder / "truth.csv", "--json"]
        told = subprocess.run(command + ["--output", folder / "head.json"], check=True, capture_output=True).stdout
    ours = json.loads(told)
    vectors = digits.data / np.sqrt((digits.data**2).mean())
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    theirs = {
        c: cross_val_score(LogisticRegression(C=c, max_iter=5000), vectors, digits.target, cv=folds).mean()
        for c in (0.01, 0.1, 1.0, 10.0, 100.0)
    }
    for c, accuracy in ours["tried"]:
        print(f"C = {c}: trommel {accuracy:.4f}, scikit-learn {theirs[c]:.4f}")
    print(f"chosen: trommel {ours['accuracy']:.4f}, scikit-learn {max(theirs.values()):.4f}")


if __name__ == "__main__":
    main()
