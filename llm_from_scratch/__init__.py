__version__ = "0.1.0"

import os

# Before torch loads: threads that wait spin for microseconds, not milliseconds, so that another busy process costs half
# of a run's speed instead of most of it; see 07d_launch, "Cores are shared".
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
