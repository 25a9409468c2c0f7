"""A torch of one function."""

import os

if os.environ.get("STAND_IN_FAILS"):
    raise ImportError("the stand-in fails")

seen = os.environ.get("SET_BEFORE_IMPORT")
watchers = []


def backward():
    for watcher in watchers:
        watcher()
