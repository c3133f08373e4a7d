"""Whole networks: their kernels compiled before the first step, their layers exchanged.

:func:`fastconv.optimize` is in :mod:`fastconv.network.optimization`, :func:`fastconv.convert` and
:func:`fastconv.restore` are in :mod:`fastconv.network.conversion`,
:func:`fastconv.prepare` and :func:`fastconv.preparing` in :mod:`fastconv.network.preparation`.

This file imports nothing: :mod:`fastconv.ops` imports :mod:`fastconv.network.lookahead`, and all
other modules here import :mod:`fastconv.ops`.
"""
