"""Flask around the Transformers pipeline (PyTorch, Pillow), behind waitress: where teams begin. As flask_pipeline.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from flask_pipeline import serve  # noqa: E402

if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
