__version__ = "0.1.0"

import os
from pathlib import Path

# Installed, `llm_from_scratch.kernels` lies in the package; in a clone it is the folder beside it.
if (Path(__file__).parents[1] / "kernels" / "attention.py").is_file() and (Path(__file__).parents[1] / "settings.ini").is_file():
    __path__.append(str(Path(__file__).parents[1]))

# Before torch loads: threads that wait spin for microseconds, not milliseconds, so that another busy process costs half
# of a run's speed instead of most of it; see 07d_launch, "Cores are shared".
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
