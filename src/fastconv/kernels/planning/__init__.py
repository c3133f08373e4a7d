"""The planning that all tensor-core kernels share.

``layers`` turns passes into convolutions, ``launches`` turns planned convolutions into launches,
``limits`` holds the limits and estimates that all planners use, and ``portable`` estimates what the
portable kernels cost, which take what these decline.
"""
