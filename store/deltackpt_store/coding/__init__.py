"""Pure functions that turn a chunk's bytes into fewer bytes and back.

Nothing here knows packs, ids or policy; :mod:`deltackpt_store.codecs` is the registry that gives
these functions their numbers in the format. All of them work on one chunk, hold at most a few
times its size, may run in any number of threads, and release the interpreter lock in their loops.
"""
