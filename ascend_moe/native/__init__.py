"""Native libraries: finding, opening and typing them, and the cache of those compiled at run time."""
