"""Writes a run's metrics and sample images for TensorBoard.

    pip install tensorboard
    python -m examples.board runs/mine
    tensorboard --logdir runs

For Weights & Biases, call `wandb.init(sync_tensorboard=True)` first."""
import json, pathlib, sys
import numpy as np
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

run = pathlib.Path(sys.argv[1])
with SummaryWriter(run / "tensorboard") as board:
    for row in map(json.loads, open(run / "metrics.jsonl")):
        for key, value in row.items():
            board.add_scalar(key, value, row["step"])
    for path in sorted(run.glob("samples_*.png")):
        step = int(path.stem[8:])
        board.add_image("samples", np.array(Image.open(path)), step, dataformats="HWC")
