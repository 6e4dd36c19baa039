"""The calls of Horovod's module of this name, for scripts that import them from there."""

from trainers.horovod import calls, collectives, session
from trainers.horovod.calls import *
from trainers.horovod.collectives import *
from trainers.horovod.errors import HorovodInternalError
from trainers.horovod.session import *

__all__ = ["HorovodInternalError"]
__all__ += calls.__all__
__all__ += collectives.__all__
__all__ += session.__all__
