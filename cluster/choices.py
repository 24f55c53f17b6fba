"""Words of the configuration that the lower floors read too, without the reader of configurations.

A bare training machine has torch, and neither msgspec nor a configuration.
"""

import os
from pathlib import Path
from typing import Literal

Dtype = Literal["bfloat16", "float32"]
Device = Literal["auto", "cpu", "cuda"]
BackendChoice = Literal["auto", "torch", "native"]


def cache_dir() -> Path:
    """Where downloads and converted models are kept: PACELINE_CACHE, or the user's cache directory."""
    if configured := os.environ.get("PACELINE_CACHE"):
        return Path(configured).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "paceline"
