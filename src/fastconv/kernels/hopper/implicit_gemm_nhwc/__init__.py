"""Channels-last layers as products of matrices: pixels by channels, channels by output channels.

``layer`` is what is multiplied, ``tiles`` how much of it at once and what that takes.
"""
