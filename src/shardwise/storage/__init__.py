"""Where the bytes of a source lie: local directories, and object stores by URL.

Everything above this room gives a path. A path that begins with a scheme and ``://`` is a URL, and its bytes come from the store that
it names; any other path is a local one, and goes to the operating system.
"""

from .look import (
    absolute,
    bytes_below,
    exists,
    files_below,
    files_in,
    folders_in,
    is_directory,
    is_file,
    looking_once,
    names_in,
    place_at,
    read_range,
    read_whole,
    real,
    stat_of,
    stat_of_expected,
)
from .options import configure_storage
from .records import Held, Listing, Moved, Stat, Store
from .requests import Requests, counted_here, counting
from .stores import fetch, store_of
from .urls import Place, is_url, join, place_of

__all__ = [
    "Held",
    "Listing",
    "Moved",
    "Place",
    "Requests",
    "Stat",
    "Store",
    "absolute",
    "bytes_below",
    "counted_here",
    "counting",
    "exists",
    "fetch",
    "files_below",
    "files_in",
    "folders_in",
    "is_directory",
    "is_file",
    "is_url",
    "join",
    "looking_once",
    "names_in",
    "place_at",
    "place_of",
    "read_range",
    "read_whole",
    "real",
    "stat_of",
    "stat_of_expected",
    "configure_storage",
    "store_of",
]
