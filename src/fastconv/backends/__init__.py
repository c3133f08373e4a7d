"""One module a device type, each with ``forward``, ``input_grad`` and ``weight_grad``."""
