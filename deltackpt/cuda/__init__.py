"""Detecting and staging on CUDA (and ROCm) devices: hash where the state lives, copy what changed.

Importing this package needs neither triton nor a GPU; triton is imported at the first launch.
"""
