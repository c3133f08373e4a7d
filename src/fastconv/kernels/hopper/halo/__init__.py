"""Forward passes and input gradients, whose input's tile in shared memory serves every tap.

``correlate.py`` plans: with the best of the ``tiles``, or one that measured faster (``tuned``).
"""
