"""Searches for the best options: trials of an objective on parts of the ranks, and the command `search`."""

from trainers.apps.search.searching import SearchResult, search
from trainers.apps.search.study import Ended
from trainers.apps.search.trial import Trial

__all__ = ["Ended", "SearchResult", "Trial", "search"]
