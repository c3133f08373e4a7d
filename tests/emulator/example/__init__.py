"""A kernel family of one small kernel: the example of docs/contributing.md, which tests run."""
