"""Channels-last layers as products of matrices: pixels by channels, channels by output channels."""
