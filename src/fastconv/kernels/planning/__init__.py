"""The planning that all tensor-core kernels share.

``layers`` turns passes into convolutions, ``launches`` turns planned convolutions into launches,
and ``limits`` holds the limits and estimates that all planners use.
"""
