"""Shared test set-up."""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
# Two busy threads on two busy cores spend their time in barriers; the server started by a test inherits this.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
