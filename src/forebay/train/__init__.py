"""Training behind `forebay train`: model folder and data in, trained model folder out.

    options    what a run is asked to do       settings   the configuration it resolves to
    model      the model folder                corpus     the data as rows
    loop       windows in, updates out         forward    one forward pass and its token losses
    evaluate   the loss on held-out rows       save       the run's folder
    records    figures                         report     where figures go
    signals    how a run is ended              run        all of it in order

It has no arithmetic of its own beside the loss: updates are the engine's.
"""

from __future__ import annotations

from forebay.train.options import (
    ExistingOutput,
    GradientCheckpointing,
    Offload,
    Packing,
    SaveEvery,
    Schedule,
    TrainOptions,
)

__all__ = [
    "ExistingOutput",
    "GradientCheckpointing",
    "Offload",
    "Packing",
    "SaveEvery",
    "Schedule",
    "TrainOptions",
]
