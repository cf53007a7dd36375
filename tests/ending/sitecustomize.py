"""Processes that tests start end without a last search through all objects of torch for garbage.

That search is a fifth of what loading torch costs, and several hundred processes load it.
"""

import atexit
import gc

atexit.register(gc.freeze)
