"""Weight gradient, and with it the bias gradient, of narrow groups on plain CUDA cores.

A thread accumulates the products of some kernel rows over patches of the output's gradient; splits
of the images (split-K) are added up by a second kernel. It is taken for all narrow groups that the
family accepts: see ``layer.py``.
"""
