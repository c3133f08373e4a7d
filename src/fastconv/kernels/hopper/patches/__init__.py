"""Patch embeddings of volumes, whose kernel is their stride: matrix products at memory's speed."""
