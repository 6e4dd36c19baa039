"""All callbacks in one place, as in Keras: `from trainers.callbacks import EarlyStopping`."""

from trainers.watching.callback import Callback
from trainers.watching.check_divergence import CheckDivergence
from trainers.watching.check_gradients import CheckGradients
from trainers.watching.csv_logger import CSVLogger
from trainers.watching.early_stopping import EarlyStopping
from trainers.watching.model_checkpoint import ModelCheckpoint
from trainers.watching.prometheus import Prometheus
from trainers.watching.tensorboard import TensorBoard
from trainers.watching.timeline import Timeline

__all__ = [
    "CSVLogger",
    "Callback",
    "CheckDivergence",
    "CheckGradients",
    "EarlyStopping",
    "ModelCheckpoint",
    "Prometheus",
    "TensorBoard",
    "Timeline",
]
