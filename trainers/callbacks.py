"""All callbacks in one place, as in Keras: `from trainers.callbacks import EarlyStopping`."""

from trainers.watching.callback import Callback
from trainers.watching.csv_logger import CSVLogger
from trainers.watching.early_stopping import EarlyStopping
from trainers.watching.learning_rate import LearningRateSchedule
from trainers.watching.model_checkpoint import ModelCheckpoint
from trainers.watching.tensorboard import TensorBoard
from trainers.watching.timeline import Timeline

__all__ = [
    "CSVLogger",
    "Callback",
    "EarlyStopping",
    "LearningRateSchedule",
    "ModelCheckpoint",
    "TensorBoard",
    "Timeline",
]
