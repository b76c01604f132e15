"""Sinks that mirror a run while it is recorded, one file per tool; a tool is imported when its sink is made."""

from gyroscope.integrations.mirror import Mirror
from gyroscope.integrations.mlflow import MLflow
from gyroscope.integrations.tensorboard import TensorBoard
from gyroscope.integrations.trackio import Trackio
from gyroscope.integrations.wandb import Wandb

__all__ = ["MLflow", "Mirror", "TensorBoard", "Trackio", "Wandb"]
